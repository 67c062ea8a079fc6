# SPDX-License-Identifier: Apache-2.0
"""Loads a `tokenizer.json`; errors of the tokenizers library name the file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tokenizers

from edgellm_ros.echo import printable

# Texts come one at a time: the library needs no threads of its own, and says nothing when a process forks.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
TRANSCRIPT_MARK = "<asr_text>"  # token before the words that a model for speech to text hears
PANIC = "PanicException"  # a bug in the library, of no class that Python code can name


def load_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """Load a tokenizer that neither cuts nor pads texts.

    FileNotFoundError, or ValueError for a file that the library cannot load.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found")
    with named_errors(path, "not a tokenizer"):
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        tokenizer.no_truncation()  # the file may set a length: a prompt is never cut silently
        tokenizer.no_padding()
    return tokenizer


@contextmanager
def named_errors(path: Path, problem: str) -> Iterator[None]:
    """Turn what the library raises into ValueErrors that name file and problem."""
    try:
        yield
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path}: {problem}: {printable(str(error))}") from None
    except BaseException as error:
        if type(error).__name__ != PANIC:
            raise
        raise ValueError(f"{path}: {problem}: {printable(str(error))}") from None
