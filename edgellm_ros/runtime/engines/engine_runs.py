# SPDX-License-Identifier: Apache-2.0
"""Runs of an engine over a batch: one for each group of rows with one adapter."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.executor import BoundRun, EngineExecutor
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.engine_directory.adapters.lora_inputs import rank_sizes
from edgellm_ros.runtime.adapters.lora import LoraAdapter
from edgellm_ros.runtime.adapters.lora_tables import LoraTables
from edgellm_ros.runtime.engines.attention_inputs import AttentionInputs, run_sizes

# Tokens of several prompts in one run, padding included. Such a run keeps a GPU busy, and its intermediate
# results take memory for each token.
MOST_PROMPT_TOKENS = 4096


@dataclass(frozen=True)
class RunnableEngine:
    """An executor, its attention inputs and its decode steps' tensors by batch size.

    - fused: the executor is that of the fused kernels, which take no more tensors than they use
    - lora_tables: of fused kernels that give each sequence its own adapter; None = one adapter per run
    - most_prompts: largest number of prompts in one run of fused kernels, whatever is cached of them; 0 =
      they run no prompts
    """

    executor: EngineExecutor
    inputs: AttentionInputs
    fused: bool = False
    lora_tables: LoraTables | None = None
    most_prompts: int = 0
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
        first: Sequence[bool] = (),
    ) -> list[BoundRun]:
        """Run the engine over the batch; return the runs.

        first [B]: rows of which nothing is cached; empty = none
        """
        runs = []
        for _ in self._groups(engine, profile, tensors, adapters, first):
            engine.executor.execute(self._device.stream)
            runs.append(engine.executor.bound_run)
        return runs

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
        first: Sequence[bool] = (),
    ) -> Iterator[None]:
        """Bind one group of rows with one adapter after another.

        A group consists of adjacent rows, or of one row if the engine needs one sequence per run. Several
        prompts may be exceptions (`AttentionInputs.takes_first_prompts`): those that are `first`, of at most
        MOST_PROMPT_TOKENS in all. The fused kernels run the whole batch, in which each sequence has its own
        adapter. On a CPU, neither other groups nor other rows of a group change the bits of a row
        (OnnxRuntimeBackend).
        """
        if engine.lora_tables is not None:
            bound = {**tensors, names.LORA_TABLE: engine.lora_tables.table(adapters)}
            base = dataclasses.replace(self._base, head=adapters[0].head)
            self._bind(engine, profile, bound, base)
            yield
            return
        batch, tokens, _ = tensors[names.INPUTS_EMBEDS].shape
        adapters = adapters or [self._base] * batch
        joins, most = [True] * batch, batch
        if not engine.fused and engine.inputs.needs_one_sequence_per_run(tokens):
            joins = list(first) if first and engine.inputs.takes_first_prompts else [False] * batch
            most = MOST_PROMPT_TOKENS // tokens
        if engine.most_prompts:
            most = min(engine.most_prompts, MOST_PROMPT_TOKENS // tokens)
        for rows in cut_rows(adapters, joins, most):
            part = engine.inputs.part(tensors, rows.start, rows.stop)
            self._bind(engine, profile, part, adapters[rows.start])
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


def cut_rows(adapters: Sequence[LoraAdapter], joins: Sequence[bool], most: int) -> Iterator[range]:
    """Cut a batch into groups of adjacent rows with one adapter.

    joins [B]: whether a row may share its group with others, of at most `most` rows.
    """
    start = 0
    for row in range(1, len(adapters) + 1):
        ends = row == len(adapters) or adapters[row] != adapters[start] or row - start >= most
        if ends or not (joins[start] and joins[row]):
            yield range(start, row)
            start = row
