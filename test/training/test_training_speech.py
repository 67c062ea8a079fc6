# SPDX-License-Identifier: Apache-2.0
"""Spoken commands as training sees them; no PyTorch needed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from edgellm_arena.words.language import sample_command
from edgellm_ros.multimodal.sound import Sound
from training.data import MEANINGS, SequenceWriter, meaning_of
from training.speech import (
    CLIP_FIELDS,
    MAX_SAMPLES,
    clip_writer,
    heard_words,
    meaning_shares,
    record_command,
    write_clip,
)
from training.stream import new_chunk

TOKENIZER = Path(__file__).parents[2] / "models" / "arena" / "tokenizer.json"


@pytest.fixture(scope="module")
def writer() -> SequenceWriter:
    return SequenceWriter(Tokenizer.from_file(str(TOKENIZER)))


def test_every_meaning_can_be_said_and_is_told_from_the_command():
    rng = np.random.default_rng(0)
    for index, meaning in enumerate(MEANINGS):
        assert meaning_of(sample_command(rng, *meaning)) == index
    assert meaning_shares().sum() == pytest.approx(1)
    assert meaning_shares().min() > 0.4 / len(MEANINGS)


def test_only_words_are_heard(writer):
    words = heard_words("Robot: go to the red box, please!", writer)
    assert writer.tokenizer.decode(words) == " robot go to the red box please"
    assert words == heard_words("robot go to the red box please", writer)


def test_recordings_fit():
    rng = np.random.default_rng(1)
    text = "hello robot, i would like you to drive to the purple cylinder, thank you."
    for sound in record_command(text, "train", rng, rooms=4):
        assert 16000 < len(sound.samples) <= MAX_SAMPLES


@pytest.mark.slow
def test_a_worker_begins_with_every_meaning(writer):
    write = clip_writer(writer.tokenizer, seed=3)
    chunk = new_chunk(CLIP_FIELDS, 2 * len(MEANINGS))
    for i in range(2 * len(MEANINGS)):
        write(chunk, i)
    assert set(chunk["meaning"]) == set(range(len(MEANINGS)))
    assert (chunk["word_count"] > 0).all()
    loudest = np.abs(chunk["samples"].astype(np.int32)).max(1)
    assert (loudest > 500).all()
    for samples, count in zip(chunk["samples"], chunk["count"], strict=True):
        assert not samples[count:].any()


@pytest.mark.parametrize(
    ("sound", "words", "message"),
    [
        (Sound(np.zeros(MAX_SAMPLES + 1, np.float32), 16000), [1], f"{MAX_SAMPLES + 1} samples"),
        (Sound(np.zeros(100, np.float32), 16000), [1] * 30, "30 words"),
        (Sound(np.zeros(100, np.float32), 8000), [1], "8000"),
    ],
)
def test_clips_that_do_not_fit_are_refused(sound, words, message):
    with pytest.raises(ValueError, match=message):
        write_clip(new_chunk(CLIP_FIELDS, 1), 0, sound, 0, words)
