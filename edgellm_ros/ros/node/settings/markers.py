# SPDX-License-Identifier: Apache-2.0
"""The parameters `markers.*`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MarkerSettings:
    """The node's parameters `markers.*`."""

    lifetime: float  # s; 0 = until the next plan
    sample_index: int  # index of the highlighted sample
