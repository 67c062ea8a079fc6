# SPDX-License-Identifier: Apache-2.0
"""Cuts a stream of text into sentences that can be spoken.

    pieces of text -> lines and sentences -> without Markdown, code, thoughts, emoji -> at most `max_length`

What may still be the middle of a number, an abbreviation or a link waits for the next piece.
"""

from __future__ import annotations

import re

from edgellm_ros.voice.spoken_text import spoken

MAX_LENGTH = 200  # characters of a sentence
MIN_LENGTH = 20
ENDS, WIDE_ENDS = ".!?…", "。！？｡।॥؟۔።"  # those of the second group end a sentence without a space behind
CLOSING = "\"'”’»)]}*_`"
PAUSES = ",;:–—、，；：،؛"
FENCE, THINK, END_OF_THINK = "```", "<think>", "</think>"
# In lower case, without the last full stop.
ABBREVIATIONS = {
    *("mr", "mrs", "ms", "dr", "prof", "st", "jr", "sr", "vs", "e.g", "i.e", "cf", "fig", "no", "vol", "pp"),
    *("approx", "dept", "inc", "ltd", "co", "gen", "sgt", "capt", "lt", "col", "z.b", "d.h", "u.a", "bzw"),
    *("ca", "nr", "evtl", "ggf", "inkl", "abs", "str", "hr", "fr", "sog", "vgl", "p.ej", "sra", "ud", "av"),
}
_INITIALS = re.compile(r"[^\W\d_](\.[^\W\d_])*")


class SentenceSplitter:
    """Takes pieces of one text and returns each sentence once it is complete.

    Keeps at most `max_length` characters and the newest piece. The first sentence is at most `first_length`
    long, so that its sound is there soon: it is cut at a pause or a space.
    """

    def __init__(self, max_length: int = MAX_LENGTH, first_length: int | None = None) -> None:
        """Start with an empty text. ValueError for a length below 20 characters."""
        for name, length in (("max_length", max_length), ("first_length", first_length or max_length)):
            if length < MIN_LENGTH:
                raise ValueError(f"{name} must be at least {MIN_LENGTH} characters, got {length}")
        self._max_length = max_length
        self._limit = min(first_length or max_length, max_length)
        self._text = ""
        self._in_code = self._in_thought = False
        self._is_line_start = True

    def add(self, piece: str) -> list[str]:
        """Add a piece of text and return the sentences that end in it."""
        sentences: list[str] = []
        # Slices keep the work linear in the length of a long piece.
        for start in range(0, len(piece), MAX_LENGTH):
            self._text += piece[start : start + MAX_LENGTH]
            sentences += self._take(is_whole=False)
        return sentences

    def end(self) -> list[str]:
        """End the text and return its last sentences."""
        sentences = self._take(is_whole=True)
        self._in_code = self._in_thought = False
        self._is_line_start = True
        return sentences

    def _take(self, is_whole: bool) -> list[str]:
        sentences: list[str] = []
        while self._text:
            cut, ends_line = self._first_cut(is_whole)
            if cut == 0:
                break
            raw, self._text = self._text[:cut], self._text[cut:]
            sentence = self._clean(raw)
            self._is_line_start = ends_line
            if sentence:
                sentences.append(sentence)
                self._limit = self._max_length
        return sentences

    def _first_cut(self, is_whole: bool) -> tuple[int, bool]:
        """Return the length of the first sentence, and whether it ends a line.

        The length is 0 if the sentence is not complete.
        """
        text = self._text
        line = text.find("\n") + 1
        end = next((i for i in range(line or len(text)) if self._ends_at(i, is_whole)), -1) + 1
        end = _behind_marks(text, end) if end else 0
        cut = min(each for each in (line, end, len(text) + 1) if each)
        if cut <= min(len(text), self._limit):
            return cut, cut == line
        if len(text) > self._limit:
            return _pause(text, self._limit), False
        return (len(text), False) if is_whole else (0, False)

    def _ends_at(self, index: int, is_whole: bool) -> bool:
        """Whether the character at `index` ends a sentence."""
        text = self._text
        character = text[index]
        if character in WIDE_ENDS:
            return True
        if character not in ENDS:
            return False
        behind = _behind_marks(text, index + 1)
        if behind == len(text):
            return is_whole
        if not text[behind].isspace():
            return False
        if character != "." or "\n" in text[behind : behind + 1]:
            return True
        rest = text[behind:].lstrip(" \t")
        if not rest and not is_whole:
            return False
        return not (rest[:1].islower() or self._is_abbreviation(index))

    def _is_abbreviation(self, index: int) -> bool:
        """Whether the full stop at `index` is one of an abbreviation.

        Initials and the numbers of lists count as abbreviations.
        """
        words = self._text[:index].split()
        if not words or self._text[index - 1].isspace():
            return False
        word = words[-1].lstrip("([\"'*_").lower()
        if word.isdigit():
            return self._is_line_start and len(words) == 1
        return word in ABBREVIATIONS or (word != "i" and bool(_INITIALS.fullmatch(word)))

    def _clean(self, raw: str) -> str:
        """Return what is spoken of a sentence; empty for code, thoughts and mere marks."""
        if self._is_line_start and raw.lstrip().startswith(FENCE):
            self._in_code = not self._in_code
            return ""
        if self._in_code:
            return ""
        shown = ""
        while raw:
            tag = END_OF_THINK if self._in_thought else THINK
            before, found, raw = raw.partition(tag)
            if not self._in_thought:
                shown += before
            if found:
                self._in_thought = not self._in_thought
        return spoken(shown, self._is_line_start)


def sentences_of(text: str, max_length: int = MAX_LENGTH) -> list[str]:
    """Return the sentences of a whole text that can be spoken."""
    splitter = SentenceSplitter(max_length)
    return splitter.add(text) + splitter.end()


def _behind_marks(text: str, index: int) -> int:
    """Return the index behind more ends and closing marks that follow."""
    while index < len(text) and text[index] in ENDS + WIDE_ENDS + CLOSING:
        index += 1
    return index


def _pause(text: str, limit: int) -> int:
    """Return where a sentence that is too long is cut.

    Behind a pause in the second half of the limit, else behind the last space, else at the limit.
    """
    pauses = [i for i in range(limit // 2, limit) if text[i] in PAUSES and text[i + 1 : i + 2].isspace()]
    pauses += [i for i in range(limit // 2, limit) if text[i] in "、，；："]
    if pauses:
        return max(pauses) + 1
    space = max(text.rfind(" ", 0, limit), text.rfind("\t", 0, limit))
    return space + 1 if space > 0 else limit
