# SPDX-License-Identifier: Apache-2.0
"""RecordedWork: work that is queued call by call at first, and then as one graph.

All that the work reads from the host must have been uploaded before, to the same places each time.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from edgellm_ros.engine.device import Device, DeviceGraph
from edgellm_ros.engine.executor import BoundRun
from edgellm_ros.engine.graph_recorder import GraphRecorder

logger = logging.getLogger(__name__)

KEPT_GRAPHS = 16  # by default: work varies without end, so the least recently used graph is dropped
Part = Callable[[], Sequence[BoundRun]]


@dataclass(eq=False)
class _Work:
    times: int = 0  # that it has been queued call by call
    graphs: list[DeviceGraph | None] | None = None  # one, or one of each part that can be recorded
    runs: list[BoundRun] = field(default_factory=list)  # must live as long as the graphs
    is_kept: bool = False


class RecordedWork:
    """Records work that repeats, by its key.

    kinds: what the log calls the parts of the work, one after another. All parts are one graph; if that is
    not possible, those that can be recorded are graphs for themselves. kept: the most graphs, besides those
    of `record`. `active`: whether work is recorded; graphs are replayed only then.
    """

    def __init__(self, device: Device, *kinds: str, kept: int = KEPT_GRAPHS) -> None:
        self._device, self._kinds, self._kept = device, kinds, kept
        self._of_all = GraphRecorder()
        self._of_parts = [GraphRecorder(len(kinds) > 1) for _ in kinds]
        self._works: OrderedDict[tuple[Any, ...], _Work] = OrderedDict()  # the latest one last
        self.active = False

    def __len__(self) -> int:
        """Return the number of works with a graph."""
        return sum(work.graphs is not None for work in self._works.values())

    def __contains__(self, key: tuple[Any, ...]) -> bool:
        """Return whether the work of `key` has a graph."""
        work = self._works.get(key)
        return work is not None and work.graphs is not None

    def run(self, key: tuple[Any, ...], *parts: Part) -> None:
        """Queue the work of `key`, and record it when it is queued for the second time.

        parts: of each kind, a function that queues it call by call, without input from the host, and returns
        the runs of engines in it.
        """
        if not self.active:
            for part in parts:
                part()
            return
        work = self._works.setdefault(key, _Work())
        self._works.move_to_end(key)
        if work.graphs is None:
            for part in parts:
                part()
            work.times += 1
            if work.times > 1:
                self._record(work, parts)
            self._drop_oldest()
        elif len(work.graphs) < len(parts):
            self._launch(work.graphs[0], parts[0])
        else:
            for graph, part in zip(work.graphs, parts, strict=True):
                self._launch(graph, part)

    def record(self, key: tuple[Any, ...], *parts: Part) -> None:
        """Record the work of `key`, and keep its graph.

        The work, or the same on other rows, has been queued before.
        """
        if self.active:
            work = self._works.setdefault(key, _Work())
            self._record(work, parts)
            work.is_kept = work.graphs is not None

    def drop(self, of: Callable[[tuple[Any, ...]], bool]) -> None:
        """Drop the graphs of all keys for which `of` is true."""
        for key in [key for key in self._works if of(key)]:
            del self._works[key]

    def _launch(self, graph: DeviceGraph | None, part: Part) -> None:
        if graph is None:
            part()
        else:
            graph.launch(self._device.stream)

    def _record(self, work: _Work, parts: Sequence[Part]) -> None:
        names = " and ".join(self._kinds)
        whole = self._capture(work, self._of_all, parts, names)
        if whole is not None:
            work.graphs = [whole]
            return
        graphs = [
            self._capture(work, recorder, [part], kind)
            for recorder, part, kind in zip(self._of_parts, parts, self._kinds, strict=True)
        ]
        work.graphs = graphs if any(graphs) else None

    def _capture(
        self, work: _Work, recorder: GraphRecorder, parts: Sequence[Part], name: str
    ) -> DeviceGraph | None:
        """Record parts as one graph; after the first failure of a recorder, None."""
        if not recorder.active:
            return None

        runs: list[BoundRun] = []

        def record() -> None:
            for part in parts:
                runs.extend(part())

        if len(parts) > 1:  # each of them is tried next
            explain = partial(logger.info, "%s run without one graph: %s", name)
        else:
            explain = partial(logger.warning, "%s run without a graph: %s", name)
        graph = recorder.capture(lambda: self._device.capture(record), explain)
        if graph is not None:
            work.runs += runs
        return graph

    def _drop_oldest(self) -> None:
        droppable = [key for key, work in self._works.items() if not work.is_kept]
        if len(droppable) > self._kept:
            del self._works[droppable[0]]
