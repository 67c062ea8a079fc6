# SPDX-License-Identifier: Apache-2.0
"""Phonemes that Piper voices are trained on: espeak-ng's IPA with clause marks."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence

from edgellm_ros.voice.espeak import open_espeak

BEGIN, PAD, END = "^", "_", "$"
_LANGUAGE_SWITCH = re.compile(r"\([a-z]{2,3}(?:-[a-z0-9]+)*\)")  # "(en)" before a foreign word


def phonemes(sentence: str, language: str) -> str:
    """Return the IPA phonemes of a sentence, one character each, in Unicode form NFD.

    ValueError for a language that espeak-ng does not have.
    """
    with open_espeak() as espeak:
        espeak.set_voice(language)
        spoken = espeak.phonemes(sentence.replace("\0", " "))
    return unicodedata.normalize("NFD", _LANGUAGE_SWITCH.sub("", spoken))


def runs(text: str, longest: int) -> Iterator[str]:
    """Yield phonemes in runs of at most `longest` characters.

    Runs are cut behind clause marks, else behind spaces, else anywhere.
    """
    while len(text) > longest:
        space = next((i for i in range(longest - 1, longest // 2, -1) if _is_pause(text, i)), 0)
        space = space or text.rfind(" ", 0, longest)
        cut = space + 1 if space > 0 else longest
        yield text[:cut].strip()
        text = text[cut:].lstrip()
    if text.strip():
        yield text.strip()


def phoneme_ids(text: str, table: Mapping[str, Sequence[int]]) -> tuple[list[int], int]:
    """Return a Piper voice's ids of phonemes, and the number of unknown phonemes.

    The ids are those of BEGIN, then of each phoneme, each followed by PAD's, then of END. Phonemes that the
    table lacks are skipped.
    """
    ids, unknown = list(table[BEGIN]), 0
    for phoneme in text:
        if phoneme in table:
            ids += [*table[phoneme], *table[PAD]]
        else:
            unknown += 1
    return [*ids, *table[END]], unknown


def _is_pause(text: str, index: int) -> bool:
    return text[index] == " " and text[index - 1] in ",;:.!?"
