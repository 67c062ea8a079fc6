# SPDX-License-Identifier: Apache-2.0
"""LLMEngineRunner: the language model's engine in its two phases, prefill and decode.

Owns the KV cache and every input of the engine that follows from it: rotary rows, attention mask, write
positions. What the tokens are and what becomes of the logits is the runtime's affair.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels import Kernels
from edgellm_ros.runtime.config import BuilderConfig, LLMEngineRunnerConfig
from edgellm_ros.runtime.linear_kv_cache import LinearKVCache
from edgellm_ros.runtime.rope import make_rope_table

PREFILL_PROFILE = 0
DECODE_PROFILE = 1


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
        builder: BuilderConfig,
        device: Device,
        kernels: Kernels,
        positions_beyond: int = 0,
    ) -> None:
        self._executor = executor
        self._config = config
        self._device = device
        self._kernels = kernels
        batch, tokens, capacity = builder.max_batch_size, builder.max_input_len, builder.max_kv_cache_capacity
        self.embeds_dtype = executor.dtype("inputs_embeds")
        self.kv_cache = LinearKVCache(
            device,
            config.num_hidden_layers,
            batch,
            config.num_key_value_heads,
            capacity,
            config.head_dim,
            executor.dtype("key_cache_0"),
        )
        self.rope_table = make_rope_table(config, capacity + positions_beyond, device)
        self._positions = device.empty((batch, 3, tokens), np.int64)
        self._rope_cos = device.empty((batch, tokens, config.head_dim // 2), np.float32)
        self._rope_sin = device.empty((batch, tokens, config.head_dim // 2), np.float32)
        self._mask = device.empty((batch, 1, tokens, capacity), np.bool_)
        self._last_tokens = device.empty((batch, 1), np.int64)
        self._first_tokens = device.zeros((batch, 1), np.int64)
        self._no_deepstack = device.zeros((batch, 1, config.hidden_size), self.embeds_dtype)
        self._decode_inputs: dict[int, dict[str, Tensor]] = {}
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
    ) -> None:
        """Begin a batch: read all prompts, fill the cache.

        inputs_embeds and each of deepstack_embeds [B,S,H], padded at the end to the longest prompt;
        context_lengths: tokens per prompt; positions [B,3,S] int64; output_logits [B,1,V] float32: of each
        prompt's last token.
        """
        batch, tokens, _ = inputs_embeds.shape
        lengths = np.asarray(context_lengths, np.int64)
        cache, capacity = self.kv_cache, self.kv_cache.capacity
        cache.reset_for_new_sequences([0] * batch, rope_deltas)
        last_tokens = self._last_tokens.rows(0, batch)
        self._device.upload(last_tokens, lengths[:, None] - 1)
        device_positions = self._positions.view(batch, 3, tokens)
        self._device.upload(device_positions, positions)
        rope_cos = self._rope_cos.view(batch, tokens, self._config.head_dim // 2)
        rope_sin = self._rope_sin.view(batch, tokens, self._config.head_dim // 2)
        section = self._config.rope.mrope_section
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
        }
        self._prepare(PREFILL_PROFILE, batch, tokens, tensors)
        self._executor.execute(self._device.stream)
        cache.commit_sequence_length(lengths)

    def execute_vanilla_decoding_step(
        self, inputs_embeds: Tensor, advance: np.ndarray, output_logits: Tensor
    ) -> None:
        """Read one token of each active sequence.

        inputs_embeds [B,1,H]; advance [B] int64: 1 where the token counts, 0 for a sequence that has ended
        and only fills its row of the batch (its next cache row, beyond its length, is scratch); output_logits
        [B,1,V] float32.
        """
        cache = self.kv_cache
        batch = cache.active_batch_size
        inputs = self._decode_inputs.get(batch) or self._make_decode_inputs(batch)
        lengths, deltas = cache.device_lengths, cache.device_rope_deltas
        self._kernels.rope_rows(self.rope_table, lengths, deltas, inputs["rope_cos"], inputs["rope_sin"])
        self._kernels.causal_mask(lengths, inputs["attention_mask"])
        self._prepare(
            DECODE_PROFILE, batch, 1, {**inputs, "inputs_embeds": inputs_embeds, "logits": output_logits}
        )
        self._executor.execute(self._device.stream)
        cache.commit_sequence_length(advance)

    def capture_vanilla_decoding_cuda_graph(self, inputs_embeds: Tensor, output_logits: Tensor) -> bool:
        """Record a decode step over these tensors for replay.

        False where the device has no graphs. Ends any batch in progress.
        """
        batch = inputs_embeds.shape[0]
        self.kv_cache.reset_for_new_sequences([0] * batch, [0] * batch)
        inputs = self._make_decode_inputs(batch)
        self._prepare(
            DECODE_PROFILE, batch, 1, {**inputs, "inputs_embeds": inputs_embeds, "logits": output_logits}
        )
        return self._executor.capture_graph(self._device.stream)

    def _make_decode_inputs(self, batch: int) -> dict[str, Tensor]:
        """Windows on the buffers for a decode step of this batch size: the same in every step."""
        half = self._config.head_dim // 2
        self._decode_inputs[batch] = {
            "rope_cos": self._rope_cos.view(batch, 1, half),
            "rope_sin": self._rope_sin.view(batch, 1, half),
            "kv_write_index": self.kv_cache.device_lengths,
            "attention_mask": self._mask.view(batch, 1, 1, self.kv_cache.capacity),
            "last_token_ids": self._first_tokens.rows(0, batch),
            **self.kv_cache.bindings(),
            **{
                f"deepstack_embeds_{i}": self._no_deepstack.rows(0, batch)
                for i in range(self._config.num_deepstack_features)
            },
        }
        return self._decode_inputs[batch]

    def _prepare(self, profile: int, batch: int, tokens: int, tensors: dict[str, Tensor]) -> None:
        self._executor.prepare(profile, {"B": batch, "S": tokens, "N": 1}, tensors, self._device.stream)
