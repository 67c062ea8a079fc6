# SPDX-License-Identifier: Apache-2.0
"""Work that repeats: what is recorded, replayed, kept, dropped, and logged."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from doubles.deferred_runtime import WatchedDevice
from edgellm_ros.engine.errors import DeviceLostError, EngineError
from edgellm_ros.engine.recorded_work import KEPT_GRAPHS, RecordedWork

pytestmark = pytest.mark.only_on("cpu", reason="these tests bring their own device")


class Counters:
    """A counter on the device for each of two parts of work."""

    def __init__(self, refused: str = "", error: type[Exception] = EngineError) -> None:
        self.device = WatchedDevice()
        self.counts = [self.device.zeros((1,), np.int64) for _ in range(2)]
        self._one = self.device.zeros((1,), np.int64)
        self.device.upload(self._one, np.ones(1, np.int64))
        self.queued = [0, 0]
        self._refused, self._error = refused, error
        self.work = RecordedWork(self.device, "firsts", "seconds")
        self.work.active = True

    def part(self, index: int):
        def queue() -> list:
            if self.device.capturing and str(index) in self._refused:
                raise self._error(f"part {index} copies")
            self.queued[index] += not self.device.capturing
            count, one = self.counts[index], self._one
            self.device.queue(lambda: _add(count, one))
            return []

        return queue

    def run(self, key: str = "a") -> tuple[int, int]:
        """Queue both parts; return how many graphs were launched and recorded."""
        calls = self.device.calls
        calls.clear()
        self.work.run((key,), self.part(0), self.part(1))
        return calls["launch"], calls["capture"]

    def totals(self) -> list[int]:
        return [int(self.device.download(count)[0]) for count in self.counts]


def _add(count, one) -> None:
    from doubles.deferred_device import host_view

    host_view(count)[...] += host_view(one)


def test_work_is_recorded_when_it_repeats_and_is_one_launch_from_then_on():
    counters = Counters()
    assert [counters.run() for _ in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 0)]
    assert counters.queued == [2, 2]
    assert counters.totals() == [4, 4]


def test_other_work_is_counted_for_itself():
    counters = Counters()
    assert [counters.run(key) for key in "abab"] == [(0, 0), (0, 0), (0, 1), (0, 1)]
    assert counters.run("a") == counters.run("b") == (1, 0)


def test_nothing_is_recorded_or_replayed_unless_it_is_active():
    counters = Counters()
    counters.run()
    counters.run()
    counters.work.active = False
    assert [counters.run() for _ in range(3)] == [(0, 0)] * 3
    assert counters.totals() == [5, 5]
    counters.work.record(("b",), counters.part(0), counters.part(1))
    counters.work.active = True
    assert counters.run("b") == (0, 0)
    assert counters.run() == (1, 0)


def test_recorded_work_that_is_kept_outlives_other_work():
    counters = Counters()
    counters.work.record(("kept",), counters.part(0), counters.part(1))
    for key in range(KEPT_GRAPHS + 1):
        for _ in range(2):
            counters.run(f"{key}")
    assert counters.run("kept") == (1, 0)
    assert counters.run("1") == (1, 0)
    assert counters.run("0") == (0, 0), "the least recently used graph is dropped"


def test_dropped_work_is_queued_call_by_call_again():
    counters = Counters()
    for key in "aabb":
        counters.run(key)
    counters.work.drop(lambda key: key == ("a",))
    assert counters.run("b") == (1, 0)
    assert [counters.run("a") for _ in range(3)] == [(0, 0), (0, 1), (1, 0)]


def test_a_part_that_cannot_be_recorded_leaves_the_other_its_graph_and_is_logged_once(caplog):
    caplog.set_level(logging.INFO, "edgellm_ros")
    counters = Counters(refused="1")
    found = [counters.run(key) for key in "aaabbb"]
    # three attempts: both parts, the first one, the second one; later the first one only
    assert found == [(0, 0), (0, 3), (1, 0), (0, 0), (0, 1), (1, 0)]
    assert counters.totals() == [6, 6]
    assert counters.queued == [4, 6]
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.INFO, "firsts and seconds run without one graph: part 1 copies"),
        (logging.WARNING, "seconds run without a graph: part 1 copies"),
    ]


def test_work_of_which_nothing_can_be_recorded_is_queued_call_by_call():
    counters = Counters(refused="01")
    for _ in range(4):
        counters.run()
    assert counters.run() == (0, 0)
    assert counters.totals() == [5, 5]


def test_a_lost_device_is_an_error():
    counters = Counters(refused="0", error=DeviceLostError)
    counters.run()
    with pytest.raises(DeviceLostError, match="part 0 copies"):
        counters.run()
