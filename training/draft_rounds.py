# SPDX-License-Identifier: Apache-2.0
"""Simulate the rounds of speculative decoding in PyTorch.

The drafted tokens are compared with the base model's own answer, greedy or sampled. That is the verification
of deterministic trees: the base samples a token at each node of the accepted path, and these tokens are its
answer without a draft.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from training.eagle import DraftHead, DraftRows, take

NO_TOKEN = -1


@dataclass(frozen=True)
class Drafting:
    """A round's shape: children per node, levels, and rows of a verification.

    The rows include the root of the tree.
    """

    top_k: int
    steps: int
    rows: int

    @property
    def name(self) -> str:
        """Return a short name."""
        if self.top_k == 1:
            return f"chain of {self.steps}"
        return f"tree {self.top_k}/{self.steps}/{self.rows}"


@dataclass(frozen=True)
class Candidates:
    """Drafted tokens of B roots; entry 0 is the root, parents come before children."""

    tokens: Tensor  # [B, T], target ids
    scores: Tensor  # [B, T], cumulative log-probabilities
    parents: Tensor  # [B, T], entry of the parent


@dataclass(frozen=True)
class Answered:
    """Prompts with a base model's answers, and what a draft head takes from it there."""

    ids: Tensor  # [B, L]
    prompt: Tensor  # [B], tokens of the prompt
    length: Tensor  # [B], tokens of prompt and answer
    rows: DraftRows


def best(scores: Tensor, count: int) -> Tensor:
    """Return the indices [..., count] of the best scores, best first.

    Of equal scores, the one with the lower index is first.
    """
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


class Drafter:
    """Drafts a tree after any row of answered prompts.

    The drafts are those of a runtime with KV cache and tree mask.
    """

    def __init__(self, head: DraftHead, table: Tensor, answered: Answered):
        self.head, self.table, self.rows = head, table, answered.rows
        self._fused = head.fuse(answered.rows.states)
        x = head.inputs(answered.rows.embeddings, self._fused)
        self._cache = head.midlayer.self_attn.keys_values(x, answered.rows.cos, answered.rows.sin)

    def _run(
        self, embeddings: Tensor, states: Tensor, row: Tensor, tree: list[tuple[Tensor, Tensor]], mask: Tensor
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Run the head on R rows at position row [B] of each sequence.

        tree: keys and values of the tree's earlier runs. mask: [B, R, C] of cache, tree and these rows.
        Returns states, log-probabilities, and the rows' keys and values.
        """
        attention = self.head.midlayer.self_attn
        index = row[:, None].expand(-1, states.shape[1]).clamp(max=self.rows.cos.shape[1] - 1)
        cos, sin = take(self.rows.cos, index), take(self.rows.sin, index)
        x = self.head.inputs(embeddings, states)
        new = attention.keys_values(x, cos, sin)
        keys, values = (torch.cat(parts, 2) for parts in zip(self._cache, *tree, new, strict=True))
        attended = attention(attention.queries(x, cos, sin), keys, values, mask[:, None])
        states = self.head.finish(states, attended)
        return states, self.head.logits(states).float().log_softmax(-1), new

    def draft(self, row: Tensor, roots: Tensor, drafting: Drafting) -> Candidates:
        """Draft after the base-driven rows up to `row` [B].

        roots [B]: the tokens row + 1.
        """
        k, batch = drafting.top_k, len(row)
        device, length = row.device, self.rows.cos.shape[1]
        before = torch.arange(length, device=device) < row[:, None]
        own = row.new_ones(batch, 1, dtype=torch.bool)
        states, scores, _ = self._run(
            take(self.rows.embeddings, row[:, None]),
            take(self._fused, row[:, None]),
            row,
            [],
            torch.cat((before, own), 1)[:, None],
        )
        tokens, totals = [roots[:, None]], [scores.new_zeros(batch, 1)]
        parents = [row.new_full((batch, 1), NO_TOKEN)]
        seen = torch.arange(length, device=device) <= row[:, None]
        tree: list[tuple[Tensor, Tensor]] = []
        ancestors = own.new_zeros(batch, 1, 0)  # of each row of the last run, among the tree's rows
        nodes, sums = row.new_zeros(batch, 1), scores.new_zeros(batch, 1)  # entries and scores of these rows
        for level in range(1, drafting.steps + 1):
            found = best(scores, k)
            first = sum(part.shape[1] for part in tokens)
            tokens.append(self.head.token_ids[found].flatten(1))
            totals.append((sums[..., None] + scores.gather(-1, found)).flatten(1))
            parents.append(nodes.repeat_interleave(k, 1))
            if level == drafting.steps:
                break
            chosen = best(totals[-1], k)
            parent = chosen // k
            nodes, sums = first + chosen, totals[-1].gather(1, chosen)
            index = parent[..., None].expand(-1, -1, ancestors.shape[-1])
            itself = torch.eye(k, dtype=torch.bool, device=device).expand(batch, k, k)
            ancestors = torch.cat((ancestors.gather(1, index), itself), -1)
            mask = torch.cat((seen[:, None].expand(-1, k, -1), ancestors), -1)
            embeddings = self.table[tokens[-1].gather(1, chosen)]
            states, scores, new = self._run(embeddings, take(states, parent), row + level, tree, mask)
            tree.append(new)
        return Candidates(torch.cat(tokens, 1), torch.cat(totals, 1), torch.cat(parents, 1))


def accepted(tree: Candidates, drafting: Drafting, following: Tensor) -> Tensor:
    """Count the drafted tokens [B] that begin `following` [B, N].

    following: the base model's tokens.
    """
    inside = torch.zeros_like(tree.tokens, dtype=torch.bool)
    inside.scatter_(1, best(tree.scores, drafting.rows), True)
    node = tree.tokens.new_zeros(len(tree.tokens), 1)
    count = tree.tokens.new_zeros(len(tree.tokens))
    open_rows = torch.ones_like(count, dtype=torch.bool)
    for depth in range(drafting.steps):
        same = inside & (tree.parents == node) & (tree.tokens == following[:, depth, None])
        open_rows = open_rows & same.any(1)
        node = torch.where(open_rows[:, None], same.int().argmax(1, keepdim=True), node)
        count = count + open_rows
    return count


@torch.no_grad()
def rounds_of(head: DraftHead, table: Tensor, answered: Answered, drafting: Drafting) -> tuple[int, int]:
    """Decode all answers in rounds; return the tokens and the number of these rounds.

    The first token of an answer comes from the prompt and belongs to no round.
    """
    drafter = Drafter(head, table, answered)
    ids = F.pad(answered.ids, (0, drafting.steps + 1), value=NO_TOKEN)
    offsets = torch.arange(1, drafting.steps + 1, device=ids.device)
    newest = answered.prompt.clone()  # index of the newest token
    tokens = rounds = 0
    while (open_rows := newest < answered.length - 1).any():
        roots = ids.gather(1, newest[:, None])[:, 0]
        tree = drafter.draft(newest - 1, roots, drafting)
        index = newest[:, None] + offsets
        following = ids.gather(1, index).masked_fill(index >= answered.length[:, None], NO_TOKEN)
        count = (accepted(tree, drafting, following) + 1).minimum(answered.length - 1 - newest)
        count = count.masked_fill(~open_rows, 0)
        newest = newest + count
        tokens, rounds = tokens + int(count.sum()), rounds + int(open_rows.sum())
    return tokens, rounds
