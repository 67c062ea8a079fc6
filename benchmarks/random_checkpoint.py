# SPDX-License-Identifier: Apache-2.0
"""Complete checkpoints of any size with random weights, written in seconds.

Speed does not depend on the values of weights. The checkpoints are text only, in Hugging Face format, as
`edgellm export` reads them.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from math import log2, prod, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from benchmarks.model_shapes import ModelShape
from edgellm_ros.builder.families import families
from edgellm_ros.builder.graph import DTYPES

NEVER = "<|endoftext|>"  # the stop token; its logit is always 0, which is never the largest
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
MAX_POSITIONS = 40960
MANTISSA_BITS = {"fp16": 10, "bf16": 7, "fp32": 23}
EXPONENT_BIAS = {"fp16": 15, "bf16": 127, "fp32": 127}


def write_checkpoint(directory: Path, shape: ModelShape, precision: str, seed: int = 0) -> Path:
    """Write the checkpoint unless the directory has it already; return the directory.

    `precision`: type of the weights. `config.json` has a key "random" that describes them. ValueError if no
    family reads such a checkpoint.
    """
    config = checkpoint_config(shape) | {"random": {"precision": precision, "seed": seed}}
    config_file = directory / "config.json"
    if config_file.is_file() and json.loads(config_file.read_text()) == config:
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    config_file.unlink(missing_ok=True)
    make_tokenizer(shape.vocab_size).save(str(directory / "tokenizer.json"), pretty=False)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    shards = list(shape.shards())
    seeds = np.random.SeedSequence(seed).spawn(len(shards))
    files = [f"model-{index + 1:05}-of-{len(shards):05}.safetensors" for index in range(len(shards))]

    def write(index: int) -> None:
        rng = np.random.Generator(np.random.SFC64(seeds[index]))
        tensors = {name: _tensor(rng, name, size, precision) for name, size in shards[index].items()}
        save_file(tensors, directory / files[index])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(len(shards))))
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    config_file.write_text(json.dumps(config))  # last: an interrupted checkpoint has no config
    return directory


def checkpoint_config(shape: ModelShape) -> dict[str, Any]:
    """Make `config.json` of a text model."""
    known = {name for family in families() for name in family.model_types}
    if shape.model_type not in known:
        raise ValueError(f"no family of the builder reads the model type {shape.model_type!r}")
    return {
        **asdict(shape),
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "eos_token_id": shape.vocab_size - 1,
    }


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """Make a tokenizer of single bytes and meaningless words; every token has a text.

    A prompt has as many tokens as bytes. The last token is the stop token.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    vocabulary |= {f"\u0120{index}": index for index in range(len(alphabet), vocab_size - 1)}  # " 256", ...
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(NEVER, special=True, normalized=False)])
    return tokenizer


def _tensor(rng: np.random.Generator, name: str, shape: tuple[int, ...], precision: str) -> np.ndarray:
    """Make a random matrix that keeps the scale of its input, a scale of ones or a bias of zeros.

    The row of the stop token is 0.
    """
    dtype = DTYPES[precision].numpy()
    if len(shape) == 1:
        return (np.zeros if name.endswith("bias") else np.ones)(shape, dtype)
    values = _random(rng, shape, precision, shape[1] ** -0.5)
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        values[-1] = 0
    return values


def _random(rng: np.random.Generator, shape: tuple[int, ...], precision: str, size: float) -> np.ndarray:
    """Make values of mean 0 and a root mean square of about `size`.

    Sign and mantissa are random bits and all exponents are equal, so |x| is uniform in [s, 2s). The root mean
    square is within a factor of sqrt(2) of `size`. This is several times as fast as random numbers of a
    distribution.
    """
    dtype = DTYPES[precision].numpy()
    bits = np.dtype(f"u{dtype.itemsize}")
    mantissa, bias = MANTISSA_BITS[precision], EXPONENT_BIAS[precision]
    exponent = bias + round(log2(size / sqrt(7 / 3)))
    words = -(-prod(shape) * dtype.itemsize // 8)
    raw = rng.integers(0, 2**64 - 1, words, np.uint64, endpoint=True).view(bits)[: prod(shape)]
    raw &= bits.type(1 << (8 * dtype.itemsize - 1) | (1 << mantissa) - 1)
    raw |= bits.type(exponent << mantissa)
    return raw.view(dtype).reshape(shape)
