# SPDX-License-Identifier: Apache-2.0
"""Collects what the robot sees and where it is, at the start of a plan.

Runs on the planning threads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rclpy.node import Node
from std_msgs.msg import Header

from edgellm_ros.engine_directory.parts import VISUAL, EngineParts
from edgellm_ros.multimodal.video import Video
from edgellm_ros.ros.messaging import NANOSECONDS, to_nanoseconds
from edgellm_ros.ros.node.planning.command_trigger import CommandTrigger
from edgellm_ros.ros.node.planning.plan_request import PlanRequest
from edgellm_ros.ros.node.planning.robot_state import RobotState
from edgellm_ros.ros.node.sensors.cameras import CameraFrames, Cameras
from edgellm_ros.ros.node.sensors.frame_history import FrameHistory
from edgellm_ros.ros.node.sensors.images import decode_image
from edgellm_ros.ros.node.sensors.input_time import Frame, StaleInputError, check_age, check_not_future
from edgellm_ros.ros.node.settings.live_parameters import LiveParameters


@dataclass(frozen=True, eq=False)
class ObservedInputs:
    """What a plan is made of, besides words and sound."""

    images: tuple[np.ndarray, ...]  # of a policy with several observations [O,H,W,3], else [H,W,3]
    video: Video | None  # takes the place of the images
    header: Header  # of the frame: stamp and camera; without a frame, the present time
    start: int | None  # time of the plan's first action in ns; None if a frame has no time
    fields: dict[str, Any]  # of LLMGenerationRequest: history and speed, or state and cameras

    @property
    def frame(self) -> np.ndarray | None:
        """The newest image [H,W,3] of ~/image; None without images."""
        if not self.images:
            return None
        return self.images[0][-1] if self.images[0].ndim == 4 else self.images[0]


class PlanInputs:
    """Frames and the robot's state, filled by callbacks; thread-safe."""

    def __init__(
        self,
        node: Node,
        parameters: LiveParameters,
        *,
        parts: EngineParts,
        trigger: CommandTrigger,
        history: FrameHistory,
        cameras: Cameras,
        robot: RobotState,
    ) -> None:
        """Take the sources of the inputs.

        `trigger` has the newest camera frame, `history` those before it, `cameras` those of others.
        """
        self._parameters = parameters
        self._sees = not parts.missing(VISUAL)
        self._trigger = trigger
        self._history = history
        self._cameras = cameras
        self._robot = robot
        self._clock = node.get_clock()
        self._logger = node.get_logger()

    def observe(self, request: PlanRequest, drives: bool) -> ObservedInputs:
        """Collect the inputs of a request; `drives`: it asks for trajectories.

        StaleInputError for one that is missing, too old or stamped in the future; ValueError for one that
        cannot be used.
        """
        if request.takes_newer_frame and self._is_too_old(request.frames):
            request = replace(request, frames=None)
        frames, stored = request.frames, request.camera_frames
        if frames is None:
            frames, stored = self._newest()
        try:
            self._check_ages(frames)
        except StaleInputError as error:
            if request.frames is None and (refused := self._trigger.refused):
                raise StaleInputError(f"{error}; a newer one was refused: {refused}") from None
            raise
        header = self._header(frames)
        start = self._start(frames, header)
        if request.state:
            fields: dict[str, Any] = {"state": np.array(request.state)}
        else:
            # a goal's images are of one time, and so is their state
            fields = self._robot.at(self._time_of(frames), drives, earlier=stored is not None)
        if self._cameras.names:
            fields["cameras"] = self._cameras.names
            one_time = bool(request.state)  # a goal's state is of the present, so the frames are too
            images = self._images_of_cameras(self._of_all_cameras(frames, stored, one_time))
        else:
            images = tuple(map(self._decode, frames))
        return ObservedInputs(images, self._video(request, frames, images), header, start, fields)

    def _newest(self) -> tuple[tuple[Frame, ...], CameraFrames]:
        """Return the newest frame on ~/image, and the last ones of a policy's cameras.

        Empty if no frame has arrived and the engine takes none.
        """
        newest = self._trigger.frame
        if newest is not None:
            return (newest,), self._cameras.last()
        if self._sees:
            refused = self._trigger.refused
            why = "no camera frame has arrived on ~/image"
            if refused:
                why = f"the newest camera frame was refused: {refused}"
            raise StaleInputError(f"the request has no image, and {why}")
        return (), ()

    def _is_too_old(self, frames: tuple[Frame, ...] | None) -> bool:
        """Return whether the camera has sent a newer frame, and these are too old."""
        if not frames or self._trigger.frame is frames[0]:
            return False
        oldest, now = _oldest(frames), self._clock.now().nanoseconds
        return oldest is not None and (now - oldest) * 1e-9 > self._parameters.current.max_input_age

    def _check_ages(self, frames: tuple[Frame, ...]) -> None:
        parameters, now = self._parameters.current, self._clock.now().nanoseconds
        for frame in frames:
            if frame.time is not None:
                check_not_future("the camera frame", frame.time, now, parameters.future_stamp_tolerance)
                check_age("the camera frame", frame.time, now, parameters.max_input_age)

    def _of_all_cameras(
        self, frames: tuple[Frame, ...], stored: CameraFrames | None, one_time: bool
    ) -> CameraFrames:
        """Return the frames of a policy's observations, of each camera, oldest first."""
        parameters = self._parameters.current
        if stored is not None:
            wait_s, tolerance_s = parameters.odom_wait, parameters.camera_tolerance
            present = self._cameras.beside(frames[0], stored, wait_s, tolerance_s)
            return tuple((each,) for each in present) if one_time else self._cameras.observed(present, stored)
        names = self._cameras.names
        if len(frames) != len(names):
            raise ValueError(
                f"the goal has {len(frames)} images, expected one of each camera: {', '.join(names)} "
                "(parameter cameras)"
            )
        return tuple((frame,) for frame in frames)

    def _images_of_cameras(self, frames: CameraFrames) -> tuple[np.ndarray, ...]:
        """Decode frames. ValueError, with the camera's name if there are several."""
        images = []
        for name, observed in zip(self._cameras.names, frames, strict=True):
            try:
                images.append(self._observed(observed))
            except ValueError as error:
                raise ValueError(f"camera {name}: {error}" if len(frames) > 1 else str(error)) from None
        return tuple(images)

    def _observed(self, frames: tuple[Frame, ...]) -> np.ndarray:
        """Decode a camera's frames: one to [H,W,3], several to [O,H,W,3]."""
        decoded: dict[int, np.ndarray] = {}  # an observation may repeat the frame of another
        for frame in frames:
            if id(frame) not in decoded:
                decoded[id(frame)] = self._decode(frame)
        images = [decoded[id(frame)] for frame in frames]
        if any(image.shape != images[-1].shape for image in images):
            sizes = ", ".join(f"{image.shape[1]} x {image.shape[0]}" for image in images)
            raise ValueError(f"the frames of a plan's observations have several sizes: {sizes}")
        return images[0] if len(images) == 1 else np.stack(images)

    def _decode(self, frame: Frame) -> np.ndarray:
        return decode_image(frame.message, self._parameters.current.limits.image_pixels)

    def _video(
        self, request: PlanRequest, frames: tuple[Frame, ...], images: tuple[np.ndarray, ...]
    ) -> Video | None:
        """Return the camera frames before the plan's frame, and this frame, as a video.

        None if there are none before it, as with the parameter frames_per_plan 1. Earlier frames that cannot
        be decoded or have another size are left out.
        """
        parameters, earlier = self._parameters.current, request.earlier_frames
        if request.frames is None and frames:
            earlier = self._history.before(frames[0], parameters.frame_interval, parameters.max_input_age)
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

    def _header(self, frames: tuple[Frame, ...]) -> Header:
        """Return the header of the oldest frame; without a frame, the present time."""
        if not frames:
            return Header(stamp=self._clock.now().to_msg())
        headers = (frame.message.header for frame in frames)
        return min(headers, key=lambda header: to_nanoseconds(header.stamp))

    def _start(self, frames: tuple[Frame, ...], header: Header) -> int | None:
        return _oldest(frames) if frames else to_nanoseconds(header.stamp)

    def _time_of(self, frames: tuple[Frame, ...]) -> float | None:
        """Return the oldest frame's time in seconds; None without a time to align with."""
        oldest = _oldest(frames)
        return None if oldest is None else oldest / NANOSECONDS


def _oldest(frames: tuple[Frame, ...]) -> int | None:
    """Return the oldest frame's time in ns.

    None without frames, or if one has no time.
    """
    times = [frame.time for frame in frames if frame.time is not None]
    return min(times) if times and len(times) == len(frames) else None
