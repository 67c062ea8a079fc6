# SPDX-License-Identifier: Apache-2.0
"""Garbage collections of a process that has loaded an engine."""

from __future__ import annotations

import gc
import weakref

import pytest

from edgellm_ros.loaded_objects import collect_again, leave_out_of_collections


class Part:
    """A part of something loaded, in a cycle with itself."""

    def __init__(self) -> None:
        self.whole = self


@pytest.fixture(autouse=True)
def after():
    yield
    collect_again()


def test_collections_do_not_visit_what_was_loaded():
    leave_out_of_collections()
    assert len(gc.get_objects()) < gc.get_freeze_count() / 10


def test_garbage_from_before_is_freed_and_what_is_closed_later_too():
    old, loaded = Part(), Part()
    old_ref, loaded_ref = weakref.ref(old), weakref.ref(loaded)
    del old
    leave_out_of_collections()
    assert old_ref() is None
    del loaded
    gc.collect()
    assert loaded_ref() is not None
    collect_again()
    gc.collect()
    assert loaded_ref() is None
