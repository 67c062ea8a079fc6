# SPDX-License-Identifier: Apache-2.0
"""Tensors of decode steps and verifications, which keep their addresses.

A recorded step is replayed with the addresses of its recording.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgellm_ros.engine.device import Device, on_device
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.runtime.batch.linear_kv_cache import LinearKVCache
from edgellm_ros.runtime.batch.recurrent_state import RecurrentState
from edgellm_ros.runtime.engines.engine_runs import RunnableEngine


class StepTensors:
    """Buffers of an engine's steps, and the bindings of each step.

    - executor: of prefills, whose type of embeddings all engines have
    - max_tokens, max_tree_size: maximum number of tokens of a run, and of nodes of a tree, per row
    - fused_size: size of the output `fused_hidden_states`; 0 = the engine has none
    - state_layers: layers of the outputs `hidden_states_i`
    """

    def __init__(
        self,
        device: Device,
        config: EngineConfig,
        executor: EngineExecutor,
        *,
        kv_cache: LinearKVCache,
        recurrent: RecurrentState | None,
        max_tokens: int,
        max_tree_size: int,
        fused_size: int,
        state_layers: Sequence[int],
    ) -> None:
        self._device, self._config, self._name = device, config, executor.name
        self._state_layers = state_layers
        self._kv_cache, self._recurrent = kv_cache, recurrent
        batch, dtype = config.max_supported_batch_size, executor.dtype(names.INPUTS_EMBEDS)
        self._first_token_ids = device.zeros((batch, 1), np.int64)  # of a decode step: index 0
        self._one_token = device.empty((batch,), np.int64)
        device.upload(self._one_token, np.ones(batch, np.int64))
        self._node_indices: dict[int, Tensor] = {}  # of the nodes of trees, by size of the tree
        self._chain_lengths: dict[int, Tensor] = {}  # of the rows of a batch, which are equal
        self._fused = device.empty((batch * max_tokens if fused_size else 0, fused_size), dtype)
        shape = (batch, max(1, max_tree_size), config.hidden_size)
        self._no_deepstack = device.zeros(shape, dtype)
        self.hidden_state_buffers = {  # an engine with these outputs also writes them in decode steps
            names.hidden_states(i): device.empty(shape, dtype) for i in state_layers
        }

    def fused_states(self, batch: int, tokens: int) -> Tensor:
        """Return the last run's token states for a draft head, [batch,tokens,Hd]."""
        return self._fused.view(batch, tokens, self._fused.shape[1])

    def decode(
        self, engine: RunnableEngine, inputs_embeds: Tensor, output_logits: Tensor
    ) -> dict[str, Tensor]:
        """Return the tensors of a decode step: embeddings [B,1,H], logits [B,1,V]."""
        batch = inputs_embeds.shape[0]
        if batch not in engine.windows:
            engine.windows[batch] = self._decode_window(engine, range(batch))
        inputs = engine.windows[batch]
        return {**inputs, names.INPUTS_EMBEDS: inputs_embeds, names.LOGITS: output_logits}

    def tree(self, engine: RunnableEngine, inputs_embeds: Tensor, output_logits: Tensor) -> dict[str, Tensor]:
        """Return the tensors of a verification: embeddings [B,M,H], logits [B,M,V]."""
        batch, nodes, _ = inputs_embeds.shape
        tensors = self._step_tensors(engine, range(batch), nodes, self._nodes_of(batch, nodes))
        if self._recurrent is not None:
            if nodes not in self._chain_lengths:
                lengths = np.full(self._config.max_supported_batch_size, nodes)
                self._chain_lengths[nodes] = on_device(self._device, lengths)
            lengths_of_rows = self._chain_lengths[nodes].rows(0, batch)
            tensors |= self.recurrent(range(batch), lengths_of_rows, nodes)
        return tensors | {names.INPUTS_EMBEDS: inputs_embeds, names.LOGITS: output_logits}

    def _decode_window(self, engine: RunnableEngine, rows: range) -> dict[str, Tensor]:
        """Return views of the buffers of decode steps of this batch size."""
        batch = len(rows)
        return {
            **self._step_tensors(engine, rows, 1, self._first_token_ids.rows(0, batch)),
            **self.recurrent(rows, self._one_token.rows(0, batch), 1),
        }

    def _step_tensors(
        self, engine: RunnableEngine, rows: range, tokens: int, last_token_ids: Tensor
    ) -> dict[str, Tensor]:
        """Return views of the buffers of a step of `tokens` text tokens per row."""
        shape = (len(rows), tokens, self._config.hidden_size)
        tensors = {
            **engine.inputs.inputs(rows, tokens),
            names.LAST_TOKEN_IDS: last_token_ids,
            **self._kv_cache.bindings(rows),
            **{
                names.deepstack_embeds(i): self._no_deepstack.view(*shape)
                for i in range(self._config.num_deepstack_features)
            },
            **{name: buffer.view(*shape) for name, buffer in self.hidden_state_buffers.items()},
            **self.fused(len(rows), tokens),
        }
        if not engine.fused:
            return tensors
        return {name: tensor for name, tensor in tensors.items() if name in engine.executor.bindings}

    def _nodes_of(self, batch: int, nodes: int) -> Tensor:
        """Return the indices of the nodes of trees [batch,nodes]."""
        if nodes not in self._node_indices:
            indices = np.tile(np.arange(nodes), (self._config.max_supported_batch_size, 1))
            self._node_indices[nodes] = on_device(self._device, indices)
        return self._node_indices[nodes].rows(0, batch)

    def hidden_states(self, outputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """Bind one tensor for each of the state layers."""
        layers = self._state_layers
        if len(outputs) != len(layers):
            raise EngineError(
                f"{self._name}: a step needs {len(layers)} tensors of hidden states "
                f"(layers {', '.join(map(str, layers)) or 'none'}), got {len(outputs)}"
            )
        return {names.hidden_states(i): states for i, states in zip(layers, outputs, strict=True)}

    def fused(self, batch: int, tokens: int) -> dict[str, Tensor]:
        """Bind the token states for a draft head, if the engine has this output."""
        if not self._fused.shape[1]:
            return {}
        return {names.FUSED_HIDDEN_STATES: self.fused_states(batch, tokens)}

    def recurrent(self, rows: range, valid_tokens: Tensor, tokens: int) -> dict[str, Tensor]:
        """Bind the recurrent state and the number of valid tokens [B] of each row."""
        if self._recurrent is None:
            return {}
        return {names.VALID_TOKENS: valid_tokens, **self._recurrent.bindings(rows, tokens)}
