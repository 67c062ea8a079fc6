# SPDX-License-Identifier: Apache-2.0
"""Sizes that the host and the CUDA kernels have to agree on."""

from __future__ import annotations

SAMPLE_THREADS = 1024  # of each block of `sample` and `log_probabilities`
ROW_SCRATCH_BYTES = 32 + 3 * 16 * SAMPLE_THREADS  # `sample` needs for each row
MAX_VOCAB = 2**19  # tokens whose weights, in units of 2^-44, can be added up in 64 bits
MOST_LOGPROBS = 64  # likeliest tokens of a row that `log_probabilities` can tell
