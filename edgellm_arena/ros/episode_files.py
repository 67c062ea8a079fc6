# SPDX-License-Identifier: Apache-2.0
"""The files of an episode: its picture, the spoken command, and what one hears."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgellm_arena.episodes.episode import PlanRecord, World
from edgellm_arena.episodes.picture import save_episode
from edgellm_arena.ros.microphone import save_wav
from edgellm_arena.ros.soundtrack import soundtrack
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.voice.voice import Voice, speak


def save_files(
    folder: Path,
    number: int,
    world: World,
    plans: Sequence[PlanRecord],
    command: Sound | None,
    voice: Voice | None,
) -> str:
    """Write the files of episode `number` into a folder; return the picture's path.

    command: as recorded, None = typed. voice: speaks the first plan's words, None = no sound of the episode.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = f"episode_{number:03d}"
    picture = folder / f"{name}.png"
    save_episode(picture, world, plans)
    if command is not None:
        save_wav(folder / f"{name}.wav", command)
    if voice is not None:
        samples, rate = speak(voice, plans[0].text)
        save_wav(folder / f"{name}_sound.wav", soundtrack(command, samples, rate, world.track[:, 3]))
    return str(picture)
