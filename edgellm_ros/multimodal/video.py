# SPDX-License-Identifier: Apache-2.0
"""A video in the format of all parts of the runtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import numpy as np

from edgellm_ros.echo import quoted
from edgellm_ros.multimodal.device_image import Image, as_image
from edgellm_ros.multimodal.image_pixels import check_image
from edgellm_ros.multimodal.sound import Sound

MAX_SECONDS = 1e10  # stamps since 1970 are allowed
MIN_FPS, MAX_FPS = 1e-6, 1e6


@dataclass(frozen=True, eq=False)
class Video:
    """Frames of one size, oldest first, and their times.

    A video has timestamps or fps or both; frame i of a video without timestamps was taken at i / fps. Its
    sound, if it has one, begins at the first frame. ValueError for no frames, frames of different sizes,
    another number of timestamps than frames, timestamps that do not increase, values that are not finite or
    out of range, and a sound that is no Sound.
    """

    frames: Sequence[Image]  # uint8 [H, W, 3] each, RGB
    timestamps: Sequence[float] | None = None  # of each frame in seconds
    fps: float | None = None  # mean number of frames per second; None = that of the timestamps
    sound: Sound | None = None  # what was heard meanwhile; the prompt has it between the frames

    def __post_init__(self) -> None:
        if not isinstance(self.frames, (list, tuple, np.ndarray)):
            raise ValueError(f"frames must be a sequence of images, got {quoted(self.frames)}")
        frames = tuple(map(as_image, self.frames))
        if not frames:
            raise ValueError("a video must have at least one frame, got none")
        for index, frame in enumerate(frames):
            try:
                check_image(frame)
            except ValueError as error:
                raise ValueError(f"frame {index}: {error}") from None
            if frame.shape != frames[0].shape:
                raise ValueError(
                    f"the frames of a video must have one size: frame 0 is {_size(frames[0])} pixels, "
                    f"frame {index} {_size(frame)}"
                )
        if self.timestamps is None and self.fps is None:
            raise ValueError("a video needs timestamps or fps")
        object.__setattr__(self, "frames", frames)
        if self.sound is not None and not isinstance(self.sound, Sound):
            raise ValueError(f"sound must be a Sound, got {type(self.sound).__name__}")
        if self.fps is not None and not _is_number(self.fps, MIN_FPS, MAX_FPS):
            raise ValueError(f"fps must be a number from {MIN_FPS:g} to {MAX_FPS:g}, got {quoted(self.fps)}")
        object.__setattr__(self, "timestamps", self._checked_timestamps())

    @property
    def size(self) -> tuple[int, int]:
        """Return height and width of the frames in pixels."""
        return self.frames[0].shape[0], self.frames[0].shape[1]

    @property
    def sampled_fps(self) -> float:
        """Return the mean number of frames per second; 1 for a single frame."""
        if self.fps is not None:
            return float(self.fps)
        times = self.timestamps or ()
        return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 1.0

    def _checked_timestamps(self) -> tuple[float, ...]:
        if self.timestamps is None:
            assert self.fps is not None
            return tuple(index / self.fps for index in range(len(self.frames)))
        if not isinstance(self.timestamps, (list, tuple, np.ndarray)):
            raise ValueError(f"timestamps must be a sequence of seconds, got {quoted(self.timestamps)}")
        times = tuple(self.timestamps)
        if len(times) != len(self.frames):
            raise ValueError(
                f"a video needs a timestamp for each frame, got {len(times)} for {len(self.frames)} frames"
            )
        for index, time in enumerate(times):
            if not _is_number(time, 0.0, MAX_SECONDS):
                raise ValueError(
                    f"timestamps must be from 0 to {MAX_SECONDS:g} s, got {quoted(time)} for frame {index}"
                )
            if index and time <= times[index - 1]:
                raise ValueError(
                    f"timestamps must increase, got {times[index - 1]:g} s for frame {index - 1} and "
                    f"{time:g} s for frame {index}"
                )
        return tuple(map(float, times))


def _is_number(value: object, low: float, high: float) -> bool:
    """Tell whether a value is a number in a range, which NaN is not."""
    return isinstance(value, Real) and not isinstance(value, bool) and low <= value <= high


def _size(frame: np.ndarray) -> str:
    return f"{frame.shape[1]}x{frame.shape[0]}"
