# SPDX-License-Identifier: Apache-2.0
"""Makes one plan: from frame, odometry and command to text and trajectories.

Runs on the planning thread, the only thread that blocks.
"""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
from nav_msgs.msg import Path
from rclpy.node import Node
from std_msgs.msg import Header

from edgellm_ros.diffusion.chunking import ChunkCondition
from edgellm_ros.diffusion.config import ActionSpaceConfig
from edgellm_ros.echo import printable
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.msg import ActionChunk, Generation
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.multimodal.video import Video
from edgellm_ros.ros.messaging import NANOSECONDS, to_nanoseconds
from edgellm_ros.ros.node.chunking import Chunking, Motion
from edgellm_ros.ros.node.command_trigger import CommandTrigger
from edgellm_ros.ros.node.frame_history import FrameHistory
from edgellm_ros.ros.node.images import decode_image
from edgellm_ros.ros.node.input_time import Frame, StaleInputError, check_age, check_not_future
from edgellm_ros.ros.node.live_parameters import LiveParameters
from edgellm_ros.ros.node.messages import to_action_chunks, to_generation
from edgellm_ros.ros.node.odometry import OdometryBuffer
from edgellm_ros.ros.node.worker import CANCELLED, COMPLETED, ERROR, STALE_INPUT, Job, Outcome
from edgellm_ros.ros.path_message import to_path
from edgellm_ros.runtime.conversation import (
    USER,
    AudioPart,
    ImagePart,
    Message,
    TextPart,
    VideoPart,
)
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.lora import canonical_name
from edgellm_ros.runtime.request import LLMGenerationRequest, LLMGenerationResponse, SamplingParams


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
    earlier_messages: Callable[[], tuple[Message, ...]] | None = None  # None = nothing was said before
    instruction: Hashable = None  # equal for requests with the same instruction
    # the chunk that the plan continues, or none; None = as the parameter `chunking` says
    previous_chunk: Callable[[ActionSpaceConfig], ChunkCondition | None] | None = None
    tools: Callable[[], tuple[dict[str, Any], ...]] | None = None  # None = no tools


@dataclass(frozen=True, eq=False)
class Plan:
    """A finished plan as messages, with the paths and the frame of the overlay."""

    generation: Generation
    base: Header  # stamp of the input, and the robot's base frame
    action_chunks: list[ActionChunk]
    paths: list[Path]
    states: np.ndarray | None  # [samples, T+1, 4]
    frame: np.ndarray | None  # first image of the plan, or last frame of its video [H, W, 3]
    motion: Motion  # what the action chunks were planned for


