# SPDX-License-Identifier: Apache-2.0
"""Which transcripts are commands."""

from __future__ import annotations

import math

import pytest

from edgellm_ros.hearing.rule import HearingRule, Verdict
from edgellm_ros.runtime.transcript import Transcript

SECONDS = 2.0


def heard(text: str, confidence: float | None = -0.1) -> Transcript:
    return Transcript(text, "English", confidence)


def test_sure_words_are_a_command():
    assert HearingRule().judge(heard("Go to the dock."), SECONDS) == Verdict("Go to the dock.", "")


@pytest.mark.parametrize("text", ["", " ", "...", "♪"])
def test_no_words_are_no_command(text):
    assert HearingRule().judge(heard(text), SECONDS) == Verdict("", "no words")


@pytest.mark.parametrize("confidence", [-0.31, -3.0, None, -math.inf, math.nan])
def test_unsure_words_are_no_command(confidence):
    verdict = HearingRule().judge(heard("Go to the dock.", confidence), SECONDS)
    assert not verdict.command
    assert verdict.reason.startswith("unsure")
    assert verdict.reason.endswith("expected -0.3 or more")


def test_more_words_than_fit_into_the_sound_are_no_command():
    verdict = HearingRule().judge(heard("thank you for watching " * 10), SECONDS)
    assert verdict == Verdict("", "95 letters per second, expected 30 or fewer")


def test_a_short_word_in_a_short_sound_is_a_command():
    assert HearingRule().judge(heard("Stop!"), 0.1).command == "Stop!"


@pytest.mark.parametrize(
    ("wake_word", "text", "command"),
    [
        ("robot", "Robot, go to the dock.", "go to the dock."),
        ("robot", "Hey ROBOT: stop", "stop"),
        ("robot", "okay, hey robot stop", "stop"),
        ("Hey Robot", "hey, robot. Turn left!", "Turn left!"),
        ("Jörg", "jörg, fahr los", "fahr los"),
        ("小爱", "小爱\uff0c去厨房", "去厨房"),
        ("r2", "R2 come here", "come here"),
    ],
)
def test_the_command_follows_the_wake_word(wake_word, text, command):
    assert HearingRule(wake_word=wake_word).judge(heard(text), SECONDS) == Verdict(command, "")


@pytest.mark.parametrize(
    "text",
    [
        "Go to the dock.",
        "The robots go to the dock.",
        "I said to the robot: stop",
        "robotics is fun",
    ],
)
def test_speech_to_others_is_no_command(text):
    assert HearingRule(wake_word="robot").judge(heard(text), SECONDS) == Verdict(
        "", "without the wake word 'robot'"
    )


def test_a_wake_word_alone_is_no_command():
    assert HearingRule(wake_word="robot").judge(heard("Robot!"), SECONDS) == Verdict(
        "", "nothing after the wake word"
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"min_confidence": 0.1}, "min_confidence must be a log-probability of at most 0, got 0.1"),
        ({"min_confidence": math.nan}, "min_confidence must be a log-probability of at most 0, got nan"),
        ({"max_letters_per_second": 0.0}, "max_letters_per_second must be above 0, got 0"),
        ({"wake_word": "?!"}, "wake_word must have a letter or digit, or be empty, got '\\?!'"),
    ],
)
def test_values_without_a_meaning_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        HearingRule(**values)
