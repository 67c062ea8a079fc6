# SPDX-License-Identifier: Apache-2.0
"""AttentionInputs: where the new tokens of a run stand and what they may see, as the engine takes it.

Engines come in two forms (families/qwen3_omni/text.py, text_cuda.py in builder):

- a mask: rope_cos, rope_sin [B,S,D/2], a row for each token; attention_mask [B,1,S,C]
- lengths: rope_cos, rope_sin [P,D/2], a table; position_ids [B,S], each token's row in it; kv_length [B], the
  cache rows that are filled with the new tokens. It reads several tokens of one sequence, or one of several.

The table is made of the rows that the first form takes, one after another, so both get the same numbers.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels import Kernels, RopeTable
from edgellm_ros.runtime.batch.linear_kv_cache import LinearKVCache
from edgellm_ros.runtime.engines.llm_engine_runner_config import LLMEngineRunnerConfig


class AttentionInputs:
    """Owns these inputs. `names`: of all inputs that the engine has."""

    def __init__(
        self,
        names: Container[str],
        config: LLMEngineRunnerConfig,
        device: Device,
        kernels: Kernels,
        cache: LinearKVCache,
        rope_table: RopeTable,
    ) -> None:
        self._device = device
        self._kernels = kernels
        self._cache = cache
        self._rope_table = rope_table
        self._mrope_section = config.rope_config.mrope_section
        self._half = config.rotary_dim // 2
        batch, tokens = config.max_supported_batch_size, config.max_supported_input_length
        rows = batch * tokens
        table_shape = (max(rows, cache.capacity), self._half)
        self._cos, self._sin = device.empty(table_shape, np.float32), device.empty(table_shape, np.float32)
        self._positions = device.empty((batch, 3, tokens), np.int64)
        self._has_mask = "attention_mask" in names
        self._has_write_index = "kv_write_index" in names
        if self._has_mask:
            self._mask = device.empty((batch, 1, tokens, cache.capacity), np.bool_)
        else:
            self._lengths = device.empty((batch,), np.int64)
            self._row_numbers = device.empty((rows,), np.int64)
            device.upload(self._row_numbers, np.arange(rows))

    @property
    def unbatched(self) -> tuple[str, ...]:
        """Inputs that are not by sequence: a run over some of the sequences gets the whole of them."""
        return () if self._has_mask else ("rope_cos", "rope_sin")

    def needs_one_sequence_per_run(self, tokens: int) -> bool:
        """Whether the engine must read so many tokens of each sequence in a run of its own."""
        return not self._has_mask and tokens > 1

    def inputs(self, batch: int, tokens: int) -> dict[str, Tensor]:
        """Windows on the engine's inputs for a run of this size: the same each time."""
        if self._has_mask:
            rows = (batch, tokens, self._half)
            visible = {"attention_mask": self._mask.view(batch, 1, tokens, self._cache.capacity)}
        else:
            rows = (max(batch * tokens, self._cache.capacity), self._half)
            visible = {
                "kv_length": self._lengths.rows(0, batch),
                "position_ids": self._row_numbers.view(batch, tokens),
            }
        if self._has_write_index:
            visible["kv_write_index"] = self._cache.device_lengths
        return {"rope_cos": self._cos.view(*rows), "rope_sin": self._sin.view(*rows), **visible}

    def for_prefill(self, positions: np.ndarray) -> dict[str, Tensor]:
        """Inputs for prompts whose tokens stand at positions [B,3,S] int64."""
        batch, _, tokens = positions.shape
        device_positions = self._positions.view(batch, 3, tokens)
        self._device.upload(device_positions, positions)
        rows = (self._cos.view(batch, tokens, self._half), self._sin.view(batch, tokens, self._half))
        self._kernels.mrope_rows(self._rope_table, device_positions, self._mrope_section, *rows)
        inputs = self.inputs(batch, tokens)
        self._write_visible(inputs, tokens)
        return inputs

    def for_decode(self, inputs: Mapping[str, Tensor], batch: int) -> None:
        """Write `inputs` for one more token of each active sequence."""
        lengths, deltas = self._cache.device_lengths, self._cache.device_rope_deltas
        rows = (self._cos.view(batch, 1, self._half), self._sin.view(batch, 1, self._half))
        self._kernels.rope_rows(self._rope_table, lengths, deltas, *rows)
        self._write_visible(inputs, 1)

    def _write_visible(self, inputs: Mapping[str, Tensor], tokens: int) -> None:
        if self._has_mask:
            self._kernels.causal_mask(self._cache.device_lengths, inputs["attention_mask"])
        else:
            self._kernels.visible_rows(self._cache.device_lengths, tokens, inputs["kv_length"])
