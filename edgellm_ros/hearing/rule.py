# SPDX-License-Identifier: Apache-2.0
"""Decides which transcripts a robot obeys.

A model for speech writes words for any sound, also for noise. A transcript is a command if all of this holds:

  words           there are letters or digits in it
  confidence      the mean log-probability of its tokens is high enough
  pace            a person can speak its letters in the time of the sound
  wake word       one of the first words is the robot's name, if it has one; the command follows it
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from edgellm_ros.echo import quoted
from edgellm_ros.runtime.transcript import Transcript

MOST_BEFORE = 2  # words before the wake word, such as "hey" and "okay"
LEAST_SECONDS = 1.0  # shorter sounds count as this long: "stop" takes 0.2 s, and has 20 letters per second
WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Verdict:
    """What a robot does with a transcript."""

    command: str  # the words to obey; "" = none
    reason: str  # why there are none; "" = there are


@dataclass(frozen=True)
class HearingRule:
    """When a transcript is a command. ValueError for values without a meaning."""

    # Of `Transcript.confidence`: a mean probability of exp(-0.3) = 0.74 per token. All of 725 right
    # transcripts of the arena's speech engine have more, and 5 of 8 of sounds without a command.
    min_confidence: float = -0.3
    max_letters_per_second: float = 30.0  # fast speech has about 20
    wake_word: str = ""  # one word or several; "" = all speech is for the robot

    def __post_init__(self) -> None:
        if not (math.isfinite(self.min_confidence) and self.min_confidence <= 0):
            raise ValueError(
                f"min_confidence must be a log-probability of at most 0, got {self.min_confidence:g}"
            )
        if not (math.isfinite(self.max_letters_per_second) and self.max_letters_per_second > 0):
            raise ValueError(f"max_letters_per_second must be above 0, got {self.max_letters_per_second:g}")
        if self.wake_word and not WORD.search(self.wake_word):
            raise ValueError(
                f"wake_word must have a letter or digit, or be empty, got {quoted(self.wake_word)}"
            )

    def judge(self, transcript: Transcript, seconds: float) -> Verdict:
        """Judge the transcript of a sound that lasts `seconds`."""
        text = transcript.text.strip()
        letters = sum(map(len, WORD.findall(text)))
        if not letters:
            return Verdict("", "no words")
        confidence = transcript.confidence
        if confidence is None or not confidence >= self.min_confidence:  # false for NaN
            found = "unknown" if confidence is None else f"{confidence:.2f}"
            return Verdict("", f"unsure: confidence {found}, expected {self.min_confidence:g} or more")
        pace = letters / max(seconds, LEAST_SECONDS)
        if pace > self.max_letters_per_second:
            most = f"expected {self.max_letters_per_second:g} or fewer"
            return Verdict("", f"{pace:.0f} letters per second, {most}")
        if not self.wake_word:
            return Verdict(text, "")
        found_word = self._pattern().search(text)
        if found_word is None or len(WORD.findall(text[: found_word.start()])) > MOST_BEFORE:
            return Verdict("", f"without the wake word {quoted(self.wake_word)}")
        command = text[found_word.end() :]
        first = WORD.search(command)
        if first is None:
            return Verdict("", "nothing after the wake word")
        return Verdict(command[first.start() :], "")

    def _pattern(self) -> re.Pattern[str]:
        """Return a pattern of the wake word.

        A word of a script with capitals begins and ends where other letters do not touch it. Scripts such as
        Chinese have no such boundary.
        """
        words = WORD.findall(self.wake_word)
        begin = r"(?<!\w)" if _has_case(words[0][0]) else ""
        end = r"(?!\w)" if _has_case(words[-1][-1]) else ""
        return re.compile(begin + r"\W*".join(map(re.escape, words)) + end, re.IGNORECASE)


def _has_case(letter: str) -> bool:
    return letter.lower() != letter.upper() or letter.isdigit()
