# SPDX-License-Identifier: Apache-2.0
"""Draws predicted paths on the camera frame of their plan."""

from __future__ import annotations

import cv2
import numpy as np

from edgellm_ros.ros.node.camera.camera import Camera

COLORS = ((40, 220, 90), (60, 170, 255), (255, 190, 40), (240, 90, 200))  # RGB, by sample
OUTLINE = (20, 20, 20)
SUBPIXEL_BITS = 4


def draw_paths(image: np.ndarray, paths: np.ndarray, camera: Camera) -> np.ndarray:
    """Draw paths on the floor of a copy of the frame.

    `image` [H, W, 3] uint8 RGB; `paths` [n, T+1, 2+] (x, y, ...) in metres.
    """
    canvas = np.ascontiguousarray(image).copy()
    thickness = max(1, round(image.shape[1] / 160))
    for index, path in reversed(list(enumerate(paths))):
        pixels = camera.project(np.asarray(path)[:, :2])
        pixels = pixels[np.isfinite(pixels).all(axis=1)]
        if not len(pixels):
            continue
        # Far outside of the frame OpenCV's fixed-point coordinates would overflow.
        pixels = np.clip(pixels, -1e4, 1e4)
        fixed = np.round(pixels * (1 << SUBPIXEL_BITS)).astype(np.int32).reshape(-1, 1, 2)
        color = COLORS[index % len(COLORS)]
        for stroke, width in ((OUTLINE, thickness + 2), (color, thickness)):
            cv2.polylines(canvas, [fixed], False, stroke, width, cv2.LINE_AA, SUBPIXEL_BITS)
        end = tuple(int(v) for v in fixed[-1, 0])
        cv2.circle(canvas, end, (thickness + 1) << SUBPIXEL_BITS, color, -1, cv2.LINE_AA, SUBPIXEL_BITS)
    return canvas
