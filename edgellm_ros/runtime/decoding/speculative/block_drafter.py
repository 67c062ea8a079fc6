# SPDX-License-Identifier: Apache-2.0
"""BlockDrafter: drafts a chain with one run of a block drafter (DFlash).

  propose    [newest token, mask, mask, ...] -> block -> the most likely token of each masked row
  accepted   the base's states of the verified tokens -> context -> KV rows of the accepted ones

The drafter's cache holds rows of tokens that the base has run, and nothing of drafted ones, so nothing is
taken back. The states of vanilla steps wait: they become rows when there are many, or before the next round,
so that a pause of drafting costs little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edgellm_ros.engine.device import Device, on_device
from edgellm_ros.engine.executor import BoundRun
from edgellm_ros.engine.packed_arrays import Fields
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory.draft_config import DFLASH, DraftConfig
from edgellm_ros.kernels import DraftTable, DraftTree, Kernels, TreeKernels
from edgellm_ros.runtime.batch.input_embedder import InputEmbedder
from edgellm_ros.runtime.batch.sampling_rows import SamplingRows
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.engines.block_engine_runner import BlockEngineRunner
from edgellm_ros.runtime.engines.llm_engine_runner import LLMEngineRunner
from edgellm_ros.runtime.engines.prompt_inputs import PromptInputs, PromptRun


class BlockDrafter:
    """Owns the tensors of a draft, and the states of tokens that wait.

    - drafted: tokens of a chain, without the newest one
    - most_waiting: number of tokens of vanilla steps after which they become rows
    - token_of_logit [Vd] int64: None = logit i is that of token i
    """

    name = DFLASH

    def __init__(
        self,
        device: Device,
        kernels: Kernels,
        tree_kernels: TreeKernels,
        draft: DraftConfig,
        drafted: int,
        base: LLMEngineRunner,
        engines: BlockEngineRunner,
        embedder: InputEmbedder,
        sampling: SamplingRows,
        most_waiting: int,
        token_of_logit: Tensor | None = None,
    ) -> None:
        self._device, self._kernels, self._tree_kernels = device, kernels, tree_kernels
        self._layers, self._drafted = draft.base_state_layers, drafted
        self._base, self._engines, self._embedder = base, engines, embedder
        self._sampling = sampling
        self._token_of_logit = token_of_logit
        self.kv_cache = engines.kv_cache
        batch, size, hidden = engines.kv_cache.max_batch_size, draft.block_size, draft.hidden_size
        # a draft
        self._block = on_device(device, np.full((batch, size, 1), draft.mask_token_id, np.int64))
        self._embeds = device.zeros((batch, size, hidden), engines.dtype)
        self._no_rows = device.zeros((1, hidden), engines.dtype)  # of encoders
        self._first = device.zeros((batch, 1), np.int64)
        self._later = on_device(device, np.tile(np.arange(1, drafted + 1), (batch, 1)))
        self._best = DraftTable.zeros(device, batch * drafted, 1, 1)  # of each masked row, the root before it
        self._best_entry = on_device(device, np.ones((batch * drafted, 1), np.int64))
        self._tokens = device.zeros((batch * drafted, 1, 1), np.int64)
        self._chain = DraftTable.zeros(device, batch, 1, drafted)  # falling scores: a tree is its beginning
        entries = np.tile(np.arange(drafted + 1), (batch, 1))
        device.upload(self._chain.scores, -entries.astype(np.float32))
        device.upload(self._chain.parents, entries - 1)
        # states of vanilla steps
        shape = (batch, most_waiting, hidden)
        self._waiting = [device.zeros(shape, engines.dtype) for _ in self._layers]
        self._counts = device.zeros((batch,), np.int64)
        self._most_waiting = most_waiting
        self._most = [0] * batch  # upper bounds of the counts, that the host knows

    def open(self, row: int, sequence: GenerationSequence) -> None:
        """Begin a sequence; the caller fills the rows of the reused prefix.

        An earlier sequence may have left NaN in slots, which would enter a sum behind a mask.
        """
        if sequence.kv_length:
            self.kv_cache.clear_row(row)
        self.kv_cache.open(row, sequence)

    def move(self, source: int, target: int) -> None:
        """Copy a row's waiting states and KV rows to another row."""
        self.kv_cache.move(source, target)
        self._most[target] = self._most[source]
        for tensor in (*self._waiting, self._counts):
            self._device.copy(tensor.rows(target, target + 1), tensor.rows(source, source + 1))

    def close(self, row: int) -> None:
        """End a row."""
        self.kv_cache.close(row)

    def clear_row(self, row: int) -> None:
        """Zero a row's KV rows and states."""
        self.kv_cache.clear_row(row)
        for states in self._waiting:
            self._device.fill_zero(states.rows(row, row + 1))

    def commit(self, counts: Tensor) -> None:
        """Do nothing; see `Drafter`."""

    def prompt_fields(self, batch: int, tokens: int) -> Fields:
        """Return no arrays: rows and positions are those of the base."""
        return {}

    def write_prompts(
        self,
        arrays: Mapping[str, np.ndarray],
        sequences: Sequence[GenerationSequence],
        rows: range,
        part: Sequence[range],
    ) -> None:
        """Begin with no waiting states of these rows."""
        for row in rows:
            self._most[row] = 0
        self._device.fill_zero(self._counts.rows(rows.start, rows.stop))

    def prefilled(self, run: PromptRun, embeds: Tensor, inputs: Mapping[str, Tensor]) -> list[BoundRun]:
        """Compute the KV rows of a part of prompts."""
        for row, is_first in zip(run.rows, run.first, strict=True):
            if is_first:
                self.kv_cache.clear_row(row)
        prompts, (batch, tokens, _) = PromptInputs.of(inputs), embeds.shape
        self.kv_cache.begin_rows(run.rows, prompts.starts, prompts.deltas)
        states = self._base.prompt_states.outputs(batch, tokens, self._layers)
        runs = self._engines.execute_prompts(states, prompts.positions, run.rows)
        self.kv_cache.commit_rows(run.rows, prompts.new_tokens)
        return runs

    def started(self, rows: range, tokens: Tensor, counts: Tensor) -> None:
        """Do nothing: the base has no states of an answer's first token yet."""

    def accepted(self, tokens: Tensor, path: Tensor, counts: Tensor) -> None:
        """Compute the KV rows of accepted tokens; the states of a vanilla step wait."""
        batch, width = tokens.shape
        if width > 1:
            self._engines.execute_accepted(self._step_states(batch, self._base.verified_nodes))
            self.kv_cache.commit_rows(range(batch), counts)
            return
        if max(self._most[:batch]) >= self._most_waiting:
            self._write_waiting(batch)
        places = self._counts.rows(0, batch)
        for states, kept in zip(self._step_states(batch, 1), self._waiting, strict=True):
            self._tree_kernels.put_rows(states, places.view(batch, 1), kept.rows(0, batch))
        self._kernels.commit_rows(places, counts)
        for row in range(batch):
            self._most[row] += 1

    def resume(self, batch: int) -> None:
        """Compute the KV rows of the tokens of vanilla steps."""
        if any(self._most[:batch]):
            self._write_waiting(batch)

    def drafted(self, batch: int, size: int) -> None:
        """Do nothing: a round leaves nothing that waits."""

    def bind(self, batch: int) -> list[BoundRun]:
        """Bind the engine of the block to the tensors of a draft."""
        return self._engines.bind_block(self._embeds.rows(0, batch))

    def bind_acceptance(self, batch: int, nodes: int) -> list[BoundRun]:
        """Bind the engine of the context to the states of a verification."""
        return self._engines.bind_accepted(self._step_states(batch, nodes))

    def propose(self, tree: DraftTree) -> None:
        """Draft a chain for each row; a tree with fewer nodes gets its first tokens."""
        batch = tree.tokens.shape[0]
        drafted, put = self._drafted, self._tree_kernels.put_rows
        newest = self._sampling.last_tokens(range(batch)).view(batch, 1, 1)
        first, block = self._first.rows(0, batch), self._block.rows(0, batch)
        put(newest, first, block)
        embeds = self._embeds.rows(0, batch)
        self._kernels.embed(block.view(*embeds.shape[:2]), self._embedder.table, self._no_rows, embeds)
        logits = self._engines.execute_block(embeds)

        # the most likely token of each masked row, as the only candidate of a draft of its own
        rows = batch * drafted
        best = self._best.rows(0, rows)
        one_row = logits.view(rows, 1, logits.shape[2])
        self._tree_kernels.add_candidates(one_row, self._token_of_logit, best, 1)
        tokens = self._tokens.rows(0, rows)
        candidates = best.tokens.view(rows, best.tokens.shape[1], 1)
        self._tree_kernels.take_rows(candidates, self._best_entry.rows(0, rows), tokens)

        chain = self._chain.rows(0, batch)
        entries = chain.tokens.view(batch, drafted + 1, 1)
        put(tokens.view(batch, drafted, 1), self._later.rows(0, batch), entries)
        self._tree_kernels.select_tree(chain, self._sampling.last_tokens(range(batch)), tree)

    def _step_states(self, batch: int, tokens: int) -> list[Tensor]:
        return self._base.step_hidden_states(batch, tokens, self._layers)

    def _write_waiting(self, batch: int) -> None:
        """Compute and commit the KV rows of the first rows' waiting states."""
        self._engines.execute_accepted([states.rows(0, batch) for states in self._waiting])
        counts = self._counts.rows(0, batch)
        self.kv_cache.commit_rows(range(batch), counts)
        self._device.fill_zero(counts)
        self._most[:batch] = [0] * batch
