# SPDX-License-Identifier: Apache-2.0
"""RecordedSteps: decode steps as graphs, which the device launches with one call.

A step is a vanilla step or a round of drafting. There is one graph per adapter and bucket of batch sizes, and
one for the rows of a batch with different adapters, if the engine runs them at once. A batch of another size
runs with the next larger graph: its extra rows are closed, and the step has no effect on them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from edgellm_ros.engine.device import Device, DeviceGraph
from edgellm_ros.engine.executor import BoundRun
from edgellm_ros.engine.graph_recorder import GraphRecorder
from edgellm_ros.runtime.lora import LoraAdapter

logger = logging.getLogger(__name__)

MOST_MIXED = 16  # graphs of rows with different adapters


class Step(Protocol):
    """A decode step for fixed rows and adapters; its tensors keep their addresses."""

    def run(self) -> None:
        """Queue the step, without input from the host and without waiting."""
        ...

    def bind(self) -> list[BoundRun]:
        """Bind the engines to the step's tensors; return their runs, each of them once."""
        ...


StepT = TypeVar("StepT", bound=Step)
MakeStep = Callable[[Sequence[LoraAdapter]], StepT]  # the step of rows with these adapters


@dataclass(frozen=True)
class RecordedStep:
    """A step as a graph."""

    graph: DeviceGraph
    runs: list[BoundRun]  # of engines, when the graph was recorded; must live as long as the graph


def batch_sizes(most: int) -> list[int]:
    """Return the buckets of batch sizes: powers of two, and the largest batch."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    return sizes


class RecordedSteps(Generic[StepT]):
    """Records steps and replays them. `kind`: what the log calls them."""

    def __init__(self, device: Device, max_batch_size: int, kind: str = "decode steps") -> None:
        self._device = device
        self._kind = kind
        self._sizes = batch_sizes(max_batch_size)
        self._recorder = GraphRecorder(active=False)
        self._recorded: dict[tuple[LoraAdapter, ...], RecordedStep] = {}  # by the rows' adapters
        self._explained: set[str] = set()
        self._graph: DeviceGraph | None = None
        self._to_record: tuple[LoraAdapter, ...] | None = None

    @property
    def record_lazily(self) -> bool:
        """Whether a step without a graph is recorded after its first run."""
        return self._recorder.active

    @record_lazily.setter
    def record_lazily(self, on: bool) -> None:
        self._recorder.active = on

    def __len__(self) -> int:
        """Return the number of recorded graphs."""
        return len(self._recorded)

    def select(self, adapters: Sequence[LoraAdapter], make_step: MakeStep[StepT]) -> StepT:
        """Select the step that `queue` queues, for a batch with these adapters [B].

        A graph is replayed if the engine's bindings are the same as when the graph was recorded, and if rows
        with different adapters need no runs of their own. Returns the step, which may have more rows than the
        batch.
        """
        self._graph = self._to_record = None
        self._step = make_step(adapters)
        if not self._recorder.active and not self._recorded:
            return self._step
        size = next(size for size in self._sizes if size >= len(adapters))
        key = (*adapters, *[adapters[0]] * (size - len(adapters)))
        step = make_step(key)
        if len(set(key)) > 1 and len(step.bind()) > len(make_step([adapters[0]] * size).bind()):
            self._explain(len(adapters), "different adapters need one run each")
            return self._step
        recorded = self._recorded.get(key)
        if recorded is not None and recorded.runs == step.bind():
            self._graph, self._step = recorded.graph, step
        elif self._recorder.active:
            self._to_record, self._step = key, step
        return self._step

    def queue(self) -> None:
        """Queue the selected step once."""
        if self._graph is not None:
            self._graph.launch(self._device.stream)
            return
        self._step.run()
        if self._to_record is not None:
            self._record(self._to_record)

    def capture(self, adapters: Sequence[LoraAdapter], make_step: MakeStep[StepT]) -> bool:
        """Record the steps of all buckets of batch sizes with each of these adapters.

        The log gets the number of graphs, the time and the memory. From then on, a step without a matching
        graph is recorded after its first run: a step of an adapter that is loaded later, or a step whose
        bindings have changed. False if the device does not support graphs, or if a step cannot be recorded
        (the log says why): then steps run without a graph.
        """
        self._recorder.active = True
        before, free, start = len(self), self._device.memory_info()[0], time.perf_counter()
        done = all(self._capture(adapter, size, make_step) for adapter in adapters for size in self._sizes)
        self._device.synchronize()
        if len(self) > before:
            logger.info(
                "recorded %d graphs of %s (batch sizes %s, %d adapters) in %.1f s, %.0f MB",
                len(self) - before,
                self._kind,
                ", ".join(map(str, self._sizes)),
                len(adapters),
                time.perf_counter() - start,
                max(0, free - self._device.memory_info()[0]) / 1e6,
            )
        return done

    def drop(self, adapter: LoraAdapter) -> None:
        """Drop the graphs of a removed adapter."""
        self._recorded = {key: step for key, step in self._recorded.items() if adapter not in key}

    def _capture(self, adapter: LoraAdapter, size: int, make_step: MakeStep[StepT]) -> bool:
        self.select([adapter] * size, make_step)
        if self._graph is None:
            self.queue()
        return self._graph is not None

    def _record(self, adapters: tuple[LoraAdapter, ...]) -> None:
        """Record the step that has just run; on failure log the reason and stop recording."""
        self._to_record = None
        runs = self._step.bind()
        self._graph = self._recorder.capture(
            lambda: self._device.capture(self._step.run), lambda reason: self._explain(len(adapters), reason)
        )
        if self._graph is not None:
            self._recorded[adapters] = RecordedStep(self._graph, runs)
            mixed = [key for key in self._recorded if len(set(key)) > 1]
            if len(mixed) > MOST_MIXED:
                del self._recorded[mixed[0]]

    def _explain(self, size: int, reason: str) -> None:
        if reason not in self._explained:
            self._explained.add(reason)
            logger.warning("%s of %d sequences run without a graph: %s", self._kind, size, reason)
