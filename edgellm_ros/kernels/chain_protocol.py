# SPDX-License-Identifier: Apache-2.0
"""The protocols of kernels that take more of a draft head's work than one run.

The kernels take whole chains, and prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels.protocol import RopeTable
from edgellm_ros.kernels.tree_protocol import DraftTable, DraftTree


@dataclass(frozen=True, kw_only=True)
class ChainDraft:
    """Tensors of a draft by a head, for B sequences with W accepted tokens.

    H is the size of the head's states.

    - tokens [B,W] int64, states [B,W,H] before them; counts [B] int64: so many of a row's tokens are accepted
      A row without any belongs to a sequence that has ended, and gets no draft.
    - newest [B,1] int64: gets the index of the last accepted token
    - lengths [B] int64, deltas [B] f32: of the head's KV cache; the counts are added to the lengths
    - caches: keys and values of the head by binding name
    - embedding [V,H]; token_of_logit: see `TreeKernels.add_candidates`
    - table: one candidate of each node; it and the tree are written
    - last_tokens [B]: the token of node 0
    """

    tokens: Tensor
    counts: Tensor
    states: Tensor
    newest: Tensor
    lengths: Tensor
    deltas: Tensor
    rope: RopeTable
    caches: Mapping[str, Tensor]
    embedding: Tensor
    token_of_logit: Tensor | None
    table: DraftTable
    last_tokens: Tensor
    tree: DraftTree


class ChainDrafter(Protocol):
    """Drafts chains with one head on one device. `max_batch`: maximum batch size."""

    max_batch: int

    def run(self, draft: ChainDraft) -> None:
        """Queue a draft.

        Does what `begin_accepted`, the runs of the head, `add_candidates`, `begin_level`, `select_tree` and
        the commit of the accepted rows do. EngineError if table or tokens have other sizes than those that
        the kernels were made for.
        """
        ...


class PromptRows(Protocol):
    """Writes the KV rows of prompts of one head on one device.

    KV rows are all that is used of the head's run on prompts.
    """

    def run(
        self,
        embeds: Tensor,
        states: Tensor,
        cos: Tensor,
        sin: Tensor,
        lengths: Tensor,
        caches: Mapping[str, Tensor],
    ) -> None:
        """Queue the write of the rows behind the first lengths[b] of each sequence.

        states [B,S,H] of tokens, embeds [B,S,H] of those after them; cos, sin [B,S,R/2] f32; lengths [B]
        int64; caches: keys and values by binding name.
        """
        ...
