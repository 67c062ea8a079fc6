# SPDX-License-Identifier: Apache-2.0
"""Sentences spoken by many synthetic speakers, made with espeak-ng.

A speaker is one of espeak-ng's English accents with one of its voice variants, a speed and a pitch. Faster or
slower playback simulates a smaller or larger person. The variants, and one accent, are divided between the
splits: speakers of the split "test" never occur in training.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from edgellm_arena.words.language import SPLITS
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.voice.espeak import ESPEAK_RATE, PITCH, PITCH_RANGE, RATE, WORD_GAP, open_espeak

ACCENTS = {
    "train": ("en", "en-us", "en-us", "en-gb-x-rp", "en-gb-scotland", "en-029", "en-gb-x-gbclan"),
    "test": ("en", "en-us", "en-gb-x-rp", "en-gb-scotland", "en-us-nyc"),
}
# Almost equal variants are in the same split.
VARIANTS = {
    "train": (
        *("m1", "m2", "m3", "m4", "m6", "m7", "f1", "f2", "f3", "f5"),
        *("klatt", "klatt2", "klatt4", "klatt5", "klatt6", "benjamin", "edward", "david", "caleb"),
        *("Alex", "Mike", "max", "robert", "quincy", "paul", "Andy", "Diogo", "travis", "pedro", "sandro"),
        *("linda", "aunty", "anika", "shelby", "grandma", "victor", "Henrique", "Storm"),
    ),
    "test": (
        *("m5", "m8", "f4", "klatt3", "adam", "Michael", "gustave", "Gene", "antonio", "grandpa"),
        *("Annie", "Andrea", "steph"),
    ),
}
SMALLEST, LARGEST = 24500, 20000  # Hz: playback rates of the smallest and the largest person


@dataclass(frozen=True)
class Voice:
    """A speaker."""

    accent: str = "en-us"  # espeak-ng's name of the language
    variant: str = "m3"  # espeak-ng's name of the voice
    words_per_minute: int = 175  # 80 to 450
    pitch: int = 50  # 0 to 99, espeak-ng's scale
    pitch_range: int = 50  # 0 to 99, espeak-ng's scale
    word_gap: int = 0  # units of 10 ms
    sample_rate: int = ESPEAK_RATE  # playback rate in Hz; higher simulates a smaller, faster speaker

    def __post_init__(self) -> None:
        limits = {
            "words_per_minute": (80, 450),
            "pitch": (0, 99),
            "pitch_range": (0, 99),
            "word_gap": (0, 50),
            "sample_rate": (16000, 32000),
        }
        for name, (low, high) in limits.items():
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} must be from {low} to {high}, got {getattr(self, name)}")


def sample_voice(rng: Generator, split: str = "train") -> Voice:
    """Sample a speaker of a split; the splits share no speaker.

    ValueError for an unknown split.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be train or test, got {split!r}")
    return Voice(
        accent=str(rng.choice(ACCENTS[split])),
        variant=str(rng.choice(VARIANTS[split])),
        words_per_minute=int(rng.integers(145, 206)),
        pitch=int(rng.integers(30, 71)),
        pitch_range=int(rng.integers(30, 81)),
        word_gap=int(rng.choice((0, 0, 0, 1, 2))),
        sample_rate=500 * int(rng.integers(LARGEST // 500, SMALLEST // 500 + 1)),
    )


def speak(text: str, voice: Voice) -> Sound:
    """Speak a sentence without any room; the same arguments give the same samples.

    ValueError for a text without anything to say, and for an accent or variant that espeak-ng does not have.
    """
    samples = _synthesise(text, voice)
    if not samples.any():
        raise ValueError(f"nothing to say in {text!r}: expected a text with words")
    return Sound(samples.astype(np.float32) / 32768.0, voice.sample_rate)


def _synthesise(text: str, voice: Voice) -> NDArray[np.int16]:
    """Run the synthesiser and return its samples at ESPEAK_RATE."""
    with open_espeak() as espeak:
        if not espeak.has_variant(voice.variant):
            raise ValueError(f"espeak-ng has no voice variant {voice.variant!r}")
        espeak.set_voice(f"{voice.accent}+{voice.variant}")
        espeak.set_parameter(RATE, voice.words_per_minute)
        espeak.set_parameter(PITCH, voice.pitch)
        espeak.set_parameter(PITCH_RANGE, voice.pitch_range)
        espeak.set_parameter(WORD_GAP, voice.word_gap)
        return espeak.synthesise(text)
