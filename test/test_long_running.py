# SPDX-License-Identifier: Apache-2.0
"""Garbage collections and threads of a process that has loaded an engine."""

from __future__ import annotations

import gc
import sys
import weakref

import pytest

from edgellm_ros.long_running import SWITCH_S, begin_long_run, end_long_run


class Part:
    """A part of something loaded, in a cycle with itself."""

    def __init__(self) -> None:
        self.whole = self


@pytest.fixture(autouse=True)
def after():
    yield
    end_long_run()


def test_collections_do_not_visit_what_was_loaded():
    begin_long_run()
    assert len(gc.get_objects()) < gc.get_freeze_count() / 10


def test_garbage_from_before_is_freed_and_what_is_closed_later_too():
    old, loaded = Part(), Part()
    old_ref, loaded_ref = weakref.ref(old), weakref.ref(loaded)
    del old
    begin_long_run()
    assert old_ref() is None
    del loaded
    gc.collect()
    assert loaded_ref() is not None
    end_long_run()
    gc.collect()
    assert loaded_ref() is None


def test_threads_switch_more_often_until_the_end():
    before = sys.getswitchinterval()
    begin_long_run()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    end_long_run()
    assert sys.getswitchinterval() == before
