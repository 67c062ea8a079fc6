# SPDX-License-Identifier: Apache-2.0
"""DraftEngineRunner: runs the engine of a draft head, with a KV cache of its own.

Row p of the cache belongs to the state of token p and to token p + 1, so there are as many committed rows as
in the language model's cache. The rows of drafted tokens follow these and are never committed:

  0 .. n-1 | level 1: n .. n+K-1 | level 2: n+K .. n+2K-1 | ...

Letters in shapes: B sequences, S tokens of each, H size of a state, K tokens of a level that the head runs
on, V the head's vocabulary, C its cache's capacity.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from edgellm_ros.engine.device import Device, on_device
from edgellm_ros.engine.executor import BoundRun, EngineExecutor
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.engine_directory.draft_config import DraftConfig
from edgellm_ros.fused.loading.fused_decoding import FusedDecoding
from edgellm_ros.kernels import DraftTable, DraftTree, Kernels, TreeKernels
from edgellm_ros.kernels.chain_protocol import ChainDraft
from edgellm_ros.runtime.engines.attention_inputs import AttentionInputs, run_sizes
from edgellm_ros.runtime.engines.row_states import make_draft_cache
from edgellm_ros.runtime.prompt.rope import make_rope_table

PROMPT_PROFILE = 0
DRAFT_PROFILE = 1


@dataclass(frozen=True)
class _Engine:
    """An executor with its attention inputs, and the memory of its logits."""

    executor: EngineExecutor
    inputs: AttentionInputs
    logits: Tensor  # [batch*top_k,V]
    most_tokens: int | None = None  # of all sequences of a run; None = the limits of the engine directory

    def needs_one_sequence_per_run(self, tokens: int) -> bool:
        """Whether a run with this many query tokens is limited to batch size 1."""
        return self.most_tokens is None and self.inputs.needs_one_sequence_per_run(tokens)


class DraftEngineRunner:
    """A draft head on a device.

    - top_k: maximum number of tokens of a level
    - tokens_per_round: most accepted tokens of a round
    - fused: the fused kernels of the head. Their executor runs levels and accepted tokens if the batch has at
      most `most_rows` of them in all; `chain` drafts whole chains, without it the head runs on one level
      after the other; `prompts` writes the KV rows of prompts. `executor` runs all else. EngineError if the
      two executors cannot share a KV cache.
    """

    def __init__(
        self,
        executor: EngineExecutor,
        config: EngineConfig,
        draft: DraftConfig,
        device: Device,
        kernels: Kernels,
        tree_kernels: TreeKernels,
        top_k: int,
        tokens_per_round: int,
        fused: FusedDecoding | None = None,
    ) -> None:
        self.dtype = executor.dtype(names.INPUTS_EMBEDS)
        self.hidden_size, self.vocab_size = draft.hidden_size, draft.vocab_size
        self._device = device
        self._tree_kernels = tree_kernels
        batch, capacity = config.max_supported_batch_size, draft.cache_capacity(config.max_kv_cache_capacity)
        executors = (executor, *([fused.executor] if fused else []))
        self.kv_cache = make_draft_cache(device, kernels, config, executors)
        tokens = max(config.max_supported_input_length, top_k, tokens_per_round)
        self._rope_table = make_rope_table(draft.rope, capacity, device)

        def engine(executor: EngineExecutor, tokens: int, most: int | None = None) -> _Engine:
            logits = device.empty((batch * top_k, draft.vocab_size), executor.dtype(names.LOGITS))
            inputs = AttentionInputs(
                executor.bindings,
                draft.rope,
                device=device,
                kernels=kernels,
                cache=self.kv_cache,
                rope_table=self._rope_table,
                max_tokens=tokens,
            )
            return _Engine(executor, inputs, logits, most)

        self._engine = engine(executor, tokens)
        self.chain = fused.chain if fused else None
        self._prompts = fused.prompts if fused else None
        self._fused = None
        if fused is not None:
            self._fused = engine(fused.executor, max(top_k, tokens_per_round), fused.most_rows)
        self._next_states = device.empty((batch * tokens, draft.hidden_size), self.dtype)
        self._first = device.zeros((batch, 1), np.int64)
        self._nodes = on_device(device, np.tile(np.arange(top_k), (batch, 1)))

    def execute_prompts(
        self, embeds: Tensor, states: Tensor, positions: Tensor, counts: Tensor, rows: range
    ) -> list[BoundRun]:
        """Write and commit the KV rows of prompts; return the runs of the engine.

        embeds [B,S,H] of the tokens after those of `states` [B,S,H]; positions [B,3,S] float32 of these
        states. Row b of the batch gets counts[b] rows, counts [B] int64; the others are padding.
        """
        engine, cache, runs = self._engine, self.kv_cache, []
        if self._prompts is not None:
            angles = engine.inputs.prompt_angles(positions)
            self._prompts.run(embeds, states, *angles, cache.lengths(rows), cache.bindings(rows))
        else:
            inputs = engine.inputs.for_prefill(rows, positions)
            first = self._first.rows(0, len(rows))
            tensors = self._tensors(engine, inputs, rows, embeds, states, first)
            for _ in self._parts(engine, PROMPT_PROFILE, tensors):
                engine.executor.execute(self._device.stream)
                runs.append(engine.executor.bound_run)
        cache.commit_rows(rows, counts)
        return runs

    def execute_accepted(
        self,
        tokens: Tensor,
        counts: Tensor,
        states: Tensor,
        embedding: Tensor,
        embeds: Tensor,
        newest: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Write the KV rows of accepted tokens after the committed ones.

        tokens [B,S] of the first B rows, states [B,S,H] before them; those after counts[b] are padding.
        embeds [B,S,H] and newest [B,1]: see `TreeKernels.begin_accepted`, which writes them. Returns logits
        [B,1,V] of the newest tokens and the next states [B,S,H].
        """
        batch, count = tokens.shape
        rows = range(batch)
        engine = self._engine_of_run(batch * count)
        inputs = engine.inputs.inputs(rows, count)
        lengths, deltas = self.kv_cache.lengths(rows), self.kv_cache.rope_deltas(rows)
        out = engine.inputs.draft_inputs(inputs, embeds)
        self._tree_kernels.begin_accepted(
            tokens,
            counts,
            embedding,
            self._rope_table,
            lengths,
            deltas,
            newest,
            out,
        )
        return self._run(
            engine, DRAFT_PROFILE, inputs, rows=rows, embeds=embeds, states=states, last_token_ids=newest
        )

    def execute_level(
        self,
        table: DraftTable,
        level: int,
        *,
        states: Tensor,
        newest: Tensor,
        embedding: Tensor,
        embeds: Tensor,
        parents: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Select the nodes of a level and run them.

        Returns logits [B,K,V] and the next states [B,K,H].

        states [B,S,H] of the run before, newest [B,1], embedding [V,H]: see `TreeKernels.begin_level`.
        embeds, parents [B,K,H]: get the embeddings of the nodes' tokens and the states of their parents.
        """
        batch, nodes, _ = embeds.shape
        rows = range(batch)
        engine = self._engine_of_run(batch * nodes)
        inputs = engine.inputs.level_inputs(rows, nodes)
        lengths, deltas = self.kv_cache.lengths(rows), self.kv_cache.rope_deltas(rows)
        out = engine.inputs.draft_inputs(inputs, embeds)
        self._tree_kernels.begin_level(
            table,
            level,
            states,
            newest,
            embedding,
            self._rope_table,
            lengths,
            deltas,
            parents,
            out,
        )
        return self._run(
            engine,
            DRAFT_PROFILE,
            inputs,
            rows=rows,
            embeds=embeds,
            states=parents,
            last_token_ids=self._nodes.rows(0, batch),
        )

    def drafts_chains(self, batch: int) -> bool:
        """Return whether `execute_chain` drafts for a batch of this size."""
        return self.chain is not None and batch <= self.chain.max_batch

    def execute_chain(
        self,
        tokens: Tensor,
        counts: Tensor,
        *,
        states: Tensor,
        newest: Tensor,
        embedding: Tensor,
        token_of_logit: Tensor | None,
        table: DraftTable,
        last_tokens: Tensor,
        tree: DraftTree,
    ) -> None:
        """Write and commit KV rows of accepted tokens, draft a chain: see `ChainDraft`."""
        assert self.chain is not None
        rows = range(tokens.shape[0])
        cache = self.kv_cache
        self.chain.run(
            ChainDraft(
                tokens=tokens,
                counts=counts,
                states=states,
                newest=newest,
                lengths=cache.lengths(rows),
                deltas=cache.rope_deltas(rows),
                rope=self._rope_table,
                caches=cache.bindings(rows),
                embedding=embedding,
                token_of_logit=token_of_logit,
                table=table,
                last_tokens=last_tokens,
                tree=tree,
            )
        )

    def bind_accepted(self, embeds: Tensor, states: Tensor, last: Tensor) -> list[BoundRun]:
        """Bind the tensors of `execute_accepted`; return the runs of the engine."""
        rows, engine = range(embeds.shape[0]), self._engine_of_run(embeds.shape[0] * embeds.shape[1])
        inputs = engine.inputs.inputs(rows, embeds.shape[1])
        tensors = self._tensors(engine, inputs, rows, embeds, states, last)
        return [engine.executor.bound_run for _ in self._parts(engine, DRAFT_PROFILE, tensors)]

    def bind_level(self, embeds: Tensor, states: Tensor) -> list[BoundRun]:
        """Bind the tensors of `execute_level`; return the runs of the engine.

        The tensors are the same for all levels.
        """
        rows, engine = range(embeds.shape[0]), self._engine_of_run(embeds.shape[0] * embeds.shape[1])
        inputs = engine.inputs.level_inputs(rows, embeds.shape[1])
        tensors = self._tensors(engine, inputs, rows, embeds, states, self._nodes.rows(0, len(rows)))
        return [engine.executor.bound_run for _ in self._parts(engine, DRAFT_PROFILE, tensors)]

    def _engine_of_run(self, tokens: int) -> _Engine:
        """Return the engine for a run of this many tokens of all rows together."""
        fused = self._fused
        fits = fused is not None and fused.most_tokens is not None and tokens <= fused.most_tokens
        return fused if fused is not None and fits else self._engine

    def _run(
        self,
        engine: _Engine,
        profile: int,
        inputs: dict[str, Tensor],
        *,
        rows: range,
        embeds: Tensor,
        states: Tensor,
        last_token_ids: Tensor,
    ) -> tuple[Tensor, Tensor]:
        tensors = self._tensors(engine, inputs, rows, embeds, states, last_token_ids)
        for _ in self._parts(engine, profile, tensors):
            engine.executor.execute(self._device.stream)
        return tensors[names.LOGITS], tensors[names.NEXT_HIDDEN_STATES]

    def _tensors(
        self,
        engine: _Engine,
        inputs: dict[str, Tensor],
        rows: range,
        embeds: Tensor,
        states: Tensor,
        last_token_ids: Tensor,
    ) -> dict[str, Tensor]:
        batch, tokens, _ = embeds.shape
        tensors = {
            **inputs,
            names.INPUTS_EMBEDS: embeds,
            names.HIDDEN_STATES: states,
            names.LAST_TOKEN_IDS: last_token_ids,
            names.LOGITS: engine.logits.view(batch, last_token_ids.shape[1], self.vocab_size),
            names.NEXT_HIDDEN_STATES: self._next_states.view(batch, tokens, self.hidden_size),
            **self.kv_cache.bindings(rows),
        }
        if engine is self._engine:
            return tensors
        return {name: tensor for name, tensor in tensors.items() if name in engine.executor.bindings}

    def _parts(self, engine: _Engine, profile: int, tensors: dict[str, Tensor]) -> Iterator[None]:
        """Bind tensors [B,...]: all rows, or one after another if the engine needs that."""
        batch, tokens, _ = tensors[names.INPUTS_EMBEDS].shape
        size = 1 if engine.needs_one_sequence_per_run(tokens) else batch
        for row in range(0, batch, size):
            part = engine.inputs.part(tensors, row, row + size)
            engine.executor.prepare(profile, run_sizes(part), part, self._device.stream)
            yield
