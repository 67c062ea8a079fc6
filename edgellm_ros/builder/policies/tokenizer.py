# SPDX-License-Identifier: Apache-2.0
"""What a tokenizer puts around a text."""

from __future__ import annotations

from pathlib import Path

import tokenizers


def tokens_around(path: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Find the tokens that a `tokenizer.json` puts around a text.

    Returns those before the text and those behind it, such as <bos>. ValueError for a file that the
    tokenizers library cannot load.
    """
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path}: not a tokenizer: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    plain, full = (tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
    starts = [start for start in range(len(full)) if full[start : start + len(plain)] == plain]
    if not plain or not starts:
        raise ValueError(f"{path}: special tokens change the tokens of the text between them")
    return tuple(full[: starts[0]]), tuple(full[starts[0] + len(plain) :])
