# SPDX-License-Identifier: Apache-2.0
"""Makes tokenizers of byte-level BPE from vocabularies and merges.

Source of the pre-tokenizers: ggml-org/llama.cpp, src/llama-vocab.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
WORDS_WITH_MARKS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> Any:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


# By the names of GGUF files, `tokenizer.ggml.pre`.
PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "exaone"), _digits_then_gpt2),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais"), _gpt2),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), lambda: _split(WORDS % "{1,3}")
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan"), lambda: _split(WORDS % "")),
    "qwen35": lambda: _split(WORDS_WITH_MARKS),
}
WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral")  # before merges
COMPOSED = ("qwen2", "deepseek-r1-qwen", "qwen35")  # text is composed (NFC) first


def byte_level_tokenizer(
    kind: str, vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]]
) -> Tokenizer:
    """Make a tokenizer without added tokens.

    kind: one of PRE_TOKENIZERS; vocabulary: token -> id; merges: pairs of tokens, the first ones first. The
    library raises an exception without a class of its own for merges of tokens that the vocabulary lacks.
    """
    first = kind in WHOLE_WORDS_FIRST
    tokenizer = Tokenizer(models.BPE(vocab=dict(vocabulary), merges=[*merges], ignore_merges=first))
    if kind in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[kind]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
