# SPDX-License-Identifier: Apache-2.0
"""Tree kernels that force how many drafted tokens a verification accepts.

Random weights draft no token that is right. So the known answer of vanilla decoding is written into the trees
after they were drafted, and into the tokens after they were sampled. Everything else of a round runs as it
does for users, and the writes are device work too: they are part of a round that is recorded as a graph.

  kernels of the draft -> select_tree  -> the answer's next tokens become a path of the tree
  base model on the tree -> sample_path -> tokens, path and their number become those of that path

The second write is needed in half precision only, where a run on many rows rounds differently from a run on
one, and random logits are often almost equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels import DraftTree, SamplingState

NO_TOKEN = -1  # is never sampled


class ObservedTreeKernels:
    """Passes calls on to `kernels`; `observer` is told which stage has been queued.

    The stages of a round: "level": the candidates of a level; "tree": the draft; "verify": the run of the
    base model.
    """

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self.observer: Callable[[str], None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def add_candidates(self, *arguments: Any) -> None:
        self._kernels.add_candidates(*arguments)
        self._tell("level")

    def select_tree(self, table: Any, last_tokens: Tensor, tree: DraftTree) -> None:
        self._kernels.select_tree(table, last_tokens, tree)
        self._drafted(tree)

    def find_continuation(
        self, history: Tensor, lengths: Tensor, most_ngram: int, least_ngram: int, tree: DraftTree
    ) -> None:
        self._kernels.find_continuation(history, lengths, most_ngram, least_ngram, tree)
        self._drafted(tree)

    def sample_path(
        self,
        logits: Tensor,
        state: SamplingState,
        tree: DraftTree,
        vocab_map: Tensor | None,
        sampled: Tensor,
        tokens: Tensor,
        path: Tensor,
        offered: Tensor,
    ) -> None:
        self._tell("verify")
        self._kernels.sample_path(logits, state, tree, vocab_map, sampled, tokens, path, offered)

    def _drafted(self, tree: DraftTree) -> None:
        self._tell("tree")

    def _tell(self, stage: str) -> None:
        if self.observer is not None:
            self.observer(stage)


class ForcedTreeKernels(ObservedTreeKernels):
    """Forces the acceptance of a runtime's rounds.

    - lengths: the committed KV rows of the first B rows, set when the runtime has been made
    - counts_own_tokens: whether `own_tokens` counts in how many of the `forced_tokens` the sampler agrees
      with the answer, given the answer so far; it makes rounds wait for the host

    Tables by row of the batch and committed KV rows, so that no step needs a number of the host:

    - nodes [B,C,M]: tokens of the tree; a path of D - 1 nodes below the root, then its siblings
    - tokens, path [B,C,D] and offered [B,C,1]: what `sample_path` writes
    """

    def __init__(
        self,
        kernels: Any,
        device: Device,
        max_batch_size: int,
        capacity: int,
        tree_size: int,
        most_tokens: int,
    ) -> None:
        super().__init__(kernels)
        self.lengths: Callable[[range], Tensor] | None = None
        self.counts_own_tokens = False
        self.own_tokens = self.forced_tokens = 0
        self._device = device
        self._most = most_tokens
        parents, depths = path_with_siblings(tree_size, most_tokens - 1)
        self._parents = _repeated(device, parents, max_batch_size)
        self._depths = _repeated(device, depths, max_batch_size)
        shape = (max_batch_size, capacity)
        self._nodes = device.zeros((*shape, tree_size), np.int64)
        self._tokens = device.zeros((*shape, most_tokens), np.int64)
        self._path = device.zeros((*shape, most_tokens), np.int64)
        self._offered = device.zeros((*shape, 1), np.int64)

    def force(self, prompts: Sequence[int], answers: Sequence[Sequence[int]], rate: float) -> None:
        """Accept `rate` tokens per verification on average, of the given answers.

        prompts: lengths. 2.5, for example, is 2 and 3 in turn. No step may be queued.
        """
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            targets = (self._nodes, self._tokens, self._path, self._offered)
            for target, values in zip(targets, self._tables(prompt, answer, rate), strict=True):
                self._device.upload(target.rows(row, row + 1), values[None])

    def sample_path(
        self,
        logits: Tensor,
        state: SamplingState,
        tree: DraftTree,
        vocab_map: Tensor | None,
        sampled: Tensor,
        tokens: Tensor,
        path: Tensor,
        offered: Tensor,
    ) -> None:
        super().sample_path(logits, state, tree, vocab_map, sampled, tokens, path, offered)
        own = self._device.download(tokens) if self.counts_own_tokens else None
        batch, most = path.shape
        index = self._index(batch)
        for source, target in ((self._tokens, tokens), (self._path, path), (self._offered, offered)):
            width = 1 if target is offered else most
            self._kernels.take_rows(source.rows(0, batch), index, target.view(batch, 1, width))
        if sampled.pointer != tokens.pointer:
            raise ValueError("forced acceptance needs an engine whose logit i is that of token i")
        if own is not None:
            for ours, forced in zip(own.tolist(), self._device.download(tokens).tolist(), strict=True):
                wanted = [token for token in forced if token != NO_TOKEN]
                self.forced_tokens += len(wanted)
                self.own_tokens += _common_beginning(ours, wanted)

    def _drafted(self, tree: DraftTree) -> None:
        batch, size = tree.tokens.shape
        if size != self._nodes.shape[2]:
            raise ValueError(f"a tree of {size} nodes in place of {self._nodes.shape[2]}: no room for more")
        index, nodes = self._index(batch), tree.tokens.view(batch, 1, size)
        self._kernels.take_rows(self._nodes.rows(0, batch), index, nodes)
        self._device.copy(tree.parents, self._parents.rows(0, batch))
        self._device.copy(tree.depths, self._depths.rows(0, batch))
        super()._drafted(tree)

    def _index(self, batch: int) -> Tensor:
        assert self.lengths is not None
        return self.lengths(range(batch)).view(batch, 1)

    def _tables(self, prompt: int, answer: Sequence[int], rate: float) -> list[np.ndarray]:
        """Make the tables of one row. After the answer the tokens are NO_TOKEN."""
        capacity, size = self._nodes.shape[1:]
        nodes = np.full((capacity, size), NO_TOKEN, np.int64)
        nodes[:, 0] = 0  # of rows that no round begins at
        tokens = np.full((capacity, self._most), NO_TOKEN, np.int64)
        path, offered = np.zeros((capacity, self._most), np.int64), np.ones((capacity, 1), np.int64)
        newest = 0
        for count in rounds(len(answer) - 1, rate, self._most):
            at, following = prompt + newest, answer[newest + 1 : newest + 1 + count]
            nodes[at, 0] = answer[newest]
            nodes[at, 1:count] = following[: count - 1]
            tokens[at, : len(following)] = following
            path[at] = np.minimum(np.arange(self._most), count - 1)
            offered[at] = len(following)
            newest += count
        return [nodes, tokens, path, offered]


def rounds(tokens: int, rate: float, most: int) -> list[int]:
    """Return the numbers of tokens of verifications that yield `tokens` in all.

    Each yields `rate` on average. The last may be cut. ValueError if a verification cannot yield so many.
    """
    if not 1 <= rate <= most:
        raise ValueError(f"{rate} tokens per verification: expected 1 to {most}")
    counts: list[int] = []
    while (done := sum(counts)) < tokens:
        counts.append(min(int(rate * (len(counts) + 1) + 1e-9) - done, tokens - done))
    return counts


def path_with_siblings(size: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return parents and depths of a tree that has one path.

    The tree consists of the root, a path below it, and siblings of the path's nodes.
    """
    parents = [-1, *range(length)]
    parents += [i % length for i in range(size - 1 - length)]
    depths = np.zeros(size, np.int64)
    for node, parent in enumerate(parents[1:], 1):
        depths[node] = depths[parent] + 1
    return np.array(parents, np.int64), depths


def _repeated(device: Device, row: np.ndarray, count: int) -> Tensor:
    tensor = device.empty((count, len(row)), np.int64)
    device.upload(tensor, np.tile(row, (count, 1)))
    return tensor


def _common_beginning(ours: Sequence[int], wanted: Sequence[int]) -> int:
    """Return how many tokens are equal before the first difference."""
    pairs = enumerate(zip(ours, wanted, strict=False))
    return next((i for i, (our, want) in pairs if our != want), len(wanted))
