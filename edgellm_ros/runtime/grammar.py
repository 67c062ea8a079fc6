# SPDX-License-Identifier: Apache-2.0
"""Grammars of answers: JSON by a schema, text of a regular expression, a choice.

A grammar is compiled once for a tokenizer. Each request has a matcher, which reads the tokens of the answer
and says which tokens may come next:

  matcher  -> mask of the tokens that may come next -> logits -> sampled token -> matcher -> ...

The stop tokens are among them exactly when the answer is complete. For a tree of drafted tokens, each node
has a copy of the matcher that has read the tokens of its path. The library is llguidance, imported with the
first grammar. On a GPU its threads compute the masks of several matchers at a time; on a CPU they would wait
for those of ONNX Runtime, which stay busy for some time after a step.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from edgellm_ros.echo import printable, quoted

if TYPE_CHECKING:
    from edgellm_ros.runtime.prompt.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MISSING = "needs llguidance, which is not installed: pip install 'edgellm[grammar]'"
WHITE_SPACE = r"[ \t\r\n]{1,20}"  # at most, between two symbols of JSON: an answer cannot be blank for ever
MOST_COMPILED = 32  # grammars that are kept
MOST_THREADS = 8
CHANGE_LETTERS = ("Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Strip", "StripAccents", "Nmt", "BertNormalizer")
WORD_BITS = 32
ALL_BITS = np.uint32(0xFFFFFFFF)


@dataclass(frozen=True)
class Grammar:
    """A rule for the text of an answer.

    `kind`: the field of SamplingParams that gives it.
    """

    kind: str
    text: str  # JSON text of the schema, the expression, or JSON text of the list of choices

    def __str__(self) -> str:
        return f"{self.kind} {quoted(self.text)}"


def schema_text(schema: str | Mapping[str, Any]) -> str:
    """Return a JSON schema as JSON text.

    ValueError for text that is not JSON, or for another type.
    """
    if isinstance(schema, Mapping):
        try:
            return json.dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"json_schema is not JSON: {printable(str(error))}") from None
    if not isinstance(schema, str):
        raise ValueError(f"json_schema must be JSON text or a mapping, got {quoted(schema)}")
    try:
        json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"json_schema {quoted(schema)} is not JSON: {error}") from None
    return schema


def make_grammar(json_schema: str, regex: str, choices: Sequence[str]) -> Grammar | None:
    """Make the grammar of a request from fields of which at most one is not empty.

    None if all are empty. ValueError, in one line, for a grammar that the library refuses, or without the
    library.
    """
    found = [
        Grammar(kind, text)
        for kind, text in (
            ("json_schema", json_schema),
            ("regex", regex),
            ("choices", json.dumps(list(choices)) if choices else ""),
        )
        if text
    ]
    if not found:
        return None
    if len(found) > 1:
        raise ValueError(f"an answer has {found[0].kind} or {found[1].kind}, not both")
    _library(found[0].kind)
    problem = _problem(found[0])
    if problem:
        raise ValueError(f"{found[0]} cannot be used: {problem}")
    return found[0]


class Grammars:
    """Starts matchers for the answers of one model, and keeps compiled grammars.

    Logit j belongs to token vocab_map[j], or to token j without a `vocab_map`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        stop_token_ids: Collection[int],
        vocab_map: np.ndarray | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._token_of_logit = np.arange(vocab_size) if vocab_map is None else vocab_map
        self._is_whole = vocab_map is None
        self._stop_token_ids = list(stop_token_ids)
        self._vocabulary: Any = None  # of the library, made with the first grammar: 1 s for 150 000 tokens
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()

    def start(self, grammar: Grammar) -> GrammarMatcher:
        """Start an answer.

        ValueError if the library does not support the grammar or the tokenizer.
        """
        matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = self._compiled[grammar] = self._compile(grammar)
            if len(self._compiled) > MOST_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return GrammarMatcher(
            grammar, matcher, self._vocabulary, self._token_of_logit, self._is_whole, self._stop_bits
        )

    def _compile(self, grammar: Grammar) -> Any:
        library = _library(grammar.kind)
        if self._vocabulary is None:
            size = max(self._tokenizer.size, int(self._token_of_logit.max()) + 1)
            try:
                self._vocabulary = library.LLTokenizer(
                    _exact(self._tokenizer.to_json()), n_vocab=size, eos_token=self._stop_token_ids
                )
            except Exception as error:  # the library's own, or ValueError, by the kind of tokenizer
                reason = _one_line(str(error))
                raise ValueError(f"{grammar.kind}: this tokenizer is not supported: {reason}") from None
            self._stop_bits = to_bits(np.isin(self._token_of_logit, self._stop_token_ids))
        matcher = library.LLMatcher(self._vocabulary, _library_text(grammar), log_level=0)
        if matcher.is_error():
            raise ValueError(f"{grammar} cannot be used: {_one_line(matcher.get_error())}")
        return matcher


