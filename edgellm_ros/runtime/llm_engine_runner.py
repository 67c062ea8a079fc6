# SPDX-License-Identifier: Apache-2.0
"""LLMEngineRunner: the language model's engine in its two phases, prefill and decode.

Owns the KV cache and every input of the engine that follows from it: rotary rows, attention mask, write
positions; and the adapters, which are inputs like the others. What the tokens are and what becomes of the
logits is the runtime's affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels import Kernels
from edgellm_ros.runtime.linear_kv_cache import LinearKVCache
from edgellm_ros.runtime.llm_engine_runner_config import LLMEngineRunnerConfig
from edgellm_ros.runtime.lora import LoraAdapter, LoraAdapters
from edgellm_ros.runtime.rope import make_rope_table

PREFILL_PROFILE = 0
DECODE_PROFILE = 1
LM_HEAD = "lm_head.weight"


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
        self._kernels = kernels
        batch, tokens = config.max_supported_batch_size, config.max_supported_input_length
        capacity, half = config.max_kv_cache_capacity, config.rotary_dim // 2
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
        self._positions = device.empty((batch, 3, tokens), np.int64)
        self._rope_cos = device.empty((batch, tokens, half), np.float32)
        self._rope_sin = device.empty((batch, tokens, half), np.float32)
        self._mask = device.empty((batch, 1, tokens, capacity), np.bool_)
        self._last_tokens = device.empty((batch, 1), np.int64)
        self._first_tokens = device.zeros((batch, 1), np.int64)
        self._no_deepstack = device.zeros((batch, 1, config.hidden_size), self.embeds_dtype)
        self._decode_hidden_states = {  # written in every decode step, read by nobody yet
            f"hidden_states_{i}": device.empty((batch, 1, config.hidden_size), self.embeds_dtype)
            for i in config.hidden_state_layers
        }
        self._lm_head: dict[str, Tensor] = {}
        self._decode_inputs: dict[int, dict[str, Tensor]] = {}
        self.loras = LoraAdapters(
            device,
            executor.bindings.values(),
            config.max_supported_lora_rank,
            executor.takes_empty_tensors,
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
        device_positions = self._positions.view(batch, 3, tokens)
        self._device.upload(device_positions, positions)
        rope_cos = self._rope_cos.view(batch, tokens, self.config.rotary_dim // 2)
        rope_sin = self._rope_sin.view(batch, tokens, self.config.rotary_dim // 2)
        section = self.config.rope_config.mrope_section
        self._kernels.mrope_rows(self.rope_table, device_positions, section, rope_cos, rope_sin)
        mask = self._mask.view(batch, 1, tokens, capacity)
        self._kernels.causal_mask(cache.device_lengths, mask)
        tensors = {
            "inputs_embeds": inputs_embeds,
            "rope_cos": rope_cos,
            "rope_sin": rope_sin,
            "kv_write_index": cache.device_lengths,
            "attention_mask": mask,
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
        """Read one token of each active sequence.

        inputs_embeds [B,1,H]; output_logits [B,1,V] float32; adapters [B], none: the base model for all.
        """
        cache = self.kv_cache
        batch = cache.active_batch_size
        inputs = self._decode_inputs.get(batch) or self._make_decode_inputs(batch)
        lengths, deltas = cache.device_lengths, cache.device_rope_deltas
        self._kernels.rope_rows(self.rope_table, lengths, deltas, inputs["rope_cos"], inputs["rope_sin"])
        self._kernels.causal_mask(lengths, inputs["attention_mask"])
        tensors = {**inputs, "inputs_embeds": inputs_embeds, "logits": output_logits}
        self._execute(DECODE_PROFILE, tensors, adapters)
        cache.commit_sequence_length(np.ones(batch, np.int64))

    def capture_vanilla_decoding_cuda_graph(
        self, inputs_embeds: Tensor, output_logits: Tensor, adapter: LoraAdapter | None = None
    ) -> bool:
        """Record a decode step over these tensors with this adapter for replay.

        False where the device has no graphs. Ends any batch in progress.
        """
        batch = inputs_embeds.shape[0]
        self.kv_cache.reset_for_new_sequences([0] * batch, [0] * batch)
        tensors = {
            **self._make_decode_inputs(batch),
            "inputs_embeds": inputs_embeds,
            "logits": output_logits,
        }
        self._prepare(DECODE_PROFILE, tensors, adapter or self.loras.base)
        return self._executor.capture_graph(self._device.stream)

    def set_lm_head_weights(self, name: str, tensor: Tensor) -> None:
        """Bind a tensor to an extra input of the engine, from the next step on: `lm_head.weight` [H,V].

        Engines have it if they were exported with `lm_head_input`. EngineError for another name, type or
        shape.
        """
        binding = self._executor.bindings.get(name)
        if name != LM_HEAD or binding is None or not binding.is_input:
            raise EngineError(f"{self._executor.name}: no extra input {name!r} (export with lm_head_input)")
        if (tensor.dtype, tensor.shape) != (binding.dtype, binding.shape):
            raise EngineError(
                f"{self._executor.name}: {name} must be {binding.dtype} {list(binding.shape)}, "
                f"got {tensor.dtype} {list(tensor.shape)}"
            )
        self._lm_head = {name: tensor}

    def _make_decode_inputs(self, batch: int) -> dict[str, Tensor]:
        """Windows on the buffers for a decode step of this batch size: the same in every step."""
        half = self.config.rotary_dim // 2
        self._decode_inputs[batch] = {
            "rope_cos": self._rope_cos.view(batch, 1, half),
            "rope_sin": self._rope_sin.view(batch, 1, half),
            "kv_write_index": self.kv_cache.device_lengths,
            "attention_mask": self._mask.view(batch, 1, 1, self.kv_cache.capacity),
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
        """Run over the batch: once for each stretch of sequences with one adapter.

        The stretches do not influence each other's bits, nor do the sequences of one (OnnxRuntimeBackend).
        """
        batch = tensors["inputs_embeds"].shape[0]
        start = 0
        for adapter, stretch in groupby(adapters or [self.loras.base] * batch):
            stop = start + len(list(stretch))
            part = tensors
            if stop - start < batch:
                part = {name: tensor.rows(start, stop) for name, tensor in tensors.items()}
            self._prepare(profile, part, adapter)
            self._executor.execute(self._device.stream)
            start = stop

    def _prepare(self, profile: int, tensors: dict[str, Tensor], adapter: LoraAdapter) -> None:
        batch, tokens, _ = tensors["inputs_embeds"].shape
        dims = {"B": batch, "S": tokens, "N": 1, "r": adapter.rank}
        bound = {**tensors, **self._lm_head, **adapter.tensors}
        self._executor.prepare(profile, dims, bound, self._device.stream)
