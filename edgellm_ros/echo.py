# SPDX-License-Identifier: Apache-2.0
"""User input as error texts show it: short, and without control characters.

A prompt, a name or a path can be megabytes long or hold terminal escape sequences. Error texts go to
terminals, logs and ROS messages, so every text that echoes user input passes through one of these functions.
"""

from __future__ import annotations

MAX_SHOWN = 200  # characters of user input in one error text


def quoted(value: object) -> str:
    """Return `repr(value)`, cut after 200 characters.

    The full length is appended if it was cut.
    """
    if isinstance(value, str):
        return repr(value[:MAX_SHOWN]) + _rest(value)
    try:
        return printable(repr(value))
    except ValueError:  # an integer of more than 4300 digits has no repr
        return f"a value of type {type(value).__name__}"


def printable(text: str) -> str:
    """Return `text` with control characters escaped, cut after 200 characters."""
    return escaped(text[:MAX_SHOWN]) + _rest(text)


def escaped(text: str) -> str:
    r"""Return `text` of any length with control characters as `\n`, `\x1b` and so on.

    Line breaks are control characters too.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def _rest(text: str) -> str:
    return f"... ({len(text)} characters)" if len(text) > MAX_SHOWN else ""
