# SPDX-License-Identifier: Apache-2.0
"""Who speaks to the robot in an episode, in which room, and what the robot's microphone makes of it.

Everything follows from the episode's seed, as the rest of the episode does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgellm_ros.arena.language import SPLITS
from edgellm_ros.arena.rooms import Room, hear, sample_room
from edgellm_ros.arena.voice import Voice, sample_voice, speak
from edgellm_ros.multimodal.sound import Sound

SAY_AT_MOST = 3  # times: then whoever is not heard gives up
BEFORE, AFTER = 0.5, 1.5  # s of the room around a sentence: the microphone is on for so long


@dataclass(frozen=True)
class Person:
    """Somebody with a voice, in a room with noise, in front of the robot's microphone."""

    voice: Voice
    room: Room
    seed: int

    def say(self, text: str, time: int = 0) -> Sound:
        """What the microphone records, 16 kHz; `time`: how often it was said before, with other noise."""
        rng = np.random.default_rng([self.seed, time, *text.encode()])
        return hear(speak(text, self.voice), self.room, rng, BEFORE, AFTER)

    def __str__(self) -> str:
        voice, room = self.voice, self.room
        return (
            f"{voice.variant} ({voice.accent}, {voice.words_per_minute} words/min), {room.noise} "
            f"{room.noise_db:.0f} dB below, echo of {room.reverberation_time:.1f} s"
        )


def person_of(seed: int, split: str = "test") -> Person:
    """The person of an episode; voice and room of the split "test" are never those of training."""
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is not train or test")
    rng = np.random.default_rng([seed, SPLITS.index(split)])
    return Person(sample_voice(rng, split), sample_room(rng, split), seed)
