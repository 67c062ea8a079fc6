# SPDX-License-Identifier: Apache-2.0
"""Video files: frames sampled as a checkpoint's video processor samples them.

Every error names the file.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm_ros.io.contents import silenced_stderr

if TYPE_CHECKING:
    import numpy as np

    from edgellm_ros.engine_directory.config import EngineConfig
    from edgellm_ros.multimodal.video import Video


def read_video(path: str | Path, fps: float, config: EngineConfig) -> Video:
    """Read about `fps` frames per second of a file that OpenCV can decode.

    As in transformers, timestamps are counted from the beginning of the file, and the rate of the video is
    that of the sampled frames, or `fps` for the Omni models. ValueError or FileNotFoundError for
    a file that cannot be read, and for an engine that takes no videos.
    """
    import cv2

    from edgellm_ros.multimodal.video import Video
    from edgellm_ros.multimodal.video_config import OMNI_POSITIONS
    from edgellm_ros.multimodal.video_processor import VideoProcessor
    from edgellm_ros.multimodal.vision_config import QwenVisionTower

    if not isinstance(config.vision, QwenVisionTower) or config.video is None:
        raise ValueError(f"{path}: this engine takes no videos")
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such file")
    with silenced_stderr():
        capture = cv2.VideoCapture(str(path))
    try:
        total = int(capture.get(cv2.CAP_PROP_FRAME_COUNT)) if capture.isOpened() else 0
        file_fps = capture.get(cv2.CAP_PROP_FPS)
        if total < 1 or not 0 < file_fps < math.inf:
            raise ValueError(f"{path}: not a video that OpenCV can read")
        try:
            indices = VideoProcessor(config.vision, config.video).sample(total, file_fps, fps)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        with silenced_stderr():
            frames = _read_frames(capture, indices, path)
    finally:
        capture.release()
    times = [index / file_fps for index in indices]
    if config.video.timestamps not in OMNI_POSITIONS:
        fps = len(indices) / total * file_fps
    return Video(frames, times, fps=fps)


def _read_frames(capture: object, indices: list[int], path: str | Path) -> list[np.ndarray]:
    """Read the frames with these indices, RGB, one after another."""
    import cv2

    frames, wanted = [], iter(indices)
    following = next(wanted)
    for index in range(indices[-1] + 1):
        if not capture.grab():  # type: ignore[attr-defined]
            raise ValueError(f"{path}: frame {index} cannot be read, the file says that it has more frames")
        if index == following:
            frames.append(cv2.cvtColor(capture.retrieve()[1], cv2.COLOR_BGR2RGB))  # type: ignore[attr-defined]
            following = next(wanted, -1)
    return frames
