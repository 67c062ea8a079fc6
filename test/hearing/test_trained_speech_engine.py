# SPDX-License-Identifier: Apache-2.0
"""What the arena's speech engine hears of unseen people, rooms and noises."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from edgellm_arena.episodes.situation import sample_situations, split_rng
from edgellm_arena.speech.rooms import MICROPHONE_RATE, hear, sample_room
from edgellm_arena.speech.voice import sample_voice, speak
from edgellm_ros.builder import export
from edgellm_ros.hearing.rule import HearingRule
from edgellm_ros.hearing.transcriber import Transcriber
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.voice.voice import open_voice

CHECKPOINT = Path(__file__).parents[2] / "models" / "speech"
COMMANDS = 40


@pytest.fixture(scope="module")
def transcriber(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speech")
    export(CHECKPOINT, folder, max_batch_size=1, max_input_len=256, max_kv_cache_capacity=320)
    with Transcriber(folder) as opened:
        yield opened


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def commands(seed: int, count: int) -> list[str]:
    return [s.command.text for s in sample_situations(split_rng(seed, "test"), count, "test")]


def test_most_commands_of_unseen_people_are_heard_word_by_word(transcriber):
    rng = np.random.default_rng(21)
    exact = obeyed = 0
    for text in commands(21, COMMANDS):
        sound = hear(speak(text, sample_voice(rng, "test")), sample_room(rng, "test"), rng)
        transcript = transcriber.transcribe(sound)
        exact += words(transcript.text) == words(text)
        obeyed += bool(HearingRule().judge(transcript, sound.seconds).command)
    assert exact >= 0.85 * COMMANDS
    assert obeyed >= 0.95 * COMMANDS


def test_noise_without_speech_is_never_a_command(transcriber):
    rng = np.random.default_rng(22)
    for _ in range(30):
        silence = Sound(np.zeros(int(MICROPHONE_RATE * rng.uniform(0.5, 3.5)), np.float32), MICROPHONE_RATE)
        sound = hear(silence, sample_room(rng, "test"), rng)
        transcript = transcriber.transcribe(sound)
        assert not HearingRule().judge(transcript, sound.seconds).command, transcript


def test_what_the_robots_voice_says_is_heard_as_its_text(transcriber):
    """A synthesiser that skips, cuts or repeats words would be transcribed so."""
    voice = open_voice("espeak")
    wrong = []
    for text in commands(23, 12):
        samples = np.concatenate(list(voice.sounds(text))) / np.float32(32768)
        found = transcriber.transcribe(Sound(samples, voice.sample_rate)).text
        if words(found) != words(text):
            wrong.append((text, found))
    assert len(wrong) <= 1, wrong
