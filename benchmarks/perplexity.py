# SPDX-License-Identifier: Apache-2.0
"""Perplexity of engines on a text, and the KL divergence of their predictions.

Measures
--------
exp of the mean negative log-likelihood of tokens, and for each further engine the KL divergence from the
first one's predictions.

Conditions
----------
The language model's graph that a CPU runs, without a chat template. The text is cut into chunks; the tokens
of the second half of each are predicted, after those before them in the chunk. The first token of each chunk
is replaced by the beginning of sequence, if the tokenizer has one. All engines have one tokenizer.

Examples
--------
    python -m benchmarks.perplexity --engines engines/fp32,engines/int4 --text LICENSE --text README.md

Last JSON line: `perplexity` and `kl_divergence` by engine, and the number of predictions.

"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from edgellm_ros.cli.quantization.perplexity import Chunks, cut, log_likelihood, predict, predictions
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.runtime.text.tokenizer import Tokenizer


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = common.parser(__doc__)
    common.add_engines(parser)
    parser.add_argument(
        "--text", type=Path, action="append", required=True, help="a file of the text; may be given again"
    )
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a chunk (default: %(default)s)")
    parser.add_argument("--chunks", type=int, default=16, help="chunks to score (default: %(default)s)")
    args = parser.parse_args(arguments)
    folders = [Path(folder) for folder in common.engines(args)]
    try:
        check(folders, args.chunk)
        chunks = read_chunks(folders[0], args.text, args.chunk, args.chunks)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    losses, divergences = np.zeros(len(folders)), np.zeros(len(folders))
    for *engines, chunk in zip(*(predict(folder, chunks) for folder in folders), chunks, strict=True):
        for index, found in enumerate(engines):
            losses[index] -= log_likelihood(found, chunk)
            divergences[index] += (np.exp(engines[0]) * (engines[0] - found)).sum()
    count = predictions(chunks)
    names = [str(folder) for folder in folders]
    perplexity = dict(zip(names, np.exp(losses / count).tolist(), strict=True))
    divergence = dict(zip(names, (divergences / count).tolist(), strict=True))
    for name in names:
        print(f"{name}: perplexity {perplexity[name]:.3f}, KL {divergence[name]:.4f}", file=sys.stderr)
    return common.finish("perplexity", predictions=count, perplexity=perplexity, kl_divergence=divergence)


def check(engines: Sequence[Path], size: int) -> None:
    """Raise ValueError if an engine cannot score chunks of a size beside the others."""
    tokenizers = [(engine / "tokenizer.json").read_bytes() for engine in engines]
    for engine, tokenizer in zip(engines, tokenizers, strict=True):
        config = EngineConfig.load(engine)
        longest = config.builder.max_kv_cache_capacity
        if not 2 <= size <= longest:
            raise ValueError(
                f"--chunk must be from 2 to {longest}, max_kv_cache_capacity of {engine}, got {size}"
            )
        if config.llm.output_vocab_size != config.llm.vocab_size:
            raise ValueError(f"{engine} generates a part of its vocabulary: export it without --vocab-map")
        if tokenizer != tokenizers[0]:
            raise ValueError(f"{engine} has another tokenizer than {engines[0]}")


def read_chunks(engine: Path, texts: Sequence[Path], size: int, count: int) -> Chunks:
    """Return the first `count` chunks of a text; ValueError if it has fewer."""
    text = "".join(path.read_text(encoding="utf-8") for path in texts)
    tokens = Tokenizer(engine / "tokenizer.json").encode(text)
    most = len(tokens) // size
    if not 1 <= count <= most:
        raise ValueError(
            f"--chunks must be from 1 to {most}, as the text has {len(tokens)} tokens, got {count}"
        )
    return cut(tokens, size)[:count]


if __name__ == "__main__":
    main()
