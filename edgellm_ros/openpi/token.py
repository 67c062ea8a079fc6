# SPDX-License-Identifier: Apache-2.0
"""The token that a client sends, and a server compares."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from pathlib import Path

HEADER = "Authorization"
API_KEY, BEARER = "Api-Key", "Bearer"  # schemes of openpi's clients, and of OpenAI's
MIN_TOKEN = 16  # characters


def read_token(path: str | Path) -> str:
    """Read a token: a line of visible ASCII characters.

    OSError, or ValueError for another content.
    """
    token = Path(path).read_bytes().strip()
    if len(token) < MIN_TOKEN or not all(0x21 <= byte <= 0x7E for byte in token):
        raise ValueError(
            f"{path}: a token must have at least {MIN_TOKEN} visible ASCII characters and no space, such as "
            "those of `openssl rand -hex 32`"
        )
    return token.decode()


def authorization(token: str, scheme: str = API_KEY) -> str:
    """Return the value of the header."""
    return f"{scheme} {token}"


def has_token(authorizations: Sequence[str], token: str, scheme: str = API_KEY) -> bool:
    """Tell whether a request's Authorization headers are the token's.

    In constant time. Without a token all are.
    """
    if not token:
        return True
    given = authorizations[0] if len(authorizations) == 1 else ""
    return hmac.compare_digest(given.encode(errors="surrogateescape"), authorization(token, scheme).encode())