class GrammarMatcher:
    """The grammar of one answer, after the tokens that have been accepted."""

    def __init__(
        self,
        grammar: Grammar,
        compiled: Any,
        vocabulary: Any,
        token_of_logit: np.ndarray,
        is_whole: bool,
        stop_bits: np.ndarray,
    ) -> None:
        self._grammar = grammar
        self._compiled = compiled
        self.matcher = compiled.deep_copy()
        self._vocabulary = vocabulary
        self._token_of_logit = token_of_logit
        self._is_whole = is_whole
        self.stop_bits = stop_bits  # mask [W] of the stop tokens

    @property
    def words(self) -> int:
        """Words of the library's mask, which has a bit for each token."""
        return word_count(self._vocabulary.vocab_size)

    @property
    def failed(self) -> bool:
        """Whether the grammar has become too complex, or a token was not allowed."""
        return bool(self.matcher.is_error())

    @property
    def is_at_end(self) -> bool:
        """Whether no token but a stop token may come next."""
        return bool(self.matcher.is_stopped())

    def accept(self, token: int) -> None:
        """Read the next token of the answer, which is not a stop token."""
        if not self.failed and not self.matcher.consume_token(token):
            logger.warning("%s: %s", self._grammar, _one_line(self.matcher.get_error()))

    def after(self, token: int) -> GrammarMatcher | None:
        """Return a copy that has read one more token.

        None if the token is not allowed, or a stop token, or if the grammar becomes too complex with it.
        """
        if not 0 <= token < self._vocabulary.vocab_size or self.failed:
            return None
        changed = copy(self)
        changed.matcher = self.matcher.deep_copy()
        return changed if changed.matcher.try_consume_tokens([token]) else None

    def to_mask(self, bits: np.ndarray, mask: np.ndarray) -> None:
        """Convert the library's mask to a bit for each logit in mask [W] uint32.

        If no token is allowed, because the vocabulary lacks a byte or the grammar has become too complex, the
        stop tokens are: the answer then ends before it is complete.
        """
        if self._is_whole:
            mask[...] = bits[: len(mask)]
        else:
            mask[...] = to_bits(from_bits(bits, WORD_BITS * len(bits))[self._token_of_logit])
        rest = len(self._token_of_logit) % WORD_BITS
        if rest:
            mask[-1] &= np.uint32((1 << rest) - 1)
        if not self.matcher.is_accepting():
            mask &= ~self.stop_bits
        if not mask.any():
            mask[...] = self.stop_bits

    def is_complete(self, cut_text: str | None = None) -> bool:
        """Return whether the answer is complete by the grammar.

        `cut_text`: the text before a stop string.
        """
        if cut_text is None:
            return not self.failed and bool(self.matcher.is_accepting())
        matcher, tokens = self._compiled.deep_copy(), self._vocabulary.tokenize_str(cut_text)
        return bool(matcher.consume_tokens(tokens) and matcher.is_accepting())


def write_masks(
    matchers: Sequence[GrammarMatcher], masks: Sequence[np.ndarray], in_parallel: bool = False
) -> None:
    """Write a bit for each logit: whether its token may come next.

    The bits go into masks [n] of [W] uint32. All matchers are those of one model. `in_parallel`: with the
    library's threads.
    """
    if not matchers:
        return
    bits = np.zeros((len(matchers), matchers[0].words), np.int32)
    work = [(matcher.matcher, row) for row, matcher in enumerate(matchers) if not matcher.failed]
    if in_parallel and len(work) > 1:
        _functions().fill_next_token_bitmask_par(_executor(), work, bits)
    else:
        for allowed, row in work:
            _functions().fill_next_token_bitmask(allowed, bits, row)
    for matcher, found, mask in zip(matchers, bits.view(np.uint32), masks, strict=True):
        matcher.to_mask(found, mask)


def tree_matchers(
    matcher: GrammarMatcher, tokens: Sequence[int], parents: Sequence[int]
) -> dict[int, GrammarMatcher]:
    """Return a matcher for each node of a tree whose path the grammar allows.

    tokens, parents [M]: as in `DraftTree`; the matcher has accepted the token of node 0.
    """
    found = {0: matcher}
    for node in range(1, len(tokens)):
        above = found.get(parents[node])
        after = above.after(tokens[node]) if above is not None else None
        if after is not None:
            found[node] = after
    return found


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


def word_count(bits: int) -> int:
    """Return the number of 32-bit words of a mask with so many bits."""
    return -(-bits // WORD_BITS)


def to_bits(allowed: np.ndarray) -> np.ndarray:
    """Return a mask [W] uint32 with bit i % 32 of word i // 32 for allowed[i]."""
    padded = np.zeros(word_count(len(allowed)) * WORD_BITS, bool)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.uint32)


def from_bits(mask: np.ndarray, count: int) -> np.ndarray:
    """Return the first `count` bits of a mask [W] uint32 as bool [count]."""
    return np.unpackbits(mask.view(np.uint8), count=count, bitorder="little").view(bool)


def _library(kind: str) -> Any:
    """Import the grammar library. ValueError if it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise ValueError(f"{kind} {MISSING}") from None
    return llguidance


@cache
def _functions() -> Any:
    """Return the library's functions that write masks."""
    import llguidance.numpy

    return llguidance.numpy


@cache
def _executor() -> Any:
    """Return the library's threads."""
    import llguidance

    return llguidance.LLExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0))))


@lru_cache(maxsize=256)
def _problem(grammar: Grammar) -> str:
    """Return why the library refuses a grammar, in one line; "" if it does not."""
    library = _library(grammar.kind)
    return _one_line(library.LLMatcher.validate_grammar(_library_text(grammar)))


def _library_text(grammar: Grammar) -> str:
    """Return a grammar as the library writes it."""
    matcher = _library(grammar.kind).LLMatcher
    if grammar.kind == "json_schema":
        options = {"whitespace_pattern": WHITE_SPACE}
        return str(matcher.grammar_from_json_schema(grammar.text, overrides=options))
    if grammar.kind == "regex":
        return str(matcher.grammar_from_regex(grammar.text))
    strings = " | ".join(json.dumps(choice) for choice in json.loads(grammar.text))
    return f"start: CHOICE\nCHOICE: {strings}"  # one terminal, so that one choice may begin with another


def _one_line(message: str) -> str:
    """Return the reason in a message of the library.

    The message shows the place in several lines.
    """
    reason = re.search(r"^error: (.*)$", message, re.MULTILINE)
    return printable(reason[1] if reason else message.strip().split("\n")[0])
