# SPDX-License-Identifier: Apache-2.0
"""The parameters `camera.*`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CameraParameters:
    """The parameters `camera.*`: a camera without distortion, looking ahead and down."""

    source: str  # auto or parameters
    rectified: bool  # frames are rectified
    fx: float  # focal lengths and principal point in pixels
    fy: float
    cx: float
    cy: float
    height: float  # m above the floor
    x: float  # m ahead of the base frame's origin
    pitch: float  # rad downwards
