# SPDX-License-Identifier: Apache-2.0
"""Where the images and sounds of messages are.

A source is a file, or base64 in the text itself. Nothing is downloaded.
"""

from __future__ import annotations

import base64
import binascii
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from edgellm_ros.echo import printable, quoted

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
BASE64 = ";base64"
MAX_NAME = 4096  # bytes of a path on Linux


def find_source(given: Any, folder: Path | None, kind: str) -> Path | bytes:
    """Return the file, or the contents, that a name or URL gives.

    given: a file name relative to `folder`, a file:// URL, or a data: URL in base64 of a media type `kind`
    ("image", "audio"). Without a folder it must be a data: URL. ValueError for anything else.
    """
    if folder is None and not (isinstance(given, str) and given[:5].lower() == "data:"):
        raise ValueError(
            f"nothing is fetched, no file is read: expected data:{kind}/...{BASE64},..., got {quoted(given)}"
        )
    if not isinstance(given, str) or not given:
        raise ValueError(f"expected a file name, got {quoted(given)}")
    if given[:5].lower() == "data:":
        return _data(given, kind)
    assert folder is not None
    if len(given) > MAX_NAME:
        raise ValueError(f"expected a file name or a data: URL, got {quoted(given)}")
    scheme = SCHEME.match(given)
    if scheme is None:
        return folder / given
    if scheme[1].lower() != "file":
        raise ValueError(
            f"{printable(given)}: nothing is downloaded: expected a file name, a file:// URL or a "
            f"data:{kind}/...{BASE64} URL"
        )
    url = urlsplit(given)
    if url.netloc not in ("", "localhost") or not url.path:
        raise ValueError(f"{printable(given)}: expected file:///PATH, an absolute path on this computer")
    return Path(unquote(url.path))


def decode_base64(given: Any) -> bytes:
    """Decode text in base64; ValueError says what is wrong."""
    if not isinstance(given, str):
        raise ValueError(f"expected a text in base64, got {quoted(given)}")
    try:
        return base64.b64decode(given, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"not valid base64 ({len(given)} characters): {error}") from None


def _data(url: str, kind: str) -> bytes:
    """Return the contents of a data: URL (RFC 2397) in base64."""
    head, comma, data = url.partition(",")
    if not comma or not head.lower().endswith(BASE64) or not head[5:].lower().startswith(f"{kind}/"):
        raise ValueError(f"expected data:{kind}/...{BASE64},..., got {printable(head)}")
    return decode_base64(data)
