# SPDX-License-Identifier: Apache-2.0
"""Makes one plan: frame, odometry and command in; text, action chunks and paths out, all as messages.

Runs on the planning thread, the only thread that blocks.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from nav_msgs.msg import Path
from rclpy.node import Node
from std_msgs.msg import Header

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.msg import ActionChunk, Generation
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.ros.node.command_trigger import CommandTrigger
from edgellm_ros.ros.node.images import decode_image
from edgellm_ros.ros.node.live_parameters import LiveParameters
from edgellm_ros.ros.node.messages import to_action_chunks, to_generation, to_path
from edgellm_ros.ros.node.odometry import OdometryBuffer
from edgellm_ros.ros.node.worker import CANCELLED, COMPLETED, ERROR, STALE_INPUT, Job, Outcome
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, LLMGenerationResponse, SamplingParams


class StaleInputError(Exception):
    """The camera or the odometry has nothing that is new enough."""


@dataclass(frozen=True, eq=False)
class PlanRequest:
    """What to plan. `frames` are camera messages; None = the newest one when the work starts.

    `lora` "" means the adapter that is active when the work starts. `sampling` and `sound` (None = nothing is
    spoken) are made then, so that what is wrong with them is this plan's error. `noise_seed` and
    `denoise_steps` None mean the runtime's and the checkpoint's own.
    """

    request_id: str
    prompt: str
    system_prompt: str
    frames: tuple[Any, ...] | None
    sound: Callable[[], Sound] | None
    lora: str
    sampling: Callable[[], SamplingParams]
    noise_seed: int | None
    action_samples: int
    denoise_steps: int | None


@dataclass(frozen=True)
class SystemPrompt:
    """To be computed ahead of time. `lora` "" means the adapter that is active when the work starts."""

    text: str
    lora: str


@dataclass(frozen=True, eq=False)
class Plan:
    """A finished plan as messages, and the frame [H, W, 3] that it was made from (None without a camera)."""

    generation: Generation
    action_chunks: list[ActionChunk]
    paths: list[Path]
    states: np.ndarray | None
    frame: np.ndarray | None


class Planner:
    """Runs jobs whose request is a `PlanRequest` or a `SystemPrompt`."""

    def __init__(
        self,
        node: Node,
        parameters: LiveParameters,
        runtime: LLMInferenceRuntime,
        odometry: OdometryBuffer,
        trigger: CommandTrigger,
    ) -> None:
        """Plan with `runtime`. `trigger` has the newest camera frame."""
        self._parameters = parameters
        self._runtime = runtime
        self._odometry = odometry
        self._trigger = trigger
        self._clock = node.get_clock()
        self._logger = node.get_logger()

    def plan(self, job: Job) -> Outcome:
        """Plan one job. Whatever goes wrong is in the outcome."""
        try:
            return self._plan(job)
        except StaleInputError as error:
            return Outcome(STALE_INPUT, str(error))
        except (ValueError, EngineError) as error:
            return Outcome(ERROR, str(error))
        except Exception as error:
            self._logger.error(traceback.format_exc())
            return Outcome(ERROR, f"internal error, see the node's log: {type(error).__name__}: {error}")

    def _plan(self, job: Job) -> Outcome:
        if isinstance(job.request, SystemPrompt):
            self._runtime.gen_and_save_system_prompt_kv_cache(job.request.text, job.request.lora)
            return Outcome(COMPLETED)
        request: PlanRequest = job.request
        sampling = request.sampling()
        sounds = self._sounds(request)
        messages = self._frames(request)
        images = tuple(decode_image(message) for message in messages)
        header = self._input_header(messages)
        history, speed = self._history(header, bool(messages))
        has_actions = self._runtime.config.action is not None
        response = self._runtime.handle_request(
            LLMGenerationRequest(
                prompt=request.prompt,
                system_prompt=request.system_prompt,
                images=images,
                audio=sounds,
                history=history,
                speed=speed,
                lora=request.lora,
                sampling=sampling,
                action_samples=request.action_samples if has_actions else 0,
                noise_seed=request.noise_seed,
                denoise_steps=request.denoise_steps,
                on_progress=job.report,
                cancel=job.cancel,
            )
        )
        plan = self._to_messages(job, response, header, images[0] if images else None)
        if response.finish_reason == CANCELLED:
            stopped = job.stopped or Outcome(CANCELLED, "cancelled")
            return Outcome(stopped.reason, stopped.message, plan)
        return Outcome(COMPLETED, "", plan)

    def _sounds(self, request: PlanRequest) -> tuple[Sound, ...]:
        if request.sound is None:
            return ()
        if self._runtime.config.audio is None:
            raise ValueError("this engine has no audio encoder, the request has audio")
        return (request.sound(),)

    def _frames(self, request: PlanRequest) -> tuple[Any, ...]:
        """The camera messages to plan on, none of them too old."""
        frames = request.frames
        if frames is None:
            newest = self._trigger.frame
            if newest is None and self._runtime.config.vision is not None:
                raise StaleInputError(
                    "the request brings no image and no camera frame has arrived on ~/image"
                )
            frames = () if newest is None else (newest,)
        limit = self._parameters.current.max_input_age
        for frame in frames:
            age = self._clock.now().nanoseconds * 1e-9 - _seconds(frame.header)
            if _seconds(frame.header) and age > limit:
                raise StaleInputError(
                    f"the camera frame is {age:.2f} s old, limit {limit:g} s (parameter max_input_age)"
                )
        return frames

    def _input_header(self, frames: tuple[Any, ...]) -> Header:
        """Header of the oldest frame; without a frame, now."""
        if not frames:
            return Header(stamp=self._clock.now().to_msg())
        return min((frame.header for frame in frames), key=_seconds)

    def _history(self, header: Header, has_frame: bool) -> tuple[np.ndarray | None, float | None]:
        """Past poses and speed at the frame's time; None where none is sent or needed."""
        action = self._runtime.config.action
        if action is None:
            return None, None
        points, dt = action.trajectory_history.num_points, action.trajectory_history.dt
        stamp = _seconds(header)
        if has_frame and stamp:
            self._odometry.wait_until(stamp, self._parameters.current.odom_wait)
        else:  # nothing to align with: where the robot is now
            stamp = self._odometry.newest_stamp or 0.0
        try:
            return self._odometry.state_at(stamp, points, dt, self._parameters.current.max_input_age)
        except TimeoutError as error:
            raise StaleInputError(str(error)) from None

    def _to_messages(
        self, job: Job, response: LLMGenerationResponse, header: Header, frame: np.ndarray | None
    ) -> Plan:
        request: PlanRequest = job.request
        now = time.monotonic()
        generation = to_generation(
            response, header, request.request_id, job.started - job.arrival, now - job.arrival
        )
        action = self._runtime.config.action
        if action is None or response.actions is None or response.paths is None:
            return Plan(generation, [], [], None, frame)
        base = Header(stamp=header.stamp, frame_id=self._parameters.current.frame_id)
        chunks = to_action_chunks(response, action.action_space, base, request.request_id)
        paths = [to_path(states, action.action_space.dt, base) for states in response.paths]
        return Plan(generation, chunks, paths, response.paths, frame)


def _seconds(header: Header) -> float:
    """Stamp in seconds; 0 = not stamped."""
    return header.stamp.sec + header.stamp.nanosec * 1e-9
