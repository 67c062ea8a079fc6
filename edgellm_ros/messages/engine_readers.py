# SPDX-License-Identifier: Apache-2.0
"""Readers of the sounds and videos that one engine takes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from edgellm_ros.io.sound_file import read_sound
from edgellm_ros.io.video_file import read_video
from edgellm_ros.messages.content_parts import FileReaders, ReadSound

if TYPE_CHECKING:
    from edgellm_ros.engine_directory.config import EngineConfig
    from edgellm_ros.multimodal.sound import Sound


def sound_reader(engine_dir: str, config: EngineConfig) -> ReadSound:
    """Return the function that reads a sound file for an engine."""

    def read(source: str | Path | bytes) -> Sound:
        if config.audio is None:
            where = "" if isinstance(source, bytes) else f"{source}: "
            raise ValueError(f"{where}{engine_dir} has no audio encoder")
        return read_sound(source, config.audio.max_seconds(config.builder.max_input_len))

    return read


def file_readers(engine_dir: str, config: EngineConfig) -> FileReaders:
    """Return the functions that read sound and video files for an engine."""
    return FileReaders(sound_reader(engine_dir, config), lambda path, fps: read_video(path, fps, config))
