# SPDX-License-Identifier: Apache-2.0
"""The engines of a runner, and which of them runs a step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.fused.loading.fused_decoding import FusedDecoding
from edgellm_ros.runtime.adapters.lora import LoraAdapter, LoraAdapters
from edgellm_ros.runtime.adapters.lora_tables import LoraTables
from edgellm_ros.runtime.engines.attention_inputs import AttentionInputs
from edgellm_ros.runtime.engines.engine_runs import RunnableEngine
from edgellm_ros.runtime.engines.lm_heads import same_head

logger = logging.getLogger(__name__)


class StepEngines:
    """The engines of prefills and decode steps, and the fused kernels.

    - decode: the executor of decode steps; None = the same engine as for prefills
    - fused: the fused kernels; None = none
    - inputs: makes the attention inputs of an executor, which is that of fused kernels or not
    """

    def __init__(
        self,
        prefill: EngineExecutor,
        decode: EngineExecutor | None,
        fused: FusedDecoding | None,
        inputs: Callable[[EngineExecutor, bool], AttentionInputs],
    ) -> None:
        self.prefill = self.decode = RunnableEngine(prefill, inputs(prefill, False))
        if decode is not None and decode is not prefill:
            self.decode = RunnableEngine(decode, inputs(decode, False))
        self.fused_decode, self.fused_prefill = self.decode, self.prefill
        if fused is not None:
            self.fused_decode = RunnableEngine(fused.executor, inputs(fused.executor, True), fused=True)
        if fused is not None and fused.prefill is not None:
            attention = inputs(fused.prefill, False)
            self.fused_prefill = RunnableEngine(
                fused.prefill, attention, fused=True, most_prompts=fused.most_rows
            )
        self.fused_verification = self.fused_decode
        if fused is not None and fused.verification is not None:
            attention = inputs(fused.verification, True)
            self.fused_verification = RunnableEngine(fused.verification, attention, fused=True)
        self._fused = fused
        self._adapted_decode: RunnableEngine | None = None
        self._lora_tables: LoraTables | None = None

    def use_adapters(self, device: Device, loras: LoraAdapters, layers: int) -> None:
        """Let the fused kernels run sequences with adapters, where they can.

        Fused kernels can do so if they have all LoRA inputs of the engine.
        """
        if self._fused is None or self._fused.adapted is None:
            return
        try:
            tables = LoraTables(device, loras.inputs, layers, self._fused.most_lora_rank)
        except ValueError as problem:
            logger.info("the engine decodes sequences with adapters: %s", problem)
            return
        inputs, self._lora_tables = self.fused_decode.inputs, tables
        self._adapted_decode = RunnableEngine(self._fused.adapted, inputs, fused=True, lora_tables=tables)

    def drop(self, adapter: LoraAdapter) -> None:
        """Drop the tables of a removed adapter."""
        if self._lora_tables is not None:
            self._lora_tables.drop(adapter)

    def of_prefill(self, adapters: Sequence[LoraAdapter], may_fuse: bool) -> RunnableEngine:
        """Return the engine for prompts with these adapters.

        The fused kernels run those without, if they may and can.
        """
        if (
            not may_fuse
            or any(adapter.name for adapter in adapters)
            or (adapters and not same_head(adapters))
        ):
            return self.prefill
        return self.fused_prefill

    def of_step(self, rows: int, most_fused_rows: int, adapters: Sequence[LoraAdapter]) -> RunnableEngine:
        """Return the engine for a step of `rows` tokens in all, with these adapters.

        most_fused_rows: maximum number of tokens that the fused kernels run in such a step.
        """
        if rows > most_fused_rows:
            return self.decode
        if adapters and not same_head(adapters):
            return self.decode  # one run for each head
        if not any(adapter.name for adapter in adapters):
            most = self._fused.most_step_rows if self._fused is not None else 0
            return self.fused_decode if rows <= most else self.fused_verification
        tables, adapted, fused = self._lora_tables, self._adapted_decode, self._fused
        if tables is None or adapted is None or fused is None or rows > fused.most_adapted_rows:
            return self.decode
        return adapted if tables.takes(adapters) else self.decode


def check_shared_cache(
    prefill: EngineExecutor, others: Iterable[EngineExecutor], config: EngineConfig
) -> None:
    """Raise EngineError unless all executors can share a KV cache."""
    capacity, expected = config.max_kv_cache_capacity, prefill.dtype(names.key_cache(0))
    for executor in (prefill, *others):
        dtype, shape = executor.dtype(names.key_cache(0)), executor.bindings[names.key_cache(0)].shape
        if shape[2] != capacity:
            raise EngineError(
                f"{executor.name}: key_cache_0 is {shape}, config.json has max_kv_cache_capacity {capacity}"
            )
        if dtype != expected:
            raise EngineError(f"{executor.name}: key_cache_0 is {dtype}, but {prefill.name} uses {expected}")
