# SPDX-License-Identifier: Apache-2.0
"""Sizes of drafts on which the fused kernels depend."""

from __future__ import annotations

from typing import Protocol


class DraftSizes(Protocol):
    """The fields of `SpecDecodeDraftingConfig` that kernels are compiled for."""

    @property
    def drafting_top_k(self) -> int: ...

    @property
    def drafting_step(self) -> int: ...

    @property
    def is_chain(self) -> bool: ...

    @property
    def has_head(self) -> bool: ...

    @property
    def tree_size(self) -> int: ...

    @property
    def tokens_per_round(self) -> int: ...
