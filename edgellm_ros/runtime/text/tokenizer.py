# SPDX-License-Identifier: Apache-2.0
"""Tokenizer: text to ids and back; guards special tokens in user text."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from edgellm_ros.engine_directory.tokenizer_file import load_tokenizer

_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # never assigned by Unicode, for internal use

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # names of bytes in vocabularies of SentencePiece
SPACE_LETTER = "\u2581"  # a space in these
PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
# GPT-2's vocabulary has a letter for each byte: printable ones themselves, others from U+0100 on.
BYTE_OF_LETTER = {chr(byte): byte for byte in PRINTABLE} | {
    chr(0x100 + place): byte for place, byte in enumerate(sorted({*range(256)} - {*PRINTABLE}))
}

Span = tuple[int, int, int]  # token id, first character, character after the last


class Tokenizer:
    """A `tokenizer.json` of Hugging Face's tokenizers library; thread-safe.

    FileNotFoundError, or ValueError for a file that the library cannot load.
    """

    def __init__(self, path: str | Path) -> None:
        self._tokenizer = load_tokenizer(Path(path))
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token_id: token.content for token_id, token in added.items() if token.special}
        self._special = set(special)
        self._special_texts = [*special.values()]
        self._guards = [letter for letter in _NONCHARACTERS if letter not in "".join(special.values())]
        self._pieces: dict[int, str] = {}
        self._mode = threading.Lock()  # of the library's tokenizer: `encode_special_tokens`
        self._byte_level = "ByteLevel" in repr(self._tokenizer.decoder)

    @property
    def size(self) -> int:
        """Number of tokens, special ones included."""
        return self._tokenizer.get_vocab_size()

    def to_json(self) -> str:
        """Return the contents of the file."""
        return str(self._tokenizer.to_str())

    def encode(self, text: str) -> list[int]:
        """Convert plain text to ids; special tokens in the text are not recognised.

        ValueError for text that is not valid Unicode.
        """
        return self._run(text, special_tokens=False).ids

    def encode_whole(self, text: str) -> list[int]:
        """Convert a whole prompt without a chat template to ids.

        Special tokens are recognised, and those that the tokenizer adds are there, such as one that begins
        each text. ValueError for text that is not valid Unicode.
        """
        return self._run(text, special_tokens=True, adds=True).ids

    def encode_prompt(self, text: str, guard: str = "") -> list[int]:
        """Convert a rendered chat template to ids; special tokens are recognised.

        The library finds the special tokens, so it respects `lstrip`, `rstrip`, `single_word` and
        `normalized`. `guard`: the character that `protect` returned. Characters before a guard are plain
        text.
        ValueError for text that is not valid Unicode.
        """
        if not guard or guard not in text:
            return self._run(text, special_tokens=True).ids
        ids: list[int] = []
        position = 0
        for token_id, start, stop in self._find_special(text, guard):
            ids += self._encode_unguarded(text[position:start], guard)
            ids.append(token_id)
            position = stop
        return ids + self._encode_unguarded(text[position:], guard)

    def protect(self, *texts: str) -> tuple[str, list[str]]:
        """Mark special tokens in user texts: `encode_prompt` reads them as plain text.

        Returns a guard, which is a character that no text contains, and the texts with the guard after each
        character of a special token. ValueError for text that is not valid Unicode, or if no guard is left.
        """
        guard = next((letter for letter in self._guards if all(letter not in text for text in texts)), None)
        if guard is None:
            raise ValueError("text contains all of Unicode's noncharacters U+FDD0 to U+FDEF")
        return guard, [self._protect(text, guard) for text in texts]

    def piece(self, token_id: int) -> str:
        """Return the text of one id alone, cached."""
        text = self._pieces.get(token_id)
        if text is None:
            text = self._pieces[token_id] = self.decode([token_id])
        return text

    @property
    def special_texts(self) -> list[str]:
        return self._special_texts

    def decode(self, token_ids: Sequence[int], special_tokens: bool = False) -> str:
        """Convert ids to text, without special tokens by default.

        Bytes that are not valid UTF-8 become U+FFFD.
        """
        return self._tokenizer.decode(token_ids, skip_special_tokens=not special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for; of a special token its name.

        A token may be a part of a character. An id that the tokenizer does not have stands for none.
        """
        name = self._tokenizer.id_to_token(token_id)
        if name is None:
            return b""
        if token_id in self._special:
            return str(name).encode()
        byte = BYTE_TOKEN.fullmatch(name)
        if byte is not None:
            return bytes([int(byte[1], 16)])
        if self._byte_level and all(letter in BYTE_OF_LETTER for letter in name):
            return bytes(BYTE_OF_LETTER[letter] for letter in name)
        return str(name).replace(SPACE_LETTER, " ").encode()

    def _run(self, text: str, special_tokens: bool, adds: bool = False) -> tokenizers.Encoding:
        with self._mode:
            # the library's name for "as plain text"
            self._tokenizer.encode_special_tokens = not special_tokens
            try:
                # a batch of one: `encode` would hold Python's interpreter, and with it all threads
                return self._tokenizer.encode_batch([text], add_special_tokens=adds)[0]
            except (TypeError, UnicodeError):
                raise ValueError("text is not valid Unicode (a lone surrogate?)") from None

    def _encode_unguarded(self, text: str, guard: str) -> list[int]:
        text = text.replace(guard, "")
        return self.encode(text) if text else []

    def _find_special(self, text: str, guard: str) -> list[Span]:
        """Find the special tokens outside of guarded characters.

        A special token is left out if its characters give the same id as plain text (an unknown-token, a
        letter that is also in the vocabulary): protection would change nothing.
        """
        hidden = re.sub(f"[^{guard}]{guard}", guard * 2, text)  # keeps every other character's place
        found = [span for span in _spans(self._run(hidden, special_tokens=True)) if span[0] in self._special]
        if not found:
            return []
        plain = _spans(self._run(hidden, special_tokens=False))
        covered = Counter(index for _, start, stop in plain for index in range(start, stop))
        alone = {span for span in plain if all(covered[index] == 1 for index in range(*span[1:]))}
        return [span for span in found if span not in alone]

    def _protect(self, text: str, guard: str) -> str:
        while found := self._find_special(text, guard):  # one pass may leave other special tokens
            parts, position = [], 0
            for _, start, stop in found:
                inside = text[start:stop].replace(guard, "")
                parts += [text[position:start], *(letter + guard for letter in inside)]
                position = stop
            text = "".join([*parts, text[position:]])
        return text


def _spans(encoding: tokenizers.Encoding) -> list[Span]:
    return [(token_id, *offsets) for token_id, offsets in zip(encoding.ids, encoding.offsets, strict=True)]
