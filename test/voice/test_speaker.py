# SPDX-License-Identifier: Apache-2.0
"""Speaks text while it arrives, in real time, and is silent at once."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from edgellm_ros.voice.speaker import CHUNK_S, DROPPED, MAX_WAITING, SPOKEN, STOPPED, Speaker

pytestmark = pytest.mark.real_time
RATE = 8000


class ScriptedVoice:
    """Speaks a constant, the number of words, for 0.1 s per word; "fail." fails."""

    language, sample_rate = "en", RATE

    def __init__(self) -> None:
        self.sentences: list[str] = []
        self.may_speak = threading.Event()
        self.may_speak.set()

    def sounds(self, sentence: str) -> Iterator[np.ndarray]:
        self.may_speak.wait(5)
        self.sentences.append(sentence)
        if sentence == "fail.":
            raise RuntimeError("no sound")
        words = len(sentence.split())
        yield np.full(words * RATE // 10, words, np.int16)


class Stage:
    """A speaker, and what it played: (samples, due, when)."""

    def __init__(self) -> None:
        self.voice, self.played = ScriptedVoice(), []
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.speaker = Speaker(self.voice, self._play, self._count, self.problems.append)

    def _play(self, samples: np.ndarray, due: float) -> None:
        self.played.append((samples, due, time.monotonic()))

    def _count(self, name: str, number: int) -> None:
        self.counts[name] += number

    def say(self, text: str) -> None:
        self.speaker.begin(text)
        self.speaker.add(text, text)
        self.speaker.end(text)

    def wait(self, condition) -> None:
        end = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.005)

    def wait_for_silence(self) -> None:
        self.wait(lambda: self.played and not self.played[-1][0].size)

    def sound(self) -> np.ndarray:
        return np.concatenate([samples for samples, _, _ in self.played])


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.voice.may_speak.set()
    stage.speaker.close()


def test_sentences_are_spoken_before_the_text_ends(stage):
    stage.speaker.begin(stage)
    stage.speaker.add(stage, "One two. Three")
    stage.wait(lambda: stage.played)
    stage.speaker.add(stage, " four five.")
    stage.speaker.end(stage)
    stage.wait(lambda: stage.counts[SPOKEN] == 2)
    stage.wait_for_silence()
    sound = stage.sound()
    assert sound.tolist() == [2] * (RATE // 5) + [3] * (3 * RATE // 10)


def test_the_sound_is_played_in_real_time(stage):
    stage.say("One two three four five six.")
    stage.wait_for_silence()
    *chunks, (_, _, end) = stage.played
    assert all(samples.size <= CHUNK_S * RATE for samples, _, _ in chunks)
    dues = [due for _, due, _ in chunks]
    assert np.diff(dues) == pytest.approx([CHUNK_S] * 5, abs=0.001)
    assert all(when > due - 0.15 for _, due, when in chunks)
    assert end >= dues[-1] + CHUNK_S
    assert not stage.speaker.speaking


def test_a_stop_is_silence_at_once(stage):
    stage.say("one " * 30 + ". Two. Three.")
    stage.wait(lambda: stage.counts.total() or len(stage.played) > 1)
    asked = time.monotonic()
    assert stage.speaker.stop()
    stage.wait_for_silence()
    assert stage.played[-1][2] - asked < 0.2
    count = len(stage.played)
    time.sleep(0.2)
    assert len(stage.played) == count
    assert stage.counts[STOPPED] >= 3
    assert not stage.counts[SPOKEN]
    assert not stage.speaker.stop()


def test_a_new_answer_takes_the_place_of_the_old_one(stage):
    stage.say("one " * 30)
    stage.wait(lambda: stage.played)
    stage.speaker.begin("new")
    stage.speaker.add("one " * 30, "late text. And more.\n")
    stage.speaker.add("new", "One two.")
    stage.speaker.end("new")
    stage.wait(lambda: stage.counts[SPOKEN] == 1)
    stage.wait_for_silence()
    assert not any("late" in sentence for sentence in stage.voice.sentences)
    assert stage.played[-2][0].tolist() == [2] * (RATE // 10)
    assert sum(not samples.size for samples, _, _ in stage.played) == 2  # between the answers, and at the end


def test_sound_that_is_made_during_a_stop_is_not_played(stage):
    stage.voice.may_speak.clear()
    stage.say("One two.")
    time.sleep(0.05)  # the voice waits within the sentence
    stage.speaker.stop()
    stage.voice.may_speak.set()
    stage.wait(lambda: stage.voice.sentences)
    time.sleep(0.1)
    assert not stage.played
    assert stage.counts == {STOPPED: 1}


def test_only_the_answer_that_is_spoken_can_be_stopped_by_name(stage):
    stage.say("one " * 10)
    stage.wait(lambda: stage.played)
    assert not stage.speaker.stop("another")
    stage.wait(lambda: stage.counts[SPOKEN] == 1)


def test_callers_never_wait_and_the_queue_is_bounded(stage):
    stage.voice.may_speak.clear()
    began = time.monotonic()
    stage.speaker.begin(stage)
    for _ in range(3 * MAX_WAITING):
        stage.speaker.add(stage, "Go. ")
    stage.speaker.end(stage)
    assert time.monotonic() - began < 0.5
    assert 2 * MAX_WAITING - 1 <= stage.counts[DROPPED] <= 2 * MAX_WAITING


def test_a_sentence_that_the_voice_fails_on_is_left_out(stage):
    stage.say("Fail on nothing. One two.")
    stage.speaker.begin(1)
    stage.speaker.add(1, "fail.\nOne two.\n")
    stage.wait(lambda: stage.voice.sentences[-1:] == ["One two."] and stage.problems)
    stage.wait_for_silence()
    assert stage.counts[DROPPED] == 1
    assert "no sound" in stage.problems[0]
