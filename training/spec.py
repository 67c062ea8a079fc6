# SPDX-License-Identifier: Apache-2.0
"""Shared by training and checkpoint: trajectory tokens, action space, prompts."""

from __future__ import annotations

from typing import Any

# Discretised as in Alpamayo-R1: the first point, then differences; uniform bins on each axis.
HISTORY: dict[str, Any] = {
    "num_points": 8,
    "dt": 0.1,
    "axes": ("x", "y"),
    "low": (-1.0, -1.0),
    "high": (1.0, 1.0),
    "num_tokens": 1000,
}

ACTION_SPACE = {
    "type": "unicycle",
    "names": ["acceleration", "curvature"],
    "units": ["m/s^2", "1/m"],
    "dt": 0.1,
    "horizon": 40,
    "low": [-1.5, -2.5],
    "high": [1.0, 2.5],
}

SYSTEM_PROMPTS = (
    "you are a robot in an arena.",
    "you are a helpful robot. look at the picture, answer and drive.",
    "you drive a small robot. look where you go.",
    "you are a robot with one camera. say what you see and what you do.",
)
