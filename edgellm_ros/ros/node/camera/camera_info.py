# SPDX-License-Identifier: Apache-2.0
"""Intrinsics from a sensor_msgs/CameraInfo."""

from __future__ import annotations

import numpy as np
from sensor_msgs.msg import CameraInfo

from edgellm_ros.echo import quoted
from edgellm_ros.ros.node.camera.camera import Intrinsics

# sensor_msgs/distortion_models.hpp: number of coefficients in `d`
COEFFICIENTS = {"plumb_bob": (4, 5), "rational_polynomial": (8,), "equidistant": (4,)}


def to_intrinsics(info: CameraInfo, rectified: bool, size: tuple[int, int] | None) -> Intrinsics:
    """Return the intrinsics of the frames that the message describes.

    `rectified`: the frames are rectified, as on image_rect, so `r` and `p` describe them instead of `k` and
    `d`. `size`: width and height of the frames, None if not known. ValueError for a camera that is not
    calibrated, numbers that are not finite, an unknown distortion model or frames of another size.
    """
    matrix = np.array(info.p).reshape(3, 4)[:, :3] if rectified else np.array(info.k).reshape(3, 3)
    rectification = np.array(info.r).reshape(3, 3) if rectified and any(info.r) else np.eye(3)
    distortion = np.zeros(0) if rectified else np.array(info.d)
    if not (matrix[0, 0] and matrix[1, 1]):
        raise ValueError(f"the camera is not calibrated: {'p' if rectified else 'k'} has focal lengths of 0")
    for name, values in (("k or p", matrix), ("r", rectification), ("d", distortion)):
        if not np.isfinite(values).all():
            raise ValueError(f"{name} is not finite")
    fisheye = not rectified and info.distortion_model == "equidistant"
    if not distortion.any() and not fisheye:
        distortion = np.zeros(0)
    elif len(distortion) not in COEFFICIENTS.get(info.distortion_model, ()):
        raise ValueError(
            f"distortion_model {quoted(info.distortion_model)} with {len(distortion)} coefficients is not "
            f"supported, only {', '.join(COEFFICIENTS)}"
        )
    # The calibration is that of the whole sensor; the frames may be a part of it, with pixels combined.
    binning = np.maximum(1, [info.binning_x, info.binning_y])
    roi = info.roi
    whole = np.array([roi.width or info.width, roi.height or info.height])
    width, height = (whole // binning).tolist()
    if size is not None and whole.all() and (width, height) != size:
        raise ValueError(f"it is for frames of {width}x{height} pixels, the frames have {size[0]}x{size[1]}")
    matrix = matrix.copy()
    matrix[:2, 2] -= [roi.x_offset, roi.y_offset]
    matrix[:2] /= binning[:, None]
    return Intrinsics(matrix, distortion, fisheye, rectification)


def check_frame_id(info: CameraInfo, frame_id: str) -> None:
    """Raise ValueError if the message is of another camera than `frame_id`'s frames."""
    if info.header.frame_id and frame_id and info.header.frame_id != frame_id:
        raise ValueError(
            f"it is of the camera {quoted(info.header.frame_id)}, the frames are of {quoted(frame_id)}"
        )
