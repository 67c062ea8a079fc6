# SPDX-License-Identifier: Apache-2.0
"""Runs of an engine over a batch: one for each group of rows with one adapter."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.executor import BoundRun, EngineExecutor
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.engine_directory.adapters.lora_inputs import rank_sizes
from edgellm_ros.runtime.adapters.lora import LoraAdapter
from edgellm_ros.runtime.adapters.lora_tables import LoraTables
from edgellm_ros.runtime.engines.attention_inputs import AttentionInputs, run_sizes


@dataclass(frozen=True)
class RunnableEngine:
    """An executor, its attention inputs and its decode steps' tensors by batch size.

    - fused: the executor is that of the fused kernels, which take no more tensors than they use
    - lora_tables: of fused kernels that give each sequence its own adapter; None = one adapter per run
    """

    executor: EngineExecutor
    inputs: AttentionInputs
    fused: bool = False
    lora_tables: LoraTables | None = None
    windows: dict[int, dict[str, Tensor]] = field(default_factory=dict)


class EngineRuns:
    """Binds the rows of a batch and runs an engine over them.

    - base: the base model, for rows without an adapter
    - shared: tensors of every run by binding, for engines with this input: LM head, embedding table
    """

    def __init__(self, device: Device, base: LoraAdapter) -> None:
        self._device, self._base = device, base
        self.shared: dict[str, Tensor] = {}

    def execute(
        self,
        engine: RunnableEngine,
        profile: int,
        tensors: dict[str, Tensor],
        adapters: Sequence[LoraAdapter],
        record: str = "",
    ) -> None:
        """Run the engine over the batch.

        record: what the log calls these runs, which are recorded as graphs when they repeat; empty = they are
        not recorded here.
        """
        for _ in self._groups(engine, profile, tensors, adapters):
            engine.executor.execute(self._device.stream)
            if record:
                engine.executor.record_repeated(self._device.stream, record)

    def bind(
        self,
        engine: RunnableEngine,
        profile: int,
        tensors: dict[str, Tensor],
        adapters: Sequence[LoraAdapter],
    ) -> list[BoundRun]:
        """Bind the tensors of each run, and return the runs."""
        return [engine.executor.bound_run for _ in self._groups(engine, profile, tensors, adapters)]

    def _groups(
        self,
        engine: RunnableEngine,
        profile: int,
        tensors: dict[str, Tensor],
        adapters: Sequence[LoraAdapter],
    ) -> Iterator[None]:
        """Bind one group of rows with one adapter after another.

        A group consists of adjacent rows, or of one row if the engine needs one sequence per run. The fused
        kernels run the whole batch, in which each sequence has its own adapter. On a CPU, neither other
        groups nor other rows of a group change the bits of a row (OnnxRuntimeBackend).
        """
        if engine.lora_tables is not None:
            bound = {**tensors, names.LORA_TABLE: engine.lora_tables.table(adapters)}
            base = dataclasses.replace(self._base, head=adapters[0].head)
            self._bind(engine, profile, bound, base)
            yield
            return
        batch, tokens, _ = tensors[names.INPUTS_EMBEDS].shape
        sequences = enumerate(adapters or [self._base] * batch)
        alone = not engine.fused and engine.inputs.needs_one_sequence_per_run(tokens)
        for (adapter, _), group in groupby(sequences, lambda pair: (pair[1], alone and pair[0])):
            rows = [row for row, _ in group]
            part = engine.inputs.part(tensors, rows[0], rows[-1] + 1)
            self._bind(engine, profile, part, adapter)
            yield

    def _bind(
        self, engine: RunnableEngine, profile: int, tensors: dict[str, Tensor], adapter: LoraAdapter
    ) -> None:
        dims = run_sizes(tensors) | rank_sizes(adapter.rank)
        executor, lora_inputs = engine.executor, {} if engine.fused else adapter.tensors
        shared = {name: tensor for name, tensor in self.shared.items() if name in executor.bindings}
        if adapter.head is not None:
            shared[names.LM_HEAD] = adapter.head
        bound = {**tensors, **shared, **lora_inputs}
        executor.prepare(profile, dims, bound, self._device.stream)
