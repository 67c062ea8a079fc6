# SPDX-License-Identifier: Apache-2.0
"""What a tokenizer puts around a text."""

from __future__ import annotations

from pathlib import Path

from edgellm_ros.builder.config.prompt_files import read_tokenizer
from edgellm_ros.engine_directory.tokenizer_file import named_errors


def tokens_around(
    path: Path, vocab_size: int, outside: tuple[str, ...] = ()
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Find the tokens that a `tokenizer.json` puts around a text.

    Returns those before the text and those after it, such as <bos>. ValueError for a file that the
    tokenizers library cannot load, that encodes nothing or that has ids outside the vocabulary, but for
    those of the tokens `outside`.
    """
    tokenizer = read_tokenizer(path, vocab_size, outside)
    with named_errors(path, "a tokenizer that cannot encode text"):
        plain, full = (tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
    starts = [start for start in range(len(full)) if full[start : start + len(plain)] == plain]
    if not plain or not starts:
        raise ValueError(f"{path}: special tokens change the tokens of the text between them")
    return tuple(full[: starts[0]]), tuple(full[starts[0] + len(plain) :])
