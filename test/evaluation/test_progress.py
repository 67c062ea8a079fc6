# SPDX-License-Identifier: Apache-2.0
"""The progress of an evaluation, by a clock that the tests set."""

from __future__ import annotations

import io

import pytest

from edgellm_ros.evaluation.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def last_line(terminal: Terminal) -> str:
    return terminal.getvalue().rpartition("\x1b[2K")[2]


def test_the_bar_counts_items_of_earlier_evaluations_but_not_their_time_nor_the_start(clock):
    terminal = Terminal()
    progress = Progress(terminal, total=200, finished=98, clock=clock)
    clock.now += 60.0  # workers start
    progress.advance("97 at the target")
    assert last_line(terminal) == "[##############----------------] 99 of 200, 97 at the target"
    clock.now += 2.0
    progress.advance("98 at the target")
    assert last_line(terminal) == (
        "[###############---------------] 100 of 200, 98 at the target, 3 min 20 s left"
    )


def test_the_bar_is_removed(clock):
    terminal = Terminal()
    progress = Progress(terminal, 2, 0, clock)
    progress.advance("")
    progress.close()
    assert last_line(terminal) == ""


def test_a_log_gets_a_line_every_half_minute_and_the_last_one(clock):
    log = io.StringIO()
    progress = Progress(log, 10, 0, clock)
    progress.status("starting 2 workers ...")
    for _ in range(10):
        clock.now += 10.0
        progress.advance("done")
    assert [line.partition(",")[0] for line in log.getvalue().splitlines()] == [
        "starting 2 workers ...",
        "3 of 10",
        "6 of 10",
        "9 of 10",
        "10 of 10",
    ]
