# SPDX-License-Identifier: Apache-2.0
"""The person who speaks to the robot in an episode, and the room they are in.

Everything follows from the episode's seed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgellm_arena.speech.rooms import Room, hear, sample_room
from edgellm_arena.speech.voice import Voice, sample_voice, speak
from edgellm_arena.words.language import SPLITS
from edgellm_ros.multimodal.sound import Sound

SAY_AT_MOST = 3  # attempts to be heard
BEFORE, AFTER = 0.5, 1.5  # s of the room's noise that is recorded around a sentence


@dataclass(frozen=True)
class Person:
    """A speaker in a noisy room in front of the robot's microphone."""

    voice: Voice
    room: Room
    seed: int

    def say(self, text: str, time: int = 0) -> Sound:
        """Record a sentence with the robot's microphone at 16 kHz.

        `time`: how often the person has said the sentence before; the noise differs each time.
        """
        rng = np.random.default_rng([self.seed, time, *text.encode()])
        return hear(speak(text, self.voice), self.room, rng, BEFORE, AFTER)

    def __str__(self) -> str:
        voice, room = self.voice, self.room
        return (
            f"{voice.variant} ({voice.accent}, {voice.words_per_minute} words/min), {room.noise} "
            f"{room.noise_db:.0f} dB below, echo of {room.reverberation_time:.1f} s"
        )


def person_of(seed: int, split: str = "test") -> Person:
    """Return the person of an episode.

    Voices and rooms of the split "test" never occur in training. ValueError for an unknown split.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be train or test, got {split!r}")
    rng = np.random.default_rng([seed, SPLITS.index(split)])
    return Person(sample_voice(rng, split), sample_room(rng, split), seed)
