# SPDX-License-Identifier: Apache-2.0
"""Grammars of answers: JSON by a schema, text of a regular expression, a choice.

A grammar is compiled for each answer. The matcher of a request reads the tokens of the answer and says which
tokens may come next:

  matcher  -> mask of the tokens that may come next -> logits -> sampled token -> matcher -> ...

The stop tokens are among them exactly when the answer is complete. For a tree of drafted tokens, each node
has a copy of the matcher that has read the tokens of its path. On a GPU the library's threads
(library.py) compute the masks of several matchers at a time; on a CPU they would wait for those of
ONNX Runtime, which stay busy for some time after a step.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Collection, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np

from edgellm_ros.interruptible import interruptible
from edgellm_ros.runtime.grammar.library import (
    Grammar,
    check_grammar,
    compile_grammar,
    compile_vocabulary,
    mask_functions,
    mask_threads,
    one_line,
)

if TYPE_CHECKING:
    from edgellm_ros.runtime.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

WORD_BITS = 32
ALL_BITS = np.uint32(0xFFFFFFFF)


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
    check_grammar(found[0])
    return found[0]


class Grammars:
    """Starts matchers for the answers of one model.

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
        self._stop_bits = to_bits(np.isin(self._token_of_logit, self._stop_token_ids))
        self._reading = threading.Lock()  # of the vocabulary
        self._vocabulary: Any = None  # of the library, made with the first grammar

    def start(self, grammar: Grammar, stopped: Callable[[], bool] = lambda: False) -> GrammarMatcher:
        """Compile the grammar of an answer while `stopped` returns False.

        ValueError if the library does not support the grammar or the tokenizer; InterruptedWorkError.
        """
        vocabulary, compiled = interruptible(lambda: self._compile(grammar), stopped)
        return GrammarMatcher(
            grammar, compiled, vocabulary, self._token_of_logit, self._is_whole, self._stop_bits
        )

    def _compile(self, grammar: Grammar) -> tuple[Any, Any]:
        """Return the vocabulary and the compiled grammar."""
        with self._reading:
            if self._vocabulary is None:
                size = max(self._tokenizer.size, int(self._token_of_logit.max()) + 1)
                try:
                    self._vocabulary = compile_vocabulary(self._tokenizer, size, self._stop_token_ids)
                except ValueError as error:
                    raise ValueError(f"{grammar.kind}: {error}") from None
        return self._vocabulary, compile_grammar(grammar, self._vocabulary)


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
            logger.warning("%s: %s", self._grammar, one_line(self.matcher.get_error()))

    def again(self) -> GrammarMatcher:
        """Return a matcher that has read no token."""
        begun = copy(self)
        begun.matcher = self._compiled.deep_copy()
        return begun

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
        mask_functions().fill_next_token_bitmask_par(mask_threads(), work, bits)
    else:
        for allowed, row in work:
            mask_functions().fill_next_token_bitmask(allowed, bits, row)
    for matcher, found, mask in zip(matchers, bits.view(np.uint32), masks, strict=True):
        matcher.to_mask(found, mask)


def tree_matchers(
    matcher: GrammarMatcher, tokens: Sequence[int], parents: Sequence[int]
) -> dict[int, GrammarMatcher]:
    """Return matchers by node of a tree; nodes that the grammar forbids have none.

    tokens, parents [M]: as in `DraftTree`; the matcher has accepted the token of node 0.
    """
    found = {0: matcher}
    for node in range(1, len(tokens)):
        above = found.get(parents[node])
        after = above.after(tokens[node]) if above is not None else None
        if after is not None:
            found[node] = after
    return found


def word_count(bits: int) -> int:
    """Return the number of 32-bit words of a mask with `bits` bits."""
    return -(-bits // WORD_BITS)


def to_bits(allowed: np.ndarray) -> np.ndarray:
    """Return a mask [W] uint32 with bit i % 32 of word i // 32 for allowed[i]."""
    padded = np.zeros(word_count(len(allowed)) * WORD_BITS, bool)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.uint32)


def from_bits(mask: np.ndarray, count: int) -> np.ndarray:
    """Return the first `count` bits of a mask [W] uint32 as bool [count]."""
    return np.unpackbits(mask.view(np.uint8), count=count, bitorder="little").view(bool)
