# SPDX-License-Identifier: Apache-2.0
"""Tokenizer: text to ids and back, and the guard that keeps users from writing special tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import tokenizers

_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # never assigned by Unicode, for internal use


class Tokenizer:
    """A `tokenizer.json` of Hugging Face's tokenizers library."""

    def __init__(self, path: str | Path) -> None:
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path} not found")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path}: not a tokenizer: {error}") from error
        self._pieces: dict[int, str] = {}
        # Special tokens are found by `encode_prompt` alone; to the library they are plain text from here on.
        self._tokenizer.encode_special_tokens = True
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {token.content: token_id for token_id, token in added.items() if token.special}
        by_length = sorted(self._special, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, by_length)) or r"(?!)")

    @property
    def size(self) -> int:
        """Number of tokens, special ones included."""
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Ids of plain text: special tokens in it are text like any other.

        ValueError if it is not valid Unicode.
        """
        try:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeError):
            raise ValueError("text is not valid Unicode (a lone surrogate?)") from None

    def encode_prompt(self, text: str, guard: str = "") -> list[int]:
        """Ids of a rendered chat template, with special tokens; `guard` is what `protect` put in."""
        ids: list[int] = []
        position = 0
        for match in self._pattern.finditer(text):
            ids += self._encode_run(text[position : match.start()], guard)
            ids.append(self._special[match.group()])
            position = match.end()
        return ids + self._encode_run(text[position:], guard)

    def _encode_run(self, text: str, guard: str) -> list[int]:
        text = text.replace(guard, "") if guard else text
        return self.encode(text) if text else []

    def protect(self, *texts: str) -> tuple[str, list[str]]:
        """Break up every special token in a user's texts, so that none is found in the prompt.

        Returns the guard and the texts; the guard is a character that none of them has.
        """
        guard = next(
            (character for character in _NONCHARACTERS if all(character not in text for text in texts)), None
        )
        if guard is None:
            raise ValueError("text has all of Unicode's noncharacters U+FDD0 to U+FDEF")
        return guard, [
            self._pattern.sub(lambda match: match[0][:1] + guard + match[0][1:], text) for text in texts
        ]

    def piece(self, token_id: int) -> str:
        """Text of one id alone, kept for the next time."""
        text = self._pieces.get(token_id)
        if text is None:
            text = self._pieces[token_id] = self.decode([token_id])
        return text

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids without special tokens. Bytes that are not (yet) valid UTF-8 become U+FFFD."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)
