# SPDX-License-Identifier: Apache-2.0
"""Perplexity of an engine on a text, without a chat template.

    text -- chunks of tokens -- predictions of the second half of each chunk -- exp of the mean negative
                                                                                log-likelihood

The first token of a chunk is replaced by the beginning of sequence, if the tokenizer has one. This is the
method of llama.cpp's llama-perplexity.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from edgellm_ros.cli.quantization.token_runs import open_graph, run_graph, text_inputs
from edgellm_ros.engine_directory.chat_template import read_special_tokens
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.engine_directory.files import SPECIAL_TOKENS_FILE
from edgellm_ros.runtime.text.tokenizer import Tokenizer

TEXT = Path(__file__).with_name("text.txt").read_text(encoding="utf-8")  # written for this purpose
CHUNK, MOST_CHUNKS = 256, 8  # of a report: tokens, chunks

Chunks = list[list[int]]


def report_chunks(engine: Path, text: str) -> Chunks:
    """Cut a text into at most MOST_CHUNKS chunks of CHUNK tokens.

    Chunks are shorter where the engine's KV cache or the text is. There is none if the text has less than two
    tokens, or if the engine predicts a part of its vocabulary only.
    """
    config = EngineConfig.load(engine)
    if config.llm.output_vocab_size != config.llm.vocab_size:
        return []
    tokens = Tokenizer(engine / "tokenizer.json").encode(text)
    size = min(CHUNK, config.builder.max_kv_cache_capacity, len(tokens))
    return cut(tokens, size)[:MOST_CHUNKS] if size > 1 else []


def cut(tokens: Sequence[int], size: int) -> Chunks:
    """Cut tokens into chunks of a size; what is left at the end is dropped."""
    return [list(tokens[start : start + size]) for start in range(0, len(tokens) - size + 1, size)]


def predictions(chunks: Chunks) -> int:
    """Return the number of tokens that are predicted."""
    return sum(len(chunk) - len(chunk) // 2 for chunk in chunks)


def perplexity(engine: Path, chunks: Chunks) -> float:
    """Compute the perplexity of the graph that a CPU runs."""
    loss = 0.0
    for found, chunk in zip(predict(engine, chunks), chunks, strict=True):
        loss -= log_likelihood(found, chunk)
    return float(np.exp(loss / predictions(chunks)))


def log_likelihood(found: np.ndarray, chunk: Sequence[int]) -> float:
    """Sum the log-probabilities that predictions give to a chunk's second half."""
    following = np.array(chunk[len(chunk) // 2 :])
    return float(found[np.arange(len(following)), following].sum())


def predict(engine: Path, chunks: Chunks) -> Iterator[np.ndarray]:
    """Yield the log-probabilities [size - size // 2, V] of each chunk's second half."""
    session, begin = open_graph(engine), begin_of_sequence(engine)
    for chunk in chunks:
        tokens = list(chunk) if begin is None else [begin, *chunk[1:]]
        (logits,) = run_graph(session, engine, text_inputs(engine, tokens), ["logits"])
        rows = logits.reshape(len(chunk), -1)[len(chunk) // 2 - 1 : -1]
        yield log_probabilities(rows.astype(np.float64))


def begin_of_sequence(engine: Path) -> int | None:
    """Return the token that begins a sequence; None if there is none."""
    text = read_special_tokens(engine / SPECIAL_TOKENS_FILE).get("bos_token")
    return Tokenizer(engine / "tokenizer.json").encode_prompt(text)[0] if text else None


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """Compute the logarithms of the probabilities [...,V] that logits [...,V] mean."""
    top = logits.max(-1, keepdims=True)
    return logits - (top + np.log(np.exp(logits - top).sum(-1, keepdims=True)))
