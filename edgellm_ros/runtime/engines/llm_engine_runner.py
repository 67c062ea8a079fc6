# SPDX-License-Identifier: Apache-2.0
"""LLMEngineRunner: the language model's engine in its two phases, prefill and decode.

Owns the KV cache and every input of the engine that follows from it (token_places.py), and the adapters,
which are inputs like the others. What the tokens are and what becomes of the logits is the runtime's affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.executor import BindingSnapshot, EngineExecutor
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory.lora_inputs import rank_sizes
from edgellm_ros.kernels import Kernels
from edgellm_ros.runtime.batch.linear_kv_cache import LinearKVCache
from edgellm_ros.runtime.engines.attention_inputs import AttentionInputs
from edgellm_ros.runtime.engines.llm_engine_runner_config import LLMEngineRunnerConfig
from edgellm_ros.runtime.lora import LoraAdapter, LoraAdapters
from edgellm_ros.runtime.prompt.rope import make_rope_table

PREFILL_PROFILE = 0
DECODE_PROFILE = 1
LM_HEAD = "lm_head.weight"
EMBEDDING = "embedding"


class LLMEngineRunner:
    """The language model on a device.

    Letters in shapes: B sequences, S tokens of each, H hidden size, D head size, C cache capacity, V
    vocabulary.

    `positions_beyond`: how many positions after the cache's last one others look up in `rope_table` (the
    action head).
    """

    def __init__(
        self,
        executor: EngineExecutor,
        config: LLMEngineRunnerConfig,
        device: Device,
        kernels: Kernels,
        positions_beyond: int = 0,
    ) -> None:
        self._executor = executor
        self.config = config
        self._device = device
        batch = config.max_supported_batch_size
        capacity = config.max_kv_cache_capacity
        self.embeds_dtype = executor.dtype("inputs_embeds")
        self.kv_cache = LinearKVCache(
            device,
            kernels,
            config.num_attention_layers,
            batch,
            config.num_kv_heads,
            capacity,
            config.head_dim,
            executor.dtype("key_cache_0"),
        )
        self.rope_table = make_rope_table(
            config.rope_config, config.rotary_dim, capacity + positions_beyond, device
        )
        self._places = AttentionInputs(
            executor.bindings, config, device, kernels, self.kv_cache, self.rope_table
        )
        self._last_tokens = device.empty((batch, 1), np.int64)
        self._first_tokens = device.zeros((batch, 1), np.int64)
        self._no_deepstack = device.zeros((batch, 1, config.hidden_size), self.embeds_dtype)
        self._decode_hidden_states = {  # written in every decode step, read by nobody yet
            f"hidden_states_{i}": device.empty((batch, 1, config.hidden_size), self.embeds_dtype)
            for i in config.hidden_state_layers
        }
        self._shared: dict[str, Tensor] = {}
        self._decode_inputs: dict[int, dict[str, Tensor]] = {}
        self.loras = LoraAdapters(
            device,
            executor.bindings.values(),
            config.max_supported_lora_rank,
            executor.supports_empty_tensors,
        )
        if executor.bindings["key_cache_0"].shape[2] != capacity:
            raise EngineError(
                f"{executor.name}: key_cache_0 is {executor.bindings['key_cache_0'].shape}, "
                f"config.json has max_kv_cache_capacity {capacity}"
            )

    def execute_prefill_step(
        self,
        inputs_embeds: Tensor,
        context_lengths: Sequence[int],
        positions: np.ndarray,
        rope_deltas: Sequence[int],
        deepstack_embeds: Sequence[Tensor],
        output_logits: Tensor,
        output_hidden_states: Sequence[Tensor] = (),
        adapters: Sequence[LoraAdapter] = (),
        reuse_lengths: Sequence[int] = (),
    ) -> None:
        """Begin a batch: read all prompts, fill the cache.

        inputs_embeds and each of deepstack_embeds [B,S,H], padded at the end to the longest prompt;
        context_lengths: tokens per prompt; positions [B,3,S] int64; output_logits [B,1,V] float32: of each
        prompt's last token; output_hidden_states [B,S,H]: one for each of the engine's hidden_state_layers;
        adapters [B], of each sequence, none: the base model for all; reuse_lengths: how many tokens before
        these each sequence's cache has already, none: no sequence has any. EngineError if the cache has not
        the room for S more.
        """
        batch, tokens, _ = inputs_embeds.shape
        lengths = np.asarray(context_lengths, np.int64)
        cache, capacity = self.kv_cache, self.kv_cache.capacity
        reuse_lengths = reuse_lengths or [0] * batch
        if max(reuse_lengths) + tokens > capacity:
            raise EngineError(
                f"{self._executor.name}: {tokens} tokens after {max(reuse_lengths)} exceed the capacity "
                f"{capacity}"
            )
        cache.reset_for_new_sequences(reuse_lengths, rope_deltas)
        last_tokens = self._last_tokens.rows(0, batch)
        self._device.upload(last_tokens, lengths[:, None] - 1)
        tensors = {
            "inputs_embeds": inputs_embeds,
            **self._places.for_prefill(positions),
            "last_token_ids": last_tokens,
            "logits": output_logits,
            **cache.bindings(),
            **{f"deepstack_embeds_{i}": embeds for i, embeds in enumerate(deepstack_embeds)},
            **{
                f"hidden_states_{i}": hidden_states
                for i, hidden_states in zip(
                    self.config.hidden_state_layers, output_hidden_states, strict=True
                )
            },
        }
        self._execute(PREFILL_PROFILE, tensors, adapters)
        cache.commit_sequence_length(lengths)

    def execute_vanilla_decoding_step(
        self, inputs_embeds: Tensor, output_logits: Tensor, adapters: Sequence[LoraAdapter] = ()
    ) -> None:
        """Read one token of each active sequence, and write its row behind those that count.

        inputs_embeds [B,1,H]; output_logits [B,1,V] float32; adapters [B], none: the base model for all. The
        new rows are the caller's to count. Only queues work on the device: can be recorded as a graph.
        """
        inputs = self._decode_tensors(inputs_embeds, output_logits)
        self._places.for_decode(inputs, inputs_embeds.shape[0])
        self._execute(DECODE_PROFILE, inputs, adapters)

    def bind_vanilla_decoding_step(
        self, inputs_embeds: Tensor, output_logits: Tensor, adapter: LoraAdapter
    ) -> tuple[BindingSnapshot, Any]:
        """Bind a decode step whose sequences all have this adapter.

        Returns what is bound, by which a recorded step is known again, and what must live as long as such a
        record.
        """
        self._prepare(DECODE_PROFILE, self._decode_tensors(inputs_embeds, output_logits), adapter)
        return self._executor.snapshot, self._executor.bound

    def set_lm_head_weights(self, name: str, weights: np.ndarray) -> None:
        """Exchange the contents of an extra input, from the next step on: `lm_head.weight` [H,V].

        Engines have it if they were exported with `lm_head_input`. Its memory stays where it is, so recorded
        steps compute with the new contents. EngineError for another name or shape.
        """
        binding = self._executor.bindings.get(name)
        if name != LM_HEAD or binding is None or not binding.is_input:
            raise EngineError(f"{self._executor.name}: no extra input {name!r} (export with lm_head_input)")
        if weights.shape != binding.shape:
            raise EngineError(
                f"{self._executor.name}: {name} must be {list(binding.shape)}, got {list(weights.shape)}"
            )
        if name not in self._shared:
            self._shared[name] = self._device.empty(weights.shape, binding.dtype)
        self._device.upload(self._shared[name], weights.astype(binding.dtype, copy=False))

    def share_embedding(self, table: Tensor) -> None:
        """Bind the embedding table [V,H] if the engine takes it: its last matrix is the same."""
        if EMBEDDING in self._executor.bindings:
            self._shared[EMBEDDING] = table

    def _decode_tensors(self, inputs_embeds: Tensor, output_logits: Tensor) -> dict[str, Tensor]:
        batch = self.kv_cache.active_batch_size
        inputs = self._decode_inputs.get(batch) or self._make_decode_inputs(batch)
        return {**inputs, "inputs_embeds": inputs_embeds, "logits": output_logits}

    def _make_decode_inputs(self, batch: int) -> dict[str, Tensor]:
        """Windows on the buffers for a decode step of this batch size: the same in every step."""
        self._decode_inputs[batch] = {
            **self._places.inputs(batch, 1),
            "last_token_ids": self._first_tokens.rows(0, batch),
            **self.kv_cache.bindings(),
            **{
                f"deepstack_embeds_{i}": self._no_deepstack.rows(0, batch)
                for i in range(self.config.num_deepstack_features)
            },
            **{name: buffer.rows(0, batch) for name, buffer in self._decode_hidden_states.items()},
        }
        return self._decode_inputs[batch]

    def _execute(self, profile: int, tensors: dict[str, Tensor], adapters: Sequence[LoraAdapter]) -> None:
        """Run over the batch: once for each stretch of sequences with one adapter, or for each sequence.

        On a CPU the stretches do not influence each other's bits, nor do the sequences of one
        (OnnxRuntimeBackend).
        """
        batch, tokens, _ = tensors["inputs_embeds"].shape
        sequences = enumerate(adapters or [self.loras.base] * batch)
        alone = self._places.needs_one_sequence_per_run(tokens)
        for (adapter, _), group in groupby(sequences, lambda pair: (pair[1], alone and pair[0])):
            rows = [row for row, _ in group]
            part = tensors
            if len(rows) < batch:
                part = {
                    name: tensor if name in self._places.unbatched else tensor.rows(rows[0], rows[-1] + 1)
                    for name, tensor in tensors.items()
                }
            self._prepare(profile, part, adapter)
            self._executor.execute(self._device.stream)

    def _prepare(self, profile: int, tensors: dict[str, Tensor], adapter: LoraAdapter) -> None:
        batch, tokens, _ = tensors["inputs_embeds"].shape
        dims = {"B": batch, "S": tokens, "N": 1, "P": tensors["rope_cos"].shape[0]}
        dims |= rank_sizes(adapter.rank)
        bound = {**tensors, **self._shared, **adapter.tensors}
        self._executor.prepare(profile, dims, bound, self._device.stream)
