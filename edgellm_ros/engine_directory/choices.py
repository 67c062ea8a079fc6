# SPDX-License-Identifier: Apache-2.0
"""Values that options of an export may have; without imports, for `--help`."""

from __future__ import annotations

PRECISIONS = ("fp32", "fp16", "bf16")
FP8 = "fp8"  # E4M3
KV_CACHES = (FP8,)  # types of the KV cache beside those of PRECISIONS
ROUNDINGS = ("int4", "int8")  # types that weights are rounded to
GROUP_SIZES = (32, 64, 128)  # inputs that share a scale of rounded weights
LEROBOTS = ("0.4", "0.5")  # whose padding and prompts differ; 0.5: this one or a later one
