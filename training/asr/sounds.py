# SPDX-License-Identifier: Apache-2.0
"""Sounds without a command, for which a speech-to-text model must write nothing.

The splits share no room, no noise of a room, no speaker and no foreign language.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.random import Generator
from tokenizers import Tokenizer

from edgellm_arena.speech.rooms import MICROPHONE_RATE, hear, sample_room
from edgellm_arena.speech.voice import sample_voice, speak
from edgellm_arena.words.language import sample_command
from edgellm_ros.multimodal.sound import Sound
from training.data import MEANINGS, SequenceWriter
from training.speech import MAX_SAMPLES, clip_writer, heard_text, write_clip
from training.stream import Chunk

NO_SPEECH_SHARE = 0.1  # of the clips
NO_MEANING = -1
LANGUAGES = {
    "train": ("de", "fr", "es", "it", "pl", "ru", "tr", "fi"),
    "test": ("nl", "pt", "sv", "cs", "hu"),
}


def _noise(rng: Generator, split: str, n: int) -> np.ndarray:
    """The room alone: its noise follows, so nothing is played."""
    return np.zeros(n)


def _silence(rng: Generator, split: str, n: int) -> np.ndarray:
    """Digital silence, or almost."""
    return rng.choice((0.0, 1e-4, 1e-3)) * rng.standard_normal(n)


def _motor(rng: Generator, split: str, n: int) -> np.ndarray:
    """A motor that starts, wavers and stops: harmonics of one pitch, and their noise."""
    time = np.arange(n) / MICROPHONE_RATE
    ramp = np.clip(np.minimum(time, time[-1] - time) / rng.uniform(0.1, 0.8), 0.2, 1)
    pitch = rng.uniform(40, 500) * ramp * (1 + 0.05 * np.sin(2 * np.pi * rng.uniform(0.2, 3) * time))
    phase = 2 * np.pi * np.cumsum(pitch) / MICROPHONE_RATE
    sound = sum(rng.uniform(0.1, 1) / k * np.sin(k * phase) for k in range(1, 9))
    return 0.2 * (sound + 0.3 * rng.standard_normal(n)) * ramp


def _tones(rng: Generator, split: str, n: int) -> np.ndarray:
    """Music: notes and chords of a scale, struck or held."""
    sound, place = np.zeros(n), 0
    base, fading = rng.uniform(80, 400), rng.uniform(0, 8)
    while place < n:
        length = int(MICROPHONE_RATE * rng.uniform(0.1, 0.6))
        time = np.arange(min(length, n - place)) / MICROPHONE_RATE
        for step in rng.integers(0, 25, int(rng.integers(1, 4))):
            pitch = base * 2 ** (step / 12)
            note = sum(np.sin(2 * np.pi * k * pitch * time) / k**1.5 for k in range(1, 5))
            sound[place : place + len(time)] += 0.15 * note * np.exp(-fading * time)
        place += length
    return sound


def _knocks(rng: Generator, split: str, n: int) -> np.ndarray:
    """Knocks and steps: short bursts of noise that fade."""
    struck = np.zeros(n)
    struck[rng.integers(0, n, int(rng.integers(1, 8)))] = rng.uniform(0.3, 1)
    burst = rng.standard_normal(1600) * np.exp(-np.arange(1600) / rng.uniform(40, 400))
    return 0.4 * np.convolve(struck, burst)[:n]


def _cut_off(rng: Generator, split: str, n: int) -> np.ndarray:
    """60 to 150 ms of a command: too little for a word."""
    said = _at_rate(speak(_command(rng, split), sample_voice(rng, split)))
    loud = np.flatnonzero(np.abs(said) > 0.1 * np.abs(said).max())
    length = int(MICROPHONE_RATE * rng.uniform(0.06, 0.15))
    start = int(rng.integers(loud[0], max(loud[0] + 1, loud[-1] - length)))
    return said[start : start + length]


def _foreign(rng: Generator, split: str, n: int) -> np.ndarray:
    """One to three people who speak made-up words in a foreign language at once."""
    sound = np.zeros(n)
    for _ in range(int(rng.integers(1, 4))):
        voice = replace(sample_voice(rng, split), accent=str(rng.choice(LANGUAGES[split])))
        syllables = [
            "".join(rng.choice(list(part)) for part in ("bdfgklmnprstvz", "aeiou", "lnrst"))
            for _ in range(12)
        ]
        words = [syllable + syllables[i % 5] * (i % 2) for i, syllable in enumerate(syllables)]
        said = _at_rate(speak(" ".join(words), voice))[:n]
        sound[: len(said)] += rng.uniform(0.4, 1) * said
    return sound


NO_SPEECH: dict[str, Callable[[Generator, str, int], np.ndarray]] = {
    "noise": _noise,
    "silence": _silence,
    "motor": _motor,
    "tones": _tones,
    "knocks": _knocks,
    "cut-off": _cut_off,
    "foreign": _foreign,
}


def _command(rng: Generator, split: str) -> str:
    return sample_command(rng, *MEANINGS[int(rng.integers(len(MEANINGS)))], split=split).text


def _at_rate(sound: Sound) -> np.ndarray:
    """Resample by linear interpolation; a microphone's band follows."""
    count = int(len(sound.samples) * MICROPHONE_RATE / sound.sample_rate)
    place = np.arange(count) * sound.sample_rate / MICROPHONE_RATE
    return np.interp(place, np.arange(len(sound.samples)), sound.samples)


def record_no_speech(rng: Generator, split: str, kind: str | None = None) -> Sound:
    """Record a sound without a command in a room of the split.

    It has 0.36 to 5 s at 16 kHz. kind: one of NO_SPEECH; None samples one.
    """
    name = str(rng.choice(list(NO_SPEECH))) if kind is None else kind
    n = int(MICROPHONE_RATE * rng.uniform(0.5, 3.9))
    samples = np.clip(NO_SPEECH[name](rng, split, n), -1, 1).astype(np.float32)
    if name == "silence":
        return Sound(samples, MICROPHONE_RATE)
    heard = hear(Sound(samples, MICROPHONE_RATE), sample_room(rng, split), rng)
    return Sound(heard.samples[:MAX_SAMPLES], MICROPHONE_RATE)


def sentence_ids(text: str, writer: SequenceWriter) -> list[int]:
    """Return the ids of a sentence as a transcript has it."""
    return writer.text(heard_text(text))


def transcript_writer(tokenizer: Tokenizer, seed: int) -> Callable[[Chunk, int], None]:
    """Make a SampleStream's function that writes sounds as CLIP_FIELDS.

    NO_SPEECH_SHARE of them have no command, and no words.
    """
    commands, rng = clip_writer(tokenizer, seed, sentence_ids), np.random.default_rng([seed, 7])

    def write(chunk: Chunk, i: int) -> None:
        if rng.random() < NO_SPEECH_SHARE:
            write_clip(chunk, i, record_no_speech(rng, "train"), NO_MEANING, [])
        else:
            commands(chunk, i)

    return write


def transcript_writers(tokenizer: Tokenizer) -> Callable[[int], Callable[[Chunk, int], None]]:
    """Return `transcript_writer` for a SampleStream, which supplies the seed."""
    return partial(transcript_writer, tokenizer)
