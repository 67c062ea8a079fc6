# SPDX-License-Identifier: Apache-2.0
"""Markers of a plan, for RViz and Foxglove: all samples' paths, and the words."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from builtin_interfaces.msg import Duration
from geometry_msgs.msg import Point, Pose, Vector3
from nav_msgs.msg import Path
from std_msgs.msg import ColorRGBA, Header
from visualization_msgs.msg import Marker, MarkerArray

from edgellm_ros.ros.messaging import NANOSECONDS
from edgellm_ros.ros.node.outputs.overlay import COLORS
from edgellm_ros.ros.node.settings.markers import MarkerSettings

PATHS, WORDS = "paths", "words"  # namespaces, which viewers can hide; a path's id is its sample's index
STRONG, WEAK = (0.06, 1.0), (0.03, 0.4)  # width in m and opacity of the line
ABOVE_FLOOR = 0.02  # m; a line in the plane of the viewer's grid would flicker
WORDS_AT = -0.8, 0.1  # m: behind the robot, where they cover no path in a view from behind; above the floor
LETTERS = 0.12  # m, height of capitals
COLUMNS = 40  # letters of a line


def make_markers(words: str, paths: Sequence[Path], base: Header, settings: MarkerSettings) -> MarkerArray:
    """Return the markers of a plan, which replace all earlier ones.

    `base`: stamp of the frame, and the robot's base frame, in which the `paths` of all samples are.
    """
    lifetime = round(settings.lifetime * NANOSECONDS)
    common = {
        "header": base,
        "action": Marker.ADD,
        "lifetime": Duration(sec=lifetime // NANOSECONDS, nanosec=lifetime % NANOSECONDS),
    }
    markers = clear_markers(base).markers
    for index, path in enumerate(paths):
        width, alpha = STRONG if index == settings.sample_index else WEAK
        markers.append(
            Marker(
                **common,
                ns=PATHS,
                id=index,
                type=Marker.LINE_STRIP,
                pose=_pose(0.0, ABOVE_FLOOR),
                scale=Vector3(x=width),
                color=_color(COLORS[index % len(COLORS)], alpha),
                points=[pose.pose.position for pose in path.poses],
            )
        )
    if words.strip():
        markers.append(
            Marker(
                **common,
                ns=WORDS,
                type=Marker.TEXT_VIEW_FACING,
                pose=_pose(*WORDS_AT),
                scale=Vector3(z=LETTERS),
                color=_color((255, 255, 255), 1.0),
                text="\n".join(textwrap.wrap(words, COLUMNS)),
            )
        )
    return MarkerArray(markers=markers)


def clear_markers(base: Header) -> MarkerArray:
    """Return the marker that removes all others."""
    return MarkerArray(markers=[Marker(header=base, action=Marker.DELETEALL)])


def _pose(ahead: float, height: float) -> Pose:
    pose = Pose(position=Point(x=ahead, z=height))
    pose.orientation.w = 1.0
    return pose


def _color(rgb: tuple[int, int, int], alpha: float) -> ColorRGBA:
    red, green, blue = (value / 255 for value in rgb)
    return ColorRGBA(r=red, g=green, b=blue, a=alpha)
