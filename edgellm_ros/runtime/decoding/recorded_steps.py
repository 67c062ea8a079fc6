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
from edgellm_ros.engine.errors import DeviceLostError, EngineError
from edgellm_ros.engine.executor import BoundRun
from edgellm_ros.runtime.adapters.lora import BASE, LoraAdapter

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
    """Records steps and replays them.

    - kind: what the log calls them
    - record_lazily: whether a step without a graph is recorded after its first run
    """

    def __init__(self, device: Device, max_batch_size: int, kind: str = "decode steps") -> None:
        self._device = device
        self._kind = kind
        self._sizes = batch_sizes(max_batch_size)
        self.record_lazily = False
        self._recorded: dict[tuple[LoraAdapter, ...], RecordedStep] = {}  # by the rows' adapters
        self._refused: set[tuple[LoraAdapter, ...]] = set()  # those that `capture` could not record
        self._explained: set[str] = set()
        self._graph: DeviceGraph | None = None
        self._to_record: tuple[LoraAdapter, ...] | None = None

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
        if not self.record_lazily and not self._recorded:
            return self._step
        size = next(size for size in self._sizes if size >= len(adapters))
        key = (*adapters, *[adapters[0]] * (size - len(adapters)))
        step = make_step(key)
        if len(set(key)) > 1 and len(step.bind()) > len(make_step([adapters[0]] * size).bind()):
            self._explain(adapters, "different adapters or LM heads need one run each")
            return self._step
        recorded = self._recorded.get(key)
        if recorded is not None and recorded.runs == step.bind():
            self._graph, self._step = recorded.graph, step
        elif self.record_lazily and key not in self._refused:
            self._to_record, self._step = key, step
        return self._step

    def queue(self) -> None:
        """Queue the selected step once."""
        if self._graph is not None:
            self._graph.launch(self._device.stream)
            return
        self._step.run()
        if self._to_record is not None:
            reason = self._record(self._to_record)
            if reason:
                self.record_lazily = False
                self._explain(self._to_record, reason)
            self._to_record = None

    def capture(self, adapters: Sequence[LoraAdapter], make_step: MakeStep[StepT]) -> bool:
        """Record the steps of all buckets of batch sizes with each of these adapters.

        Returns False if the device does not support graphs, or if a step cannot be recorded, which then runs
        without a graph. The log has the number of graphs, the time, the memory, and the reasons. If any step
        was recorded, later ones without a matching graph (of a new adapter, or with changed bindings) are
        recorded after their first run. EngineError if a step itself fails.
        """
        if not self._device.has_graphs:
            return False
        self._refused.clear()
        self.record_lazily = True
        before, free, start = len(self), self._device.memory_info()[0], time.perf_counter()
        refused: dict[str, list[str]] = {}  # steps by the reason
        for adapter in adapters:
            for size in self._sizes:
                reason = self._capture(adapter, size, make_step)
                if reason:
                    self._refused.add((adapter,) * size)
                    refused.setdefault(reason, []).append(_describe((adapter,) * size))
        self._device.synchronize()
        self.record_lazily = len(self) > 0
        for reason, steps in refused.items():
            self._warn(", ".join(steps), reason)
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
        return not refused

    def clear(self) -> None:
        """Drop all graphs: other buffers have taken the place of those that they write."""
        self._recorded.clear()
        self._graph = self._to_record = None

    def drop(self, adapter: LoraAdapter) -> None:
        """Drop the graphs of a removed adapter."""
        self._recorded = {key: step for key, step in self._recorded.items() if adapter not in key}
        self._refused = {key for key in self._refused if adapter not in key}

    def _capture(self, adapter: LoraAdapter, size: int, make_step: MakeStep[StepT]) -> str:
        """Run and record a step without a graph; return why it cannot be recorded, or ""."""
        self.select([adapter] * size, make_step)
        if self._to_record is None:
            return ""
        self._step.run()
        reason = self._record(self._to_record)
        self._to_record = None
        return reason

    def _record(self, adapters: tuple[LoraAdapter, ...]) -> str:
        """Record the step that has just run; return why that is not possible, or ""."""
        runs = self._step.bind()
        try:
            self._graph = self._device.capture(self._step.run)
        except DeviceLostError:
            raise
        except EngineError as error:
            return str(error)
        if self._graph is None:
            return "the device does not support graphs"
        self._recorded[adapters] = RecordedStep(self._graph, runs)
        mixed = [key for key in self._recorded if len(set(key)) > 1]
        if len(mixed) > MOST_MIXED:
            del self._recorded[mixed[0]]
        return ""

    def _explain(self, adapters: Sequence[LoraAdapter], reason: str) -> None:
        """Log once why steps run without a graph."""
        if reason not in self._explained:
            self._warn(_describe(adapters), reason)

    def _warn(self, steps: str, reason: str) -> None:
        self._explained.add(reason)
        logger.warning("%s of %s run without a graph: %s", self._kind, steps, reason)


def _describe(adapters: Sequence[LoraAdapter]) -> str:
    """Return the log's words for the rows of a step."""
    names = sorted({adapter.name for adapter in adapters})
    words = f"{len(adapters)} sequence{'s' if len(adapters) > 1 else ''}"
    return words if names == [""] else f"{words} with {', '.join(name or BASE for name in names)}"
