# SPDX-License-Identifier: Apache-2.0
"""Sentences spoken by many synthetic speakers, made with espeak-ng.

A speaker is one of espeak-ng's English accents with one of its voice variants, a speed and a pitch. Faster or
slower playback simulates a smaller or larger person. The variants, and one accent, are divided between the
splits: speakers of the split "test" never occur in training. espeak-ng comes as the wheel `espeakng-loader`,
which is imported when `speak` is called.
"""

from __future__ import annotations

import _ctypes
import ctypes
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from edgellm_arena.words.language import SPLITS
from edgellm_ros.multimodal.sound import Sound

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
ESPEAK_RATE = 22050  # Hz
SMALLEST, LARGEST = 24500, 20000  # Hz: playback rates of the smallest and the largest person
_RATE, _PITCH, _RANGE, _WORD_GAP = 1, 3, 4, 7  # espeak_PARAMETER
_SYNCHRONOUS, _DO_NOT_EXIT, _UTF8 = 2, 0x8000, 1
_NOISE_SEED = 1


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


_synthesiser = threading.Lock()  # the library keeps its state in globals


def _synthesise(text: str, voice: Voice) -> NDArray[np.int16]:
    """Run the synthesiser and return its samples at ESPEAK_RATE.

    The library's state after one sentence (phase of the voice, echoes, noise) would change the next sentence,
    and espeak_Terminate does not clear that state. Each sentence therefore loads the library again, which
    takes 3 of about 7 ms.
    """
    import espeakng_loader

    parts: list[NDArray[np.int16]] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
    def keep(samples, count, _events) -> int:
        if samples and count > 0:
            # No ctypes array of `count`: ctypes creates a type for every length and never frees it.
            parts.append(np.frombuffer(ctypes.string_at(samples, 2 * count), np.int16))
        return 0

    data = espeakng_loader.get_data_path()
    if not Path(data, "voices", "!v", voice.variant).is_file():  # espeak-ng would use another voice
        raise ValueError(f"espeak-ng has no voice variant {voice.variant!r}")
    path, voices = espeakng_loader.get_library_path(), None
    with _synthesiser:
        library = ctypes.CDLL(path)
        try:
            if library.espeak_Initialize(_SYNCHRONOUS, 0, data.encode(), _DO_NOT_EXIT) != ESPEAK_RATE:
                raise RuntimeError(f"espeak-ng cannot use its data in {data}")
            # Otherwise espeak_SetVoiceByName makes this list, and no code frees it.
            library.espeak_ListVoices.restype = ctypes.c_void_p
            voices = library.espeak_ListVoices(None)
            library.espeak_SetSynthCallback(keep)
            library.espeak_ng_SetRandSeed(ctypes.c_long(_NOISE_SEED))
            name = f"{voice.accent}+{voice.variant}"
            if library.espeak_SetVoiceByName(name.encode()) != 0:
                raise ValueError(f"espeak-ng has no accent {voice.accent!r}")
            settings = (
                (_RATE, voice.words_per_minute),
                (_PITCH, voice.pitch),
                (_RANGE, voice.pitch_range),
                (_WORD_GAP, voice.word_gap),
            )
            for parameter, value in settings:
                library.espeak_SetParameter(parameter, value, 0)
            said = text.encode() + b"\0"
            status = library.espeak_Synth(
                said, ctypes.c_size_t(len(said)), 0, 0, 0, ctypes.c_uint(_UTF8), None, None
            )
            if status != 0:
                raise RuntimeError(f"espeak-ng ended with status {status}")
            library.espeak_Terminate()
        finally:
            _unload(library, path, voices)
    return np.concatenate(parts) if parts else np.zeros(0, np.int16)


def _unload(library: ctypes.CDLL, path: str, voices: int | None) -> None:
    """Unload the library and free its list of voices.

    The list is kept if other code has the library loaded too.
    """
    _ctypes.dlclose(library._handle)
    try:
        kept = ctypes.CDLL(path, os.RTLD_NOLOAD)
    except OSError:
        free = ctypes.CDLL(None).free
        free.argtypes, free.restype = [ctypes.c_void_p], None
        free(voices)
    else:
        _ctypes.dlclose(kept._handle)
