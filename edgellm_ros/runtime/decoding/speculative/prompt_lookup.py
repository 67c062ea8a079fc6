# SPDX-License-Identifier: Apache-2.0
"""PromptLookup: drafts what followed the newest tokens earlier in the text.

The text is the prompt or the answer. Needs no draft head. Answers that repeat parts of their prompt gain
most: summaries, quotes, structured data.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.executor import BoundRun
from edgellm_ros.engine.packed_arrays import Fields
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels import DraftTree, TreeKernels
from edgellm_ros.runtime.batch.linear_kv_cache import LinearKVCache
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.engines.prompt_inputs import PromptRun

MOST_NGRAM, LEAST_NGRAM = 4, 2
NOT_TEXT = -1


class PromptLookup:
    """Owns the token ids of each row, [max batch, C].

    Entry i belongs to KV row i of `cache`. placeholders: ids of encoder rows, which are no text.
    """

    name = "lookup"
    kv_cache = None

    def __init__(
        self, device: Device, kernels: TreeKernels, cache: LinearKVCache, placeholders: Collection[int | None]
    ) -> None:
        self._device = device
        self._kernels = kernels
        self._cache = cache
        self._placeholders = [token for token in placeholders if token is not None]
        self._history = device.zeros((cache.max_batch_size, cache.capacity), np.int64)

    def open(self, row: int, sequence: GenerationSequence) -> None:
        """Upload a prompt."""
        history = np.full((1, self._cache.capacity), NOT_TEXT, np.int64)
        ids = np.array(sequence.token_ids, np.int64)
        history[0, : len(ids)] = np.where(np.isin(ids, self._placeholders), NOT_TEXT, ids)
        self._device.upload(self._history.rows(row, row + 1), history)

    def move(self, source: int, target: int) -> None:
        """Copy a row's tokens to another row."""
        rows = self._history.rows(target, target + 1), self._history.rows(source, source + 1)
        self._device.copy(*rows)

    def close(self, row: int) -> None:
        """Do nothing: no step uses a closed row's tokens."""

    def clear_row(self, row: int) -> None:
        """Do nothing: token ids have no NaN."""

    def commit(self, counts: Tensor) -> None:
        """Do nothing; see `Drafter`."""

    def prompt_fields(self, batch: int, tokens: int) -> Fields:
        """Return no arrays: `open` uploads the prompts."""
        return {}

    def write_prompts(
        self,
        arrays: Mapping[str, np.ndarray],
        sequences: Sequence[GenerationSequence],
        rows: range,
        part: Sequence[range],
    ) -> None:
        """Do nothing: there are no arrays."""

    def prefilled(self, run: PromptRun, embeds: Tensor, inputs: Mapping[str, Tensor]) -> list[BoundRun]:
        """Return no runs: `open` has uploaded the prompts."""
        return []

    def propose(self, tree: DraftTree) -> None:
        """Write a chain; nodes without a draft have the token -1."""
        batch = tree.tokens.shape[0]
        history, lengths = self._history.rows(0, batch), self._cache.lengths(range(batch))
        self._kernels.find_continuation(history, lengths, MOST_NGRAM, LEAST_NGRAM, tree)

    def resume(self, batch: int) -> None:
        """Do nothing: every step appends its tokens."""

    def drafted(self, batch: int, size: int) -> None:
        """Do nothing: all state is on the device."""

    def bind(self, batch: int) -> list[BoundRun]:
        """Return no runs: no engine drafts."""
        return []

    def bind_acceptance(self, batch: int, nodes: int) -> list[BoundRun]:
        """Return no runs."""
        return []

    def accepted(self, tokens: Tensor, path: Tensor, counts: Tensor) -> None:
        """Append the tokens."""
        self.started(range(tokens.shape[0]), tokens, counts)

    def started(self, rows: range, tokens: Tensor, counts: Tensor) -> None:
        """Append the tokens to the given rows."""
        history = self._history.rows(rows.start, rows.stop)
        self._kernels.append_history(tokens, counts, self._cache.lengths(rows), history)
