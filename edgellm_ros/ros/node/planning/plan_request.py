# SPDX-License-Identifier: Apache-2.0
"""PlanRequest: what a command or a goal asks of one plan."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from edgellm_ros.diffusion.action_head import SpaceConfig
from edgellm_ros.diffusion.chunking import ChunkCondition
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.ros.node.sensors.cameras import CameraFrames
from edgellm_ros.ros.node.sensors.input_time import Frame
from edgellm_ros.runtime.conversation import Message
from edgellm_ros.runtime.request import SamplingParams


@dataclass(frozen=True, eq=False)
class PlanRequest:
    """The inputs of one plan.

    The functions are called when the plan starts, so that their errors end this plan.
    """

    request_id: str
    prompt: str
    system_prompt: str
    frames: tuple[Frame, ...] | None  # None = the newest camera frame when the plan starts
    sound: Callable[[], Sound] | None  # None = no sound
    lora: str  # "" = the adapter that is active when the plan starts
    sampling: Callable[[], SamplingParams]
    noise_seed: int | None  # None = the runtime's
    action_samples: int
    denoise_steps: int | None  # None = the checkpoint's default
    earlier_frames: tuple[Frame, ...] = ()  # camera frames before the one in `frames`, oldest first
    # the last ones of a policy's cameras at the frame on ~/image; None = `frames` has all cameras
    camera_frames: CameraFrames | None = None
    earlier_messages: Callable[[], tuple[Message, ...]] | None = None  # None = nothing was said before
    instruction: Hashable = None  # equal for requests with the same instruction
    # the chunk that the plan continues, or none; None = as the parameter `chunking` says
    previous_chunk: Callable[[SpaceConfig], ChunkCondition | None] | None = None
    tools: Callable[[], tuple[dict[str, Any], ...]] | None = None  # None = no tools
    takes_newer_frame: bool = False  # if `frames` got too old while the request waited for its turn
    state: tuple[float, ...] = ()  # of a policy: the robot's state; empty = from ~/joint_states
    navigation: str = ""  # an instruction of navigation, in place of the prompt
    guidance: float | None = None  # weight of `navigation` in the trajectories; None = they are not guided
    has_grammar: bool = False  # then `sampling`, which checks the grammar, may take a second