class Planner:
    """Runs jobs whose request is a `PlanRequest`, or a function.

    A function does other work with the runtime.
    """

    def __init__(
        self,
        node: Node,
        parameters: LiveParameters,
        runtime: LLMInferenceRuntime,
        odometry: OdometryBuffer,
        trigger: CommandTrigger,
        camera: FrameHistory,
        chunking: Chunking,
    ) -> None:
        """Plan with `runtime`. `trigger` has the newest camera frame, `camera` those before it."""
        self._parameters = parameters
        self._runtime = runtime
        self._odometry = odometry
        self._trigger = trigger
        self._camera = camera
        self._chunking = chunking
        self._clock = node.get_clock()
        self._logger = node.get_logger()

    def plan(self, job: Job) -> Outcome:
        """Plan one job. Errors become outcomes."""
        try:
            return self._plan(job)
        except StaleInputError as error:
            return Outcome(STALE_INPUT, str(error))
        except (ValueError, OSError, EngineError) as error:
            return Outcome(ERROR, str(error))
        except Exception as error:
            self._logger.error(traceback.format_exc())
            text = printable(f"{type(error).__name__}: {error}")
            return Outcome(ERROR, f"internal error, see the node's log: {text}")

    def _plan(self, job: Job) -> Outcome:
        if not isinstance(job.request, PlanRequest):
            job.request()
            return Outcome(COMPLETED)
        request = job.request
        sampling = request.sampling()
        sounds = self._sounds(request)
        frames = self._frames(request)
        images = tuple(self._decode(frame) for frame in frames)
        video = self._video(request, frames, images)
        header = self._input_header(frames)
        history, speed = self._history(frames)
        has_actions = self._runtime.config.action is not None
        samples = request.action_samples if has_actions else 0
        lora = canonical_name(request.lora or self._runtime.active_lora)
        motion = Motion(request.instruction, lora, self._motion_start(frames, header))
        response = self._runtime.handle_request(
            LLMGenerationRequest(
                **self._prompt(request, images, video, sounds),
                history=history,
                speed=speed,
                lora=request.lora,
                sampling=sampling,
                action_samples=samples,
                noise_seed=request.noise_seed,
                denoise_steps=request.denoise_steps,
                tools=request.tools() if request.tools is not None else None,
                on_progress=job.report,
                cancel=job.cancel,
                previous_chunk=self._previous_chunk(request, motion) if samples else None,
            )
        )
        motion = dataclasses.replace(motion, lora=response.lora)
        plan = self._to_messages(job, response, header, images[0] if images else None, motion)
        if response.finish_reason == CANCELLED:
            stopped = job.stopped or Outcome(CANCELLED, "cancelled")
            return Outcome(stopped.reason, stopped.message, plan)
        return Outcome(COMPLETED, "", plan)

    def _prompt(
        self,
        request: PlanRequest,
        images: tuple[np.ndarray, ...],
        video: Video | None,
        sounds: tuple[Sound, ...],
    ) -> dict[str, Any]:
        """Return the fields of the prompt: messages if something was said before, else the short form.

        A video takes the place of the images.
        """
        videos = () if video is None else (video,)
        images = () if videos else images
        if request.earlier_messages is None:
            return {
                "prompt": request.prompt,
                "system_prompt": request.system_prompt,
                "images": images,
                "videos": videos,
                "audio": sounds,
            }
        system = [Message("system", request.system_prompt)] if request.system_prompt else []
        vision = (*map(ImagePart, images), *map(VideoPart, videos))
        content = (*vision, *map(AudioPart, sounds), TextPart(request.prompt))
        return {"messages": (*system, *request.earlier_messages(), Message(USER, content))}

    def _sounds(self, request: PlanRequest) -> tuple[Sound, ...]:
        if request.sound is None:
            return ()
        if self._runtime.config.audio is None:
            raise ValueError("this engine has no audio encoder, the request has audio")
        return (request.sound(),)

    def _video(
        self, request: PlanRequest, frames: tuple[Frame, ...], images: tuple[np.ndarray, ...]
    ) -> Video | None:
        """Return the camera frames before the frame of the plan, and this frame, as a video.

        None if there are none before it, as with the parameter frames_per_plan 1. Earlier frames that cannot
        be decoded or have another size are left out.
        """
        parameters, earlier = self._parameters.current, request.earlier_frames
        if request.frames is None and frames:
            earlier = self._camera.before(frames[0], parameters.frame_interval, parameters.max_input_age)
        found = []
        for frame in earlier:
            try:
                found.append((frame.time, self._decode(frame)))
            except ValueError as error:
                self._logger.warning(f"an earlier camera frame is left out: {error}")
        found = [(time, pixels) for time, pixels in found if pixels.shape == images[0].shape]
        if not found:
            return None
        found.append((frames[0].time, images[0]))
        start = found[0][0]
        return Video([pixels for _, pixels in found], [(time - start) / NANOSECONDS for time, _ in found])

    def _decode(self, frame: Frame) -> np.ndarray:
        return decode_image(frame.message, self._parameters.current.limits.image_pixels)

    def _frames(self, request: PlanRequest) -> tuple[Frame, ...]:
        """Return the camera frames to plan on.

        StaleInputError for a frame that is missing, too old or stamped in the future.
        """
        frames = request.frames
        if frames is None:
            newest = self._trigger.frame
            if newest is None and self._runtime.config.vision is not None:
                raise StaleInputError("the request has no image, and no camera frame has arrived on ~/image")
            frames = () if newest is None else (newest,)
        parameters, now = self._parameters.current, self._clock.now().nanoseconds
        for frame in frames:
            if frame.time is not None:
                check_not_future("the camera frame", frame.time, now, parameters.future_stamp_tolerance)
                check_age("the camera frame", frame.time, now, parameters.max_input_age)
        return frames

    def _input_header(self, frames: tuple[Frame, ...]) -> Header:
        """Return the header of the oldest frame; without a frame, the present time."""
        if not frames:
            return Header(stamp=self._clock.now().to_msg())
        headers = (frame.message.header for frame in frames)
        return min(headers, key=lambda header: to_nanoseconds(header.stamp))

    def _motion_start(self, frames: tuple[Frame, ...], header: Header) -> int | None:
        """Return the time of a plan's first action in ns; None if a frame has no time."""
        if not frames:
            return to_nanoseconds(header.stamp)
        times = [frame.time for frame in frames]
        return None if None in times else min(time for time in times if time is not None)

    def _previous_chunk(self, request: PlanRequest, motion: Motion) -> ChunkCondition | None:
        """Return the chunk that a plan continues: the request's, else by the parameter `chunking`."""
        action = self._runtime.config.action
        if request.previous_chunk is not None and action is not None:
            return request.previous_chunk(action.action_space)
        return self._chunking.condition(motion)

    def _history(self, frames: tuple[Frame, ...]) -> tuple[np.ndarray | None, float | None]:
        """Return past poses and speed at the time of the oldest frame.

        (None, None) for an engine without action head.
        """
        action = self._runtime.config.action
        if action is None:
            return None, None
        parameters = self._parameters.current
        points, dt = action.trajectory_history.num_points, action.trajectory_history.dt
        times = [frame.time for frame in frames if frame.time is not None]
        if not times or len(times) < len(frames):  # no time to align with: use the newest state
            now = self._clock.now().nanoseconds
            return self._odometry.newest_state(now, points, dt, parameters.max_input_age)
        stamp = min(times) / NANOSECONDS
        self._odometry.wait_until(stamp, parameters.odom_wait)
        return self._odometry.state_at(stamp, points, dt, parameters.max_input_age)

    def _to_messages(
        self,
        job: Job,
        response: LLMGenerationResponse,
        header: Header,
        frame: np.ndarray | None,
        motion: Motion,
    ) -> Plan:
        request: PlanRequest = job.request
        now = time.monotonic()
        generation = to_generation(
            response, header, request.request_id, job.started - job.arrival, now - job.arrival
        )
        action = self._runtime.config.action
        base = Header(stamp=header.stamp, frame_id=self._parameters.current.frame_id)
        if action is None or response.actions is None or response.paths is None:
            return Plan(generation, base, [], [], None, frame, motion)
        chunks = to_action_chunks(response, action.action_space, base, request.request_id)
        paths = [to_path(states, action.action_space.dt, base) for states in response.paths]
        return Plan(generation, base, chunks, paths, response.paths, frame, motion)
