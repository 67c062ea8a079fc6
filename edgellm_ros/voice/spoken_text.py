# SPDX-License-Identifier: Apache-2.0
"""What a voice says of written text: no Markdown, no control characters, no emoji.

Links and addresses are reduced to what a person would say of them.
"""

from __future__ import annotations

import re
import unicodedata

_IMAGE_OR_LINK = re.compile(r"!?\[([^\]\n]{0,200})\]\([^)\s]{0,500}(?:\s+\"[^\"]*\")?\)")
_ADDRESS = re.compile(r"\b(?:https?|ftp)://(?:www\.)?([\w.-]{1,100})[^\s<>\"')\]]*|\bwww\.([\w.-]{1,100})\S*")
_TAG = re.compile(r"</?[A-Za-z|][^<>\n]{0,60}>")
_LINE_MARK = re.compile(r"^\s*(?:(?:[-*+•–>]|#{1,6})(?:\s+\[[ xX]\])?\s+)+")
_LIST_NUMBER = re.compile(r"^\s*(\d{1,3})[.)]\s+")
_RULE = re.compile(r"^\s*(?:[-*_=]\s*){3,}$|^\s*\|?(?:\s*:?-{2,}:?\s*\|?)+$")
_EMPHASIS = re.compile(r"\*+|`+|~~|(?<!\w)_+(?=\S)|(?<=\S)_+(?!\w)|\\(?=[*_#`\[\]])")
_REPEATED = re.compile(r"([^\w\s])\1{2,}")
_SPACE = re.compile(r"\s+")
_SPACE_BEFORE_MARK = re.compile(r" +(?=[,.;:!?])")
# Symbols, unassigned and private characters, surrogates, invisible characters.
_UNSPOKEN = {"So", "Cn", "Co", "Cs", "Cf"}
_SPOKEN_SYMBOLS = "°№™®©℃℉"


def spoken(text: str, is_line_start: bool = True) -> str:
    """Return what is spoken of a sentence; empty if it has no letter and no digit.

    is_line_start: whether list marks and headings may be at its beginning.
    """
    if is_line_start:
        if _RULE.match(text):
            return ""
        text = _LIST_NUMBER.sub(r"\1, ", _LINE_MARK.sub("", text))
    text = _IMAGE_OR_LINK.sub(r"\1", text)
    text = _ADDRESS.sub(_host, text)
    text = _EMPHASIS.sub("", _TAG.sub("", text))
    text = text.replace("|", ", ").strip(", \t\n")
    text = "".join(map(_character, unicodedata.normalize("NFC", text)))
    text = _SPACE_BEFORE_MARK.sub("", _SPACE.sub(" ", _REPEATED.sub(r"\1", text))).strip()
    return text if any(character.isalnum() for character in text) else ""


def _host(address: re.Match[str]) -> str:
    """Return the host of an address, with the full stop that ends its sentence."""
    host = address.group(1) or address.group(2)
    return host.rstrip(".-") + ("." if address.group(0).endswith(".") else "")


def _character(character: str) -> str:
    kind = unicodedata.category(character)
    if kind == "Cc":
        return " "
    return "" if kind in _UNSPOKEN and character not in _SPOKEN_SYMBOLS else character
