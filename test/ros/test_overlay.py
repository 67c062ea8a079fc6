# SPDX-License-Identifier: Apache-2.0
"""Paths drawn on camera frames."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm_arena.world.camera import CAMERA
from edgellm_ros.ros.node.camera.camera import camera_of
from edgellm_ros.ros.node.outputs.overlay import draw_paths
from edgellm_ros.ros.node.settings.camera import CameraParameters

PARAMETERS = CameraParameters(
    "auto", False, CAMERA.focal, CAMERA.focal, CAMERA.width / 2, CAMERA.height / 2,
    CAMERA.z, CAMERA.x, CAMERA.pitch,
)  # fmt: skip
ARENA = camera_of(PARAMETERS)
FRAME = np.full((224, 320, 3), 128, np.uint8)


def straight(length: float, y: float = 0.0) -> np.ndarray:
    x = np.linspace(0, length, 41)
    return np.column_stack([x, np.full(41, y), np.zeros(41), np.zeros(41)])


def test_a_path_ahead_is_drawn_in_the_lower_middle():
    drawn = draw_paths(FRAME, straight(2.0)[None], ARENA)
    rows, columns = np.nonzero((drawn != FRAME).any(axis=2))
    assert rows.min() > 60
    assert abs(columns.mean() - 160) < 2


def test_a_path_to_the_left_is_drawn_on_the_left():
    drawn = draw_paths(FRAME, straight(2.0, y=0.5)[None], ARENA)
    assert np.nonzero((drawn != FRAME).any(axis=2))[1].max() < 160


@pytest.mark.parametrize("path", [straight(1e9), straight(-5.0), straight(0.0), straight(1.0, y=1e12)])
def test_no_path_is_too_odd_to_draw(path):
    assert draw_paths(FRAME, path[None], ARENA).shape == FRAME.shape


def test_the_frame_itself_is_left_alone():
    frame = FRAME.copy()
    draw_paths(frame, np.stack([straight(2.0), straight(1.0)]), ARENA)
    np.testing.assert_array_equal(frame, FRAME)
