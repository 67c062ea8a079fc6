# SPDX-License-Identifier: Apache-2.0
"""A finished plan, between the planner and the output topics."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from nav_msgs.msg import Path
from std_msgs.msg import Header

from edgellm_ros.msg import ActionChunk, Generation
from edgellm_ros.ros.path_message import to_path


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
    states: np.ndarray | None  # [samples, T+1, 4] x, y, heading, speed; None without paths, as for a policy
    frame: np.ndarray | None  # first image of the plan, or last frame of its video [H, W, 3]
    motion: Motion  # what the action chunks were planned for

    @cached_property
    def paths(self) -> list[Path]:
        """The states as poses, one path per sample; made when first read, in 0.5 ms each."""
        if self.states is None:
            return []
        chunks = zip(self.states, self.action_chunks, strict=True)
        return [to_path(states, chunk.dt, self.base) for states, chunk in chunks]
