# SPDX-License-Identifier: Apache-2.0
"""Markers of a plan."""

from __future__ import annotations

import numpy as np
import pytest
from builtin_interfaces.msg import Duration, Time
from std_msgs.msg import Header
from visualization_msgs.msg import Marker, MarkerArray

from edgellm_ros.ros.node.outputs.markers import make_markers
from edgellm_ros.ros.node.settings.markers import MarkerSettings
from edgellm_ros.ros.path_message import to_path

BASE = Header(stamp=Time(sec=7), frame_id="base_link")
STATES = np.random.default_rng(0).normal(size=(3, 41, 4))
PATHS = [to_path(states, 0.1, BASE) for states in STATES]


def markers(words: str = "Turning left.", paths=PATHS, **settings: float) -> MarkerArray:
    settings = {"lifetime": 10.0, "sample_index": 0} | settings
    return make_markers(words, paths, BASE, MarkerSettings(**settings))


def of(array: MarkerArray, namespace: str) -> list[Marker]:
    return [marker for marker in array.markers if marker.ns == namespace]


def test_each_sample_is_a_line_strip_along_its_path():
    for index, marker in enumerate(of(markers(), "paths")):
        assert (marker.type, marker.action, marker.id) == (Marker.LINE_STRIP, Marker.ADD, index)
        points = [[point.x, point.y, point.z] for point in marker.points]
        np.testing.assert_array_equal(points, [[x, y, 0] for x, y, *_ in STATES[index]])
        assert marker.pose.orientation.w == 1


@pytest.mark.parametrize("chosen", [0, 2])
def test_the_chosen_sample_is_the_strongest(chosen):
    paths = of(markers(sample_index=chosen), "paths")
    assert [marker.color.a == 1 for marker in paths] == [index == chosen for index in range(3)]
    assert max(paths, key=lambda marker: marker.scale.x).id == chosen


def test_words_are_a_text_in_lines_that_face_the_viewer():
    (marker,) = of(markers("I see a red box ahead, and a blue ball to the left of it."), "words")
    assert marker.type == Marker.TEXT_VIEW_FACING
    assert marker.text == "I see a red box ahead, and a blue ball\nto the left of it."


def test_everything_is_in_the_base_frame_at_the_stamp_of_the_frame_and_expires():
    for marker in markers(lifetime=2.5).markers[1:]:
        assert marker.header == BASE
        assert marker.lifetime == Duration(sec=2, nanosec=500_000_000)


def test_a_new_plan_removes_the_markers_of_the_last_one_first():
    """Also of more samples than the new plan has."""
    for array in (markers(), markers(paths=[]), markers(words=" ", paths=[])):
        assert array.markers[0].action == Marker.DELETEALL
    assert len(markers(words=" ", paths=[]).markers) == 1


def test_no_two_markers_have_one_namespace_and_id():
    """RViz shows an error for such an array."""
    names = [(marker.ns, marker.id) for marker in markers().markers]
    assert len(set(names)) == len(names) == 5
