# SPDX-License-Identifier: Apache-2.0
"""Makes a tokenizer from `vocab.json` and `merges.txt`.

A folder has these in place of `tokenizer.json` if it was saved by a tokenizer of transformers in Python.
Source: transformers, Qwen2Tokenizer.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection, read_section
from edgellm_ros.builder.config.byte_level import byte_level_tokenizer
from edgellm_ros.echo import quoted
from edgellm_ros.engine_directory.tokenizer_file import named_errors

VOCABULARY_FILE, MERGES_FILE, CONFIG_FILE = "vocab.json", "merges.txt", "tokenizer_config.json"
VOCABULARY_FILES = VOCABULARY_FILE, MERGES_FILE, CONFIG_FILE
ADDED = "added_tokens_decoder"
QWEN2 = ["Qwen2Tokenizer", "Qwen2TokenizerFast"]
FLAGS = "lstrip", "normalized", "rstrip", "single_word", "special"


def tokenizer_of_files(folder: Path) -> Tokenizer:
    """Make the tokenizer of a folder with a vocabulary of Qwen2.

    FileNotFoundError, or ValueError, which names file and value, for one of another kind, and for added
    tokens that get other ids than the file gives them.
    """
    config = read_section(folder / CONFIG_FILE)
    config.one_of("tokenizer_class", QWEN2)
    vocabulary = read_section(folder / VOCABULARY_FILE)
    for token in vocabulary.data:
        if vocabulary.integer(token) < 0:
            raise vocabulary.fail(token, "expected at least 0")
    merges = _merges(folder / MERGES_FILE)
    with named_errors(folder / MERGES_FILE, f"not the merges of {VOCABULARY_FILE}"):
        tokenizer = byte_level_tokenizer("qwen2", vocabulary.data, merges)
    _add_tokens(tokenizer, config.section(ADDED))
    return tokenizer


def _merges(path: Path) -> list[tuple[str, str]]:
    """Read pairs of tokens, one a line."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found")
    merges = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text in UTF-8: {error}") from None
    for number, line in enumerate(lines):
        if not line.strip() or (number == 0 and line.startswith("#version:")):
            continue
        left, _, right = line.partition(" ")
        if not left or not right or " " in right:
            raise ValueError(f"{path}: line {number + 1} {quoted(line)}: expected two tokens")
        merges.append((left, right))
    return merges


def _add_tokens(tokenizer: Tokenizer, section: ConfigSection) -> None:
    """Add the tokens of `added_tokens_decoder` in the order of their ids."""
    wrong = next((key for key in section.data if not key.isdecimal()), None)
    if wrong is not None:
        raise section.fail(wrong, "expected the id of a token as its key")
    for key in sorted(section.data, key=int):
        token = section.section(key)
        content = token.text("content")
        tokenizer.add_tokens([AddedToken(content, **{flag: token.flag(flag, False) for flag in FLAGS})])
        given = tokenizer.token_to_id(content)
        if given != int(key):
            raise token.fail("content", f"expected the id {key}, but the tokens before it leave {given}")
