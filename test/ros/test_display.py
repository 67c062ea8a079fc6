# SPDX-License-Identifier: Apache-2.0
"""The thread that shows plans."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from edgellm_ros.ros.node.outputs.display import Display

SHOWN_S = 10.0


class Viewer:
    """Shows plans when it may, and remembers them; the plan "broken" cannot be shown."""

    def __init__(self) -> None:
        self.may_show = threading.Event()
        self.began = threading.Event()
        self.shown: list[tuple[str, bool]] = []

    def __call__(self, plan: str, is_newest: bool) -> None:
        self.began.set()
        assert self.may_show.wait(SHOWN_S)
        if plan == "broken":
            raise ValueError("broken plan")
        self.shown.append((plan, is_newest))


@contextmanager
def display(viewer: Viewer, errors: list[str]) -> Iterator[Display]:
    made = Display(viewer, SimpleNamespace(error=errors.append))
    try:
        yield made
    finally:
        viewer.may_show.set()
        made.close()


def test_plans_are_shown_in_order_and_the_newest_is_known():
    viewer = Viewer()
    with display(viewer, []) as shown:
        shown.add("a")
        assert viewer.began.wait(SHOWN_S)
        shown.add("b")
        shown.add("c")
        assert (viewer.shown, shown.pending) == ([], 3)  # `add` has not waited
        viewer.may_show.set()
        shown.flush()
        assert shown.pending == 0
    assert viewer.shown == [("a", True), ("b", False), ("c", True)]


def test_a_plan_that_cannot_be_shown_is_logged_and_the_next_is_shown():
    viewer, errors = Viewer(), []
    with display(viewer, errors) as shown:
        shown.add("broken")
        shown.add("good")
    assert viewer.shown == [("good", True)]
    assert [error.splitlines()[-1] for error in errors] == ["ValueError: broken plan"]


def test_closing_shows_what_waits():
    viewer = Viewer()
    with display(viewer, []) as shown:
        shown.add("a")
        shown.add("b")
    assert [plan for plan, _ in viewer.shown] == ["a", "b"]


@pytest.mark.parametrize("plans", [0, 2])
def test_flush_returns_when_nothing_waits(plans):
    viewer = Viewer()
    viewer.may_show.set()
    with display(viewer, []) as shown:
        for plan in range(plans):
            shown.add(str(plan))
        shown.flush()
        assert len(viewer.shown) == plans
