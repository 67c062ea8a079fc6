# SPDX-License-Identifier: Apache-2.0
"""A finished plan, between the planner and the output topics."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from nav_msgs.msg import Path
from std_msgs.msg import Header

from edgellm_ros.msg import ActionChunk, Generation


@dataclass(frozen=True)
class Motion:
    """What a chunk was planned for."""

    instruction: Hashable  # equal for plans that follow the same instruction
    lora: str  # adapter; "" = base model
    stamp: int | None  # time of the first action, in ns; None = unknown


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """A finished plan as messages, with the paths and the frame of the overlay."""

    generation: Generation
    base: Header  # stamp of the input, and the robot's base frame
    action_chunks: list[ActionChunk]
    paths: list[Path]
    states: np.ndarray | None  # [samples, T+1, 4]
    frame: np.ndarray | None  # first image of the plan, or last frame of its video [H, W, 3]
    motion: Motion  # what the action chunks were planned for
