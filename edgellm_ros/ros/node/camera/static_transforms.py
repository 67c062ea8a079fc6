# SPDX-License-Identifier: Apache-2.0
"""Static transforms between frames, as published on /tf_static."""

from __future__ import annotations

import threading

import numpy as np
from geometry_msgs.msg import TransformStamped

from edgellm_ros.echo import quoted

DEEPEST = 1000  # frames from one to its root; more are a loop
MOST_FRAMES = 10_000
LONGEST_NAME = 1000  # characters


class StaticTransforms:
    """The tree of static transforms; filled by a callback, read by other threads."""

    def __init__(self) -> None:
        self._parents: dict[str, tuple[str, np.ndarray]] = {}  # of a frame: its parent, pose in it [4, 4]
        self._lock = threading.Lock()  # `find` reads one state

    def add(self, message: TransformStamped) -> None:
        """Store a transform in place of the frame's previous one.

        ValueError for numbers that are not finite, a rotation that is not a unit quaternion, a name that is
        too long, or a new frame beyond MOST_FRAMES.
        """
        frame, parent = _name(message.child_frame_id), _name(message.header.frame_id)
        for name in (frame, parent):
            if len(name) > LONGEST_NAME:
                raise ValueError(f"frame {quoted(name)}: the name may have {LONGEST_NAME} characters")
        matrix = to_matrix(message)
        with self._lock:
            if frame not in self._parents and len(self._parents) >= MOST_FRAMES:
                raise ValueError(f"frame {quoted(frame)} is not stored: {MOST_FRAMES} frames are known")
            self._parents[frame] = parent, matrix

    def clear(self) -> None:
        """Drop all transforms."""
        with self._lock:
            self._parents.clear()

    def find(self, base: str, frame: str) -> np.ndarray | None:
        """Return the pose [4, 4] of `frame` in `base`; None if they are not connected."""
        with self._lock:
            of_base = _ancestors(self._parents, _name(base))
            of_frame = _ancestors(self._parents, _name(frame))
        for ancestor, pose in of_frame.items():
            if ancestor in of_base:
                return np.linalg.inv(of_base[ancestor]) @ pose
        return None


def to_matrix(message: TransformStamped) -> np.ndarray:
    """Return the child frame's pose [4, 4] in its parent; ValueError if it is invalid."""
    position, rotation = message.transform.translation, message.transform.rotation
    values = np.array([position.x, position.y, position.z, rotation.x, rotation.y, rotation.z, rotation.w])
    norm = float(np.linalg.norm(values[3:]))
    if not np.isfinite(values).all() or not 0.9 < norm < 1.1:
        raise ValueError(
            f"the transform from {quoted(message.header.frame_id)} to {quoted(message.child_frame_id)} is "
            f"not valid: the quaternion's length is {norm:.3g}, expected 1"
        )
    x, y, z, w = values[3:] / norm
    matrix = np.eye(4)
    matrix[:3, :3] = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
        [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
        [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
    ]
    matrix[:3, 3] = values[:3]
    return matrix


def _ancestors(parents: dict[str, tuple[str, np.ndarray]], frame: str) -> dict[str, np.ndarray]:
    """Return a frame's pose in itself and in each of its ancestors, nearest first."""
    poses, pose = {frame: np.eye(4)}, np.eye(4)
    while frame in parents and len(poses) < DEEPEST:
        frame, step = parents[frame]
        if frame in poses:
            break
        pose = step @ pose
        poses[frame] = pose
    return poses


def _name(frame: str) -> str:
    """Return the name without the leading slash of old publishers."""
    return frame.removeprefix("/")
