# SPDX-License-Identifier: Apache-2.0
"""Sizes that the host and the CUDA kernels share."""

from __future__ import annotations

from edgellm_ros.kernels.tree_protocol import (  # noqa: F401
    MOST_CANDIDATES,
    MOST_CHAIN_TOKENS,
    MOST_TABLE_ENTRIES,
    MOST_TREE_NODES,
)

SAMPLE_THREADS = 1024  # per block of kernels that read logits or tables of candidates
MAX_BLOCKS_PER_ROW = 32  # of `sample` and `sample_path`
ROW_SCRATCH_BYTES = 40 + 2 * 8 * MAX_BLOCKS_PER_ROW + 3 * 16 * SAMPLE_THREADS  # of the same, per row
MAX_VOCAB = 2**19  # the sum of so many weights, in units of 2^-44, fits into 64 bits
MOST_LOGPROBS = 64  # limit of `log_probabilities`, per row
TOP_SHARE = 4 * SAMPLE_THREADS  # logits per block of `add_candidates`
SELECT_THREADS = 256  # per block of `select_tree`
STATE_THREADS, STATE_COLUMNS = 256, 32  # per block of `advance_states`
