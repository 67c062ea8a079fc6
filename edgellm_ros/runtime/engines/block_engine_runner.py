# SPDX-License-Identifier: Apache-2.0
"""BlockEngineRunner: runs the engines of a block drafter.

Row p of the drafter's KV cache belongs to token p, so there are as many committed rows as in the language
model's cache. The rows of a block follow these and are never committed:

  0 .. n-1 | block: n (newest token) .. n+S-1

Letters in shapes: B sequences, S tokens of each, H size of a state, N drafted tokens, V the drafter's
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edgellm_ros.engine.device import Device, on_device
from edgellm_ros.engine.executor import BoundRun, EngineExecutor
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.kernels import Kernels
from edgellm_ros.runtime.engines.attention_inputs import AttentionInputs
from edgellm_ros.runtime.engines.row_states import make_draft_cache
from edgellm_ros.runtime.prompt.rope import make_rope_table

PROMPT_PROFILE, ACCEPTED_PROFILE = 0, 1  # of `context`
BLOCK_PROFILE = 0  # of `block`


class BlockEngineRunner:
    """A block drafter on a device.

    - block, context: executors of `draft/model.onnx` and `draft/context.onnx`
    - drafted: tokens that a block yields, less than its size

    EngineError if the executors cannot share a KV cache.
    """

    def __init__(
        self,
        block: EngineExecutor,
        context: EngineExecutor,
        config: EngineConfig,
        *,
        device: Device,
        kernels: Kernels,
        drafted: int,
    ) -> None:
        draft = config.draft
        assert draft is not None  # `check_drafting`
        self.dtype, self.vocab_size = block.dtype(names.INPUTS_EMBEDS), draft.vocab_size
        self._device, self._kernels = device, kernels
        self._block, self._context, self._layers = block, context, draft.base_state_layers
        batch, capacity = config.max_supported_batch_size, draft.cache_capacity(config.max_kv_cache_capacity)
        self.kv_cache = make_draft_cache(device, kernels, config, (block, context))
        table = make_rope_table(draft.rope, capacity, device)

        def inputs(executor: EngineExecutor, tokens: int) -> AttentionInputs:
            return AttentionInputs(
                executor.bindings,
                draft.rope,
                device=device,
                kernels=kernels,
                cache=self.kv_cache,
                rope_table=table,
                max_tokens=tokens,
            )

        self._block_inputs = inputs(block, draft.block_size)
        most = max(config.max_supported_input_length, draft.max_verify_tree_size, draft.max_draft_tree_size)
        self._context_inputs = inputs(context, most)
        self._visible = device.zeros((batch,), np.int64)
        self._drafted_rows = on_device(device, np.tile(np.arange(1, drafted + 1), (batch, 1)))
        self._logits = device.empty((batch, drafted, draft.vocab_size), block.dtype(names.LOGITS))

    def execute_prompts(self, states: Sequence[Tensor], positions: Tensor, rows: range) -> list[BoundRun]:
        """Write the KV rows of prompts; return the runs of the engine.

        The rows come after the committed ones. states [B,S,H] of each layer; positions [B,3,S] float32.
        """
        inputs = self._context_inputs.for_prefill(rows, positions)
        return self._execute_context(PROMPT_PROFILE, states, inputs, rows)

    def execute_accepted(self, states: Sequence[Tensor]) -> None:
        """Write the KV rows of text tokens of the first B rows, after the committed ones.

        states [B,S,H] of each layer.
        """
        batch, tokens, _ = states[0].shape
        rows = range(batch)
        inputs = self._context_inputs.inputs(rows, tokens)
        self._context_inputs.for_continuation(inputs, rows, tokens)
        self._execute_context(ACCEPTED_PROFILE, states, inputs, rows)

    def execute_block(self, embeds: Tensor) -> Tensor:
        """Run blocks of the first B rows; return the logits [B,N,V] of the drafted tokens.

        embeds [B,S,H]: of the newest token and the mask token.
        """
        batch, tokens, _ = embeds.shape
        rows = range(batch)
        tensors = self._bind_block(embeds)
        self._block_inputs.for_continuation(tensors, rows, tokens)
        self._kernels.visible_rows(self.kv_cache.lengths(rows), tokens, self._visible.rows(0, batch))
        self._block.execute(self._device.stream)
        return tensors[names.LOGITS]

    def bind_block(self, embeds: Tensor) -> list[BoundRun]:
        """Bind the tensors of `execute_block`; return the run of the engine."""
        self._bind_block(embeds)
        return [self._block.bound_run]

    def bind_accepted(self, states: Sequence[Tensor]) -> list[BoundRun]:
        """Bind the tensors of `execute_accepted`; return the run of the engine."""
        batch, tokens, _ = states[0].shape
        inputs = self._context_inputs.inputs(range(batch), tokens)
        self._bind_context(ACCEPTED_PROFILE, states, inputs, range(batch))
        return [self._context.bound_run]

    def _bind_block(self, embeds: Tensor) -> Mapping[str, Tensor]:
        batch, tokens, _ = embeds.shape
        rows, last = range(batch), self._drafted_rows.rows(0, batch)
        tensors = {
            **self._block_inputs.inputs(rows, tokens),
            names.INPUTS_EMBEDS: embeds,
            names.VISIBLE_ROWS: self._visible.rows(0, batch),
            names.LAST_TOKEN_IDS: last,
            names.LOGITS: self._logits.rows(0, batch),
            **self.kv_cache.bindings(rows),
        }
        sizes = {"B": batch, "S": tokens, "N": last.shape[1]}
        self._block.prepare(BLOCK_PROFILE, sizes, tensors, self._device.stream)
        return tensors

    def _execute_context(
        self, profile: int, states: Sequence[Tensor], inputs: Mapping[str, Tensor], rows: range
    ) -> list[BoundRun]:
        self._bind_context(profile, states, inputs, rows)
        self._context.execute(self._device.stream)
        return [self._context.bound_run]

    def _bind_context(
        self, profile: int, states: Sequence[Tensor], inputs: Mapping[str, Tensor], rows: range
    ) -> None:
        batch, tokens, _ = states[0].shape
        of_layers = zip(self._layers, states, strict=True)
        tensors = {
            **inputs,
            **{names.hidden_states(i): each for i, each in of_layers},
            **self.kv_cache.bindings(rows),
        }
        sizes = {"B": batch, "S": tokens}
        self._context.prepare(profile, sizes, tensors, self._device.stream)
