# SPDX-License-Identifier: Apache-2.0
"""Translates the robot's answers to German and back, phrase by phrase."""

from __future__ import annotations

import re

# By English noun: gender, and the noun (the same in nominative and dative).
_NOUNS = {
    "box": ("f", "kiste"),
    "ball": ("m", "ball"),
    "cone": ("m", "kegel"),
    "cylinder": ("m", "zylinder"),
    "obstacle": ("n", "hindernis"),
}
_COLORS = {
    "red": "rot",
    "green": "grün",
    "blue": "blau",
    "yellow": "gelb",
    "purple": "violett",
    "grey": "grau",
}
_THE = {"m": "der", "f": "die", "n": "das"}
_A = {"m": "einen", "f": "eine", "n": "ein"}  # accusative, like the next line
_ACCUSATIVE_ENDING = {"m": "en", "f": "e", "n": "es"}
_THE_DATIVE = {"m": "dem", "f": "der", "n": "dem"}

_PHRASES = {
    "ahead on the left": "vorne links",
    "ahead on the right": "vorne rechts",
    "on the left": "links",
    "on the right": "rechts",
    "straight ahead": "geradeaus",
    "half a metre away": "einen halben meter entfernt",
    "one metre away": "einen meter entfernt",
    "one and a half metres away": "eineinhalb meter entfernt",
    "two metres away": "zwei meter entfernt",
    "two and a half metres away": "zweieinhalb meter entfernt",
    "three metres away": "drei meter entfernt",
    "three and a half metres away": "dreieinhalb meter entfernt",
    "four metres away": "vier meter entfernt",
    "four and a half metres away": "viereinhalb meter entfernt",
    "five metres away": "fünf meter entfernt",
    "about": "etwa",
    "and": "und",
    "i am there and stop": "ich bin da und halte an",
    "the way is clear": "der weg ist frei",
    "an obstacle is in the way": "ein hindernis ist im weg",
    "i drive there": "ich fahre hin",
    "i drive there carefully": "ich fahre vorsichtig hin",
    "i drive around it": "ich fahre darum herum",
    "i drive around it carefully": "ich fahre vorsichtig darum herum",
    "i stop": "ich halte an",
    "i look around": "ich sehe mich um",
    "i see": "ich sehe",
    "i see nothing here": "ich sehe hier nichts",
}


def _noun_phrases() -> dict[str, str]:
    """Return the phrases that contain a noun, with each colour and without one."""
    phrases = {}
    for noun, (gender, german) in _NOUNS.items():
        phrases[f"stop in front of the {noun}"] = f"halte vor {_THE_DATIVE[gender]} {german} an"
        for color in (None, *_COLORS):
            name = f"{color} {noun}" if color else noun
            weak = f"{_COLORS[color]}e {german}" if color else german
            strong = f"{_COLORS[color]}{_ACCUSATIVE_ENDING[gender]} {german}" if color else german
            phrases[f"the {name} is"] = f"{_THE[gender]} {weak} ist"
            phrases[f"a {name}"] = f"{_A[gender]} {strong}"
            phrases[f"i do not see a {name}"] = f"ich sehe k{_A[gender]} {strong}"
    return phrases


_TO_GERMAN = {**_PHRASES, **_noun_phrases()}
_TO_ENGLISH = {german: english for english, german in _TO_GERMAN.items()}


def _any_of(phrases: dict[str, str]) -> re.Pattern[str]:
    longest_first = sorted(phrases, key=len, reverse=True)
    return re.compile(rf"\b(?:{'|'.join(map(re.escape, longest_first))})\b")


_ENGLISH_PHRASE, _GERMAN_PHRASE = _any_of(_TO_GERMAN), _any_of(_TO_ENGLISH)


def to_german(answer: str) -> str:
    """Translate an answer of `answers` to German; other text stays as it is."""
    return _ENGLISH_PHRASE.sub(lambda found: _TO_GERMAN[found[0]], answer)


def to_english(answer: str) -> str:
    """Translate an answer of `to_german` to English; incorrect German stays as it is."""
    return _GERMAN_PHRASE.sub(lambda found: _TO_ENGLISH[found[0]], answer)


def is_german(answer: str) -> bool:
    """Return True if the answer has only correct German phrases of this grammar."""
    return bool(answer) and not _GERMAN_PHRASE.sub("", answer).replace(",", "").replace(".", "").strip()
