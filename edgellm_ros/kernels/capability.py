# SPDX-License-Identifier: Apache-2.0
"""Compute capabilities of GPUs."""

from __future__ import annotations

EARLY_START = 90  # compute capability from which a kernel may start before the one before it has ended


def compute_capability(arch: str) -> int:
    """Return 90 for "sm_90"."""
    return int("".join(filter(str.isdigit, arch)))
