# SPDX-License-Identifier: Apache-2.0
"""DraftEngineRunner: runs the engine of a draft head, with a KV cache of its own.

Row p of the cache belongs to the state of token p and to token p + 1, so there are as many committed rows as
in the language model's cache. The rows of drafted tokens live behind them and are never committed:

  0 .. n-1 | level 1: n .. n+K-1 | level 2: n+K .. n+2K-1 | ...

Letters in shapes: B sequences, S tokens of each, H size of a state, K tokens of a level that the head runs
on, V the head's vocabulary, C its cache's capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.executor import BindingSnapshot, EngineExecutor
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.engine_directory.draft_config import DraftConfig
from edgellm_ros.kernels import DraftTable, Kernels, TreeKernels
from edgellm_ros.runtime.batch.linear_kv_cache import LinearKVCache
from edgellm_ros.runtime.engines.attention_inputs import AttentionInputs
from edgellm_ros.runtime.prompt.rope import make_rope_table

PROMPT_PROFILE = 0
DRAFT_PROFILE = 1


class DraftEngineRunner:
    """A draft head on a device; most tokens of a level: `top_k`, of a draft: `levels`."""

    def __init__(
        self,
        executor: EngineExecutor,
        config: EngineConfig,
        draft: DraftConfig,
        device: Device,
        kernels: Kernels,
        tree_kernels: TreeKernels,
        top_k: int,
        levels: int,
        tokens_per_round: int,
    ) -> None:
        self.dtype = executor.dtype(names.INPUTS_EMBEDS)
        self.hidden_size, self.vocab_size = draft.hidden_size, draft.vocab_size
        self._executor = executor
        self._device = device
        self._tree_kernels = tree_kernels
        batch, capacity = config.max_supported_batch_size, draft.cache_capacity(config.max_kv_cache_capacity)
        found = executor.bindings[names.key_cache(0)].shape
        if found[2] != capacity:
            raise EngineError(
                f"{executor.name}: key_cache_0 is {found}, by config.json its capacity is {capacity}"
            )
        self.kv_cache = LinearKVCache(
            device,
            kernels,
            layers=draft.num_layers,
            max_batch_size=batch,
            kv_heads=draft.num_key_value_heads,
            capacity=capacity,
            head_dim=draft.head_dim,
            dtype=executor.dtype(names.key_cache(0)),
        )
        tokens = max(config.max_supported_input_length, top_k, tokens_per_round)
        table = make_rope_table(draft.rope, capacity, device)
        self._inputs = AttentionInputs(
            executor.bindings, draft.rope, device, kernels, self.kv_cache, table, tokens
        )
        self._next_states = device.empty((batch * tokens, draft.hidden_size), self.dtype)
        self._logits = device.empty((batch * top_k, draft.vocab_size), np.float32)
        self._bound: dict[BindingSnapshot | None, Any] = {}  # of the runs of drafts: recorded rounds use them
        self._first = device.zeros((batch, 1), np.int64)
        self._nodes = device.empty((batch, top_k), np.int64)
        device.upload(self._nodes, np.tile(np.arange(top_k), (batch, 1)))
        self._depths = [device.empty((batch, top_k), np.int64) for _ in range(levels)]
        for depth, tensor in enumerate(self._depths):
            device.upload(tensor, np.full((batch, top_k), depth, np.int64))

    def execute_prompts(
        self, embeds: Tensor, states: Tensor, positions: np.ndarray, counts: Sequence[int], rows: range
    ) -> None:
        """Write and commit the KV rows of prompts.

        embeds [B,S,H] of the tokens after those of `states` [B,S,H]; positions [B,3,S] of the latter. Row b
        of the batch gets counts[b] rows, the others are padding.
        """
        inputs = self._inputs.for_prefill(rows, positions)
        self._run(PROMPT_PROFILE, inputs, rows, embeds, states, self._first.rows(0, len(rows)))
        new = self._device.zeros((len(rows),), np.int64)
        self._device.upload(new, np.asarray(counts, np.int64))
        self.kv_cache.commit_rows(rows, new)

    def execute_accepted(self, embeds: Tensor, states: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """Write the KV rows of accepted tokens behind the committed ones.

        embeds, states [B,S,H] of the first B rows; last [B,1]: index of each row's newest token, the others
        after it are padding. Returns logits [B,1,V] of the newest tokens and the next states [B,S,H].
        """
        batch, tokens, _ = embeds.shape
        rows = range(batch)
        inputs = self._inputs.inputs(rows, tokens)
        self._inputs.for_continuation(inputs, rows, tokens)
        return self._run(DRAFT_PROFILE, inputs, rows, embeds, states, last)

    def execute_level(
        self, embeds: Tensor, states: Tensor, table: DraftTable, level: int
    ) -> tuple[Tensor, Tensor]:
        """Run the nodes of a level; return logits [B,K,V] and the next states [B,K,H].

        embeds [B,K,H] of the tokens, states [B,K,H] of their parents.
        """
        batch = embeds.shape[0]
        rows = range(batch)
        depths = self._depths[level - 1].rows(0, batch)
        inputs = self._inputs.for_level(rows, table, level, depths, self._tree_kernels)
        return self._run(DRAFT_PROFILE, inputs, rows, embeds, states, self._nodes.rows(0, batch))

    def clear(self) -> None:
        """Zero all KV rows: NaN in a masked slot would enter a sum."""
        self.kv_cache.clear()

    def _run(
        self,
        profile: int,
        inputs: dict[str, Tensor],
        rows: range,
        embeds: Tensor,
        states: Tensor,
        last_token_ids: Tensor,
    ) -> tuple[Tensor, Tensor]:
        batch, tokens, _ = embeds.shape
        wanted = last_token_ids.shape[1]
        logits = self._logits.view(batch, wanted, self.vocab_size)
        next_states = self._next_states.view(batch, tokens, self.hidden_size)
        tensors = {
            **inputs,
            names.INPUTS_EMBEDS: embeds,
            names.HIDDEN_STATES: states,
            names.LAST_TOKEN_IDS: last_token_ids,
            names.LOGITS: logits,
            names.NEXT_HIDDEN_STATES: next_states,
            **self.kv_cache.bindings(rows),
        }
        alone = self._inputs.needs_one_sequence_per_run(tokens)
        for part in [range(row, row + 1) for row in range(batch)] if alone else [range(batch)]:
            self._run_rows(profile, part, tensors)
        return logits, next_states

    def _run_rows(self, profile: int, rows: range, tensors: dict[str, Tensor]) -> None:
        """Run the engine over some rows of tensors [B,...]."""
        part = {
            name: tensor if name in self._inputs.unbatched else tensor.rows(rows.start, rows.stop)
            for name, tensor in tensors.items()
        }
        tokens, wanted = part[names.INPUTS_EMBEDS].shape[1], part[names.LOGITS].shape[1]
        dims = {"B": len(rows), "S": tokens, "N": wanted}
        if names.ROPE_COS in part:
            dims["P"] = part[names.ROPE_COS].shape[0]
        self._executor.prepare(profile, dims, part, self._device.stream)
        if profile == DRAFT_PROFILE:  # of a few shapes only
            self._bound[self._executor.snapshot] = self._executor.bound
        self._executor.execute(self._device.stream)
