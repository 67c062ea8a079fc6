# SPDX-License-Identifier: Apache-2.0
"""Spoken commands as rows of arrays: sound, meaning, and words for the CTC loss.

Clips are made independently of situations. The answer depends on the scene and on the meaning of the command,
not on its wording or speaker, so a clip fits every situation whose command has the same meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from tokenizers import Tokenizer

from edgellm_arena.episodes.situation import KINDS
from edgellm_arena.speech.rooms import MICROPHONE_RATE, hear, sample_room
from edgellm_arena.speech.voice import sample_voice, speak
from edgellm_arena.words.language import sample_command
from edgellm_ros.multimodal.audio.pcm import to_int16
from edgellm_ros.multimodal.sound import Sound
from training.data import MEANINGS, SequenceWriter
from training.stream import Chunk, Fields

HOP = 160  # samples from one mel frame to the next
CHUNK_FRAMES = 100  # Qwen3-Omni's encoder makes 13 tokens of each chunk of 1 s
MAX_CHUNKS = 5
MAX_SAMPLES = MAX_CHUNKS * CHUNK_FRAMES * HOP
MAX_WORDS = 24
CLIP_CHUNK = 16
ROOMS_PER_SENTENCE = 2  # synthesis takes 7 ms, a room 9 ms

CLIP_FIELDS: Fields = {
    "samples": ((MAX_SAMPLES,), np.int16),
    "count": ((), np.int32),
    "meaning": ((), np.int16),
    "words": ((MAX_WORDS,), np.int16),
    "word_count": ((), np.int16),
}


def meaning_shares() -> np.ndarray:
    """Return the approximate frequency of each meaning in training [len(MEANINGS)].

    No meaning is less than half as frequent as if all were equal.
    """
    count = {kind: sum(m[0] == kind for m in MEANINGS) for kind in KINDS}
    shares = np.array([KINDS[kind] / count[kind] for kind, _, _ in MEANINGS])
    shares = np.maximum(shares / shares.sum(), 0.5 / len(shares))
    return shares / shares.sum()


def heard_text(text: str) -> str:
    """Return a sentence's words in lower case, as they are heard.

    Punctuation cannot be heard.
    """
    return " ".join(word.strip(".,:?!") for word in text.lower().split())


def heard_words(text: str, writer: SequenceWriter) -> list[int]:
    """Return the token ids of a sentence's heard words, each with the space before it."""
    return writer.text(" " + heard_text(text))


def record_command(text: str, split: str, rng: np.random.Generator, rooms: int = 1) -> list[Sound]:
    """Record a sentence by a speaker in `rooms` rooms of the split.

    A recording takes at most 5 s. If a recording is longer, another speaker repeats the sentence.
    """
    recordings: list[Sound] = []
    while len(recordings) < rooms:
        said = speak(text, sample_voice(rng, split))
        heard = [hear(said, sample_room(rng, split), rng) for _ in range(rooms)]
        recordings += [sound for sound in heard if len(sound.samples) <= MAX_SAMPLES]
    return recordings[:rooms]


def write_clip(out: Chunk, i: int, sound: Sound, meaning: int, words: list[int]) -> None:
    """Fill row i of a chunk of CLIP_FIELDS; ValueError for a clip that does not fit."""
    if sound.sample_rate != MICROPHONE_RATE:
        raise ValueError(f"sample_rate must be {MICROPHONE_RATE}, got {sound.sample_rate}")
    if len(sound.samples) > MAX_SAMPLES or len(words) > MAX_WORDS:
        found = f"{len(sound.samples)} samples and {len(words)} words"
        raise ValueError(f"expected at most {MAX_SAMPLES} samples and {MAX_WORDS} words, got {found}")
    out["samples"][i] = 0
    out["samples"][i, : len(sound.samples)] = to_int16(sound.samples)
    out["count"][i], out["meaning"][i] = len(sound.samples), meaning
    out["words"][i] = 0
    out["words"][i, : len(words)] = words
    out["word_count"][i] = len(words)


def clip_writer(
    tokenizer: Tokenizer, seed: int, words_of: Callable[[str, SequenceWriter], list[int]] = heard_words
) -> Callable[[Chunk, int], None]:
    """Make a SampleStream's function that writes spoken commands as CLIP_FIELDS.

    Speakers are of the training split. Each worker starts with one clip of every meaning. words_of: makes the
    words of a sentence.
    """
    writer = SequenceWriter(tokenizer)
    rng = np.random.default_rng([seed, 2])
    shares = meaning_shares()
    first = list(rng.permutation(len(MEANINGS)))
    waiting: list[tuple[Sound, int, list[int]]] = []

    def write(chunk: Chunk, i: int) -> None:
        if not waiting:
            meaning = int(first.pop()) if first else int(rng.choice(len(MEANINGS), p=shares))
            text = sample_command(rng, *MEANINGS[meaning]).text
            words = words_of(text, writer)
            for sound in record_command(text, "train", rng, ROOMS_PER_SENTENCE):
                waiting.append((sound, meaning, words))
        write_clip(chunk, i, *waiting.pop())

    return write


def clip_writers(tokenizer: Tokenizer) -> Callable[[int], Callable[[Chunk, int], None]]:
    """Return `clip_writer` for a SampleStream, which supplies the seed."""
    return partial(clip_writer, tokenizer)
