# SPDX-License-Identifier: Apache-2.0
"""Which part of an unfinished answer is surely before its tool calls.

An answer that may have calls is streamed up to the first mark that may begin one, in any of the formats of
runtime/prompt/tool_call_formats.py. The rest is sent when the answer is complete.
"""

from __future__ import annotations

import re

MARKS = ("<tool_call>", "<function=", "<TOOLCALL>", "[TOOL_CALLS]", "<|python_tag|>")
# The marks of some formats are special tokens, which a text does not show: a name, and JSON at the beginning.
BEGINNING = re.compile(r"\s*[\w.-]*\s*(?:[\[{]|\Z)")


def before_calls(text: str) -> str:
    """Return the part of an answer, complete or not, before what may be a call."""
    if BEGINNING.match(text):
        return ""
    ends = [at for mark in MARKS if (at := text.find(mark)) >= 0]
    ends += [len(text) - length for mark in MARKS if (length := _begun(text, mark))]
    return text[: min(ends, default=len(text))]


def _begun(text: str, mark: str) -> int:
    """Return how many characters of a mark the text ends with."""
    return next((length for length in range(len(mark) - 1, 0, -1) if text.endswith(mark[:length])), 0)
