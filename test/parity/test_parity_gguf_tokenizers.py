# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of GGUF files against those of transformers and SentencePiece."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.parity
sentencepiece = pytest.importorskip("sentencepiece")
transformers = pytest.importorskip("transformers")

from edgellm_ros.builder.gguf.reader import read_gguf  # noqa: E402
from edgellm_ros.builder.gguf.tokenizer import Vocabulary  # noqa: E402
from fixtures.gguf_files import CONTROL, MERGES, vocabulary, write_gguf  # noqa: E402
from fixtures.odd_texts import odd_texts  # noqa: E402

CORPUS = Path(__file__).parents[2] / "docs"
TEXTS = 2000
# Of digits, lines, spaces and apostrophes, which pre-tokenizers split in different ways.
FURTHER = ["1 2", "12 3", "3 .", "\u010a \u010a", "\u0120 \u0120", "' t", "n 't", ". .", "_ b", "\u0120 1"]


def ours(path: Path, keys: dict[str, object]):
    """Write a file with these keys and make its tokenizer."""
    return Vocabulary(read_gguf(write_gguf(path, kind="F32", **keys))).tokenizer()


def assert_same_tokens(tokenizer, expected, texts: list[str]) -> None:
    """Compare token ids with those that `expected` gives."""
    for text in texts:
        assert tokenizer.encode(text, add_special_tokens=False).ids == expected(text), repr(text)


@pytest.mark.parametrize(
    ("pre", "name"), [("gpt-2", "GPT2Tokenizer"), ("qwen2", "Qwen2Tokenizer"), ("qwen35", "Qwen3_5Tokenizer")]
)
def test_byte_level_tokens_are_those_of_transformers(tmp_path, pre, name):
    tokens = [*vocabulary(), *(merge.replace(" ", "") for merge in FURTHER)]
    merges = [*MERGES, *FURTHER]
    reference = getattr(transformers, name)(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in merges],
        additional_special_tokens=CONTROL,
    )
    keys = {
        "pre": pre,
        "tokens": tokens,
        "token_type": [3 if token in CONTROL else 1 for token in tokens],
        "merges": merges,
    }
    tokenizer = ours(tmp_path / "model.gguf", {f"tokenizer.ggml.{key}": keys[key] for key in keys})
    assert_same_tokens(tokenizer, lambda text: reference(text)["input_ids"], odd_texts(TEXTS))


@pytest.mark.parametrize("prefix", [True, False], ids=["space before the text", "no space before it"])
def test_pieces_are_those_of_sentencepiece(tmp_path, prefix):
    sentencepiece.SentencePieceTrainer.train(
        input=",".join(str(path) for path in sorted(CORPUS.glob("*.md"))),
        model_prefix=str(tmp_path / "pieces"),
        vocab_size=2000,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        add_dummy_prefix=prefix,
        max_sentence_length=100_000,
        minloglevel=2,
    )
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "pieces.model"))
    numbers = range(reference.get_piece_size())
    keys = {
        "model": "llama",
        "pre": "default",
        "tokens": [reference.id_to_piece(i) for i in numbers],
        "scores": [float(reference.get_score(i)) for i in numbers],
        "token_type": [_type(reference, i) for i in numbers],
        "merges": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_space_prefix": prefix,
    }
    named = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    tokenizer = ours(tmp_path / "model.gguf", named)
    texts = odd_texts(TEXTS)
    assert_same_tokens(tokenizer, reference.encode, texts)
    for text in texts:
        assert tokenizer.decode(reference.encode(text)) == reference.decode(reference.encode(text))


def _type(reference, number: int) -> int:
    """Return llama.cpp's number of a kind of piece."""
    if reference.is_unknown(number):
        return 2
    return 3 if reference.is_control(number) else 6 if reference.is_byte(number) else 1
