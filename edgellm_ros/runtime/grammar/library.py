# SPDX-License-Identifier: Apache-2.0
"""llguidance, the library that compiles grammars; imported with the first one.

The library's limits bound what one answer may take of the memory: the library adds states to a compiled
grammar with every mask, and all copies of the grammar share them. So an answer has a compiled grammar of its
own, whose memory ends with the answer, and neither its masks nor its limits depend on earlier answers.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from edgellm_ros.echo import printable, quoted
from edgellm_ros.runtime.grammar.json_schemas import schema_grammar

if TYPE_CHECKING:
    from edgellm_ros.runtime.text.tokenizer import Tokenizer

MISSING = "needs llguidance, which is not installed: pip install 'edgellm[grammar]'"
MOST_STATES = 50_000  # of a compiled grammar, about 1 kB each; the library's default is 250,000
MOST_SYMBOLS = 60_000  # of a grammar's rules; with the library's default, 500,000, a compilation takes 250 MB
MOST_THREADS = 8
SHORT = 10_000  # characters of a grammar whose check is remembered
CHANGE_LETTERS = ("Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Strip", "StripAccents", "Nmt", "BertNormalizer")


@dataclass(frozen=True)
class Grammar:
    """A rule for the text of an answer.

    `kind`: the field of SamplingParams that gives it.
    """

    kind: str
    text: str  # JSON text of the schema, the expression, or JSON text of the list of choices

    def __str__(self) -> str:
        return f"{self.kind} {quoted(self.text)}"


def check_grammar(grammar: Grammar) -> None:
    """Check a grammar without a vocabulary.

    ValueError, in one line, for a grammar that the library refuses, or without the library.
    """
    try:
        library()
    except ImportError:
        raise ValueError(f"{grammar.kind} {MISSING}") from None
    problem = _known_problem(grammar) if len(grammar.text) <= SHORT else _problem(grammar)
    if problem:
        raise ValueError(f"{grammar} cannot be used: {problem}")


def compile_vocabulary(tokenizer: Tokenizer, size: int, stop_token_ids: list[int]) -> Any:
    """Return the library's form of a vocabulary of `size` tokens.

    Takes 1 s for 150,000 tokens. ValueError if the library does not support the tokenizer.
    """
    try:
        return library().LLTokenizer(_exact(tokenizer.to_json()), n_vocab=size, eos_token=stop_token_ids)
    except Exception as error:  # the library's own, or ValueError, by the kind of tokenizer
        raise ValueError(f"this tokenizer is not supported: {one_line(str(error))}") from None


def compile_grammar(grammar: Grammar, vocabulary: Any) -> Any:
    """Compile a grammar for a vocabulary; returns a matcher of the library.

    ValueError if the library does not support the grammar.
    """
    matcher = library().LLMatcher(vocabulary, _library_text(grammar), log_level=0, limits=_limits())
    if matcher.is_error():
        raise ValueError(f"{grammar} cannot be used: {one_line(matcher.get_error())}")
    return matcher


def library() -> Any:
    """Import the library. ImportError if it is not installed."""
    import llguidance

    return llguidance


@cache
def mask_functions() -> Any:
    """Return the library's functions that write masks."""
    import llguidance.numpy

    return llguidance.numpy


@cache
def mask_threads() -> Any:
    """Return the library's threads."""
    return library().LLExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0))))


def one_line(message: str) -> str:
    """Return the reason in a message of the library.

    The message shows the place in several lines.
    """
    reason = re.search(r"^error: (.*)$", message, re.MULTILINE)
    return printable(reason[1] if reason else message.strip().split("\n")[0])


@cache
def _limits() -> Any:
    return library().LLParserLimits(max_lexer_states=MOST_STATES, max_grammar_size=MOST_SYMBOLS)


def _problem(grammar: Grammar) -> str:
    """Return why the library refuses a grammar, in one line; "" if it does not."""
    return one_line(library().LLMatcher.validate_grammar(_library_text(grammar), limits=_limits()))


_known_problem = lru_cache(maxsize=256)(_problem)


def _library_text(grammar: Grammar) -> str:
    """Return a grammar as the library writes it."""
    if grammar.kind == "json_schema":
        return schema_grammar(library(), grammar.text)
    if grammar.kind == "regex":
        try:
            return str(library().LLMatcher.grammar_from_regex(grammar.text))
        except ValueError as error:  # half of a surrogate pair
            raise ValueError(f"{grammar} cannot be used: {printable(str(error))}") from None
    strings = " | ".join(json.dumps(choice) for choice in json.loads(grammar.text))
    return f"start: CHOICE\nCHOICE: {strings}"  # one terminal, so that one choice may begin with another


def _exact(tokenizer: str) -> str:
    """Return the JSON of a tokenizer without normalizers that change letters.

    The library converts text that a grammar forces to tokens, which must have the same letters.
    """
    contents = json.loads(tokenizer)
    normalizer = contents.get("normalizer") or {}
    steps = normalizer["normalizers"] if normalizer.get("type") == "Sequence" else [normalizer]
    kept = [step for step in steps if step and step.get("type") not in CHANGE_LETTERS]
    contents["normalizer"] = {"type": "Sequence", "normalizers": kept} if kept else None
    return json.dumps(contents)
