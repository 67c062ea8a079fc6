# SPDX-License-Identifier: Apache-2.0
"""Complete checkpoints of any size with random weights, written in seconds.

Speed does not depend on the values of weights. The checkpoints are in Hugging Face format, as `edgellm
export` reads them. Those of `published_models` are made by transformers, with its initial weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from math import log2, prod, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from benchmarks.model_shapes import ModelShape, Shapes
from benchmarks.published_models import PublishedModel, make_model
from edgellm_ros.builder.families import families
from edgellm_ros.builder.graph.graph import DTYPES

NEVER = "<|endoftext|>"  # the stop token; its logit is always 0, which is never the largest
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
MAX_POSITIONS = 40960
MANTISSA_BITS = {"fp16": 10, "bf16": 7, "fp32": 23}
TORCH_TYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
EXPONENT_BIAS = {"fp16": 15, "bf16": 127, "fp32": 127}


def write_checkpoint(
    directory: Path, shape: ModelShape | PublishedModel, precision: str, seed: int = 0
) -> Path:
    """Write the checkpoint unless the directory has it already; return the directory.

    `precision`: type of the weights. `config.json` has a key "random" that describes them. ValueError if no
    family reads such a checkpoint.
    """
    config = shape.config if isinstance(shape, PublishedModel) else checkpoint_config(shape)
    config = config | {"random": {"precision": precision, "seed": seed}}
    config_file = directory / "config.json"
    if config_file.is_file() and json.loads(config_file.read_text()) == config:
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    for old in (config_file, *directory.glob("*.safetensors*")):
        old.unlink(missing_ok=True)
    special = special_tokens(shape) if isinstance(shape, PublishedModel) else {}
    make_tokenizer(shape.vocab_size, special).save(str(directory / "tokenizer.json"), pretty=False)
    image = shape.image_text if isinstance(shape, PublishedModel) else ""
    (directory / "chat_template.jinja").write_text(TEMPLATE.replace("IMAGE", image))
    if isinstance(shape, PublishedModel):
        _write_published(directory, shape, precision, seed)
    else:
        write_shards(directory, list(shape.shards()), precision, seed)
    config_file.write_text(json.dumps(config))  # last: an interrupted checkpoint has no config
    return directory


def _write_published(directory: Path, model: PublishedModel, precision: str, seed: int) -> None:
    """Write the weights that transformers initialises, and the files of the processor."""
    import torch

    torch.manual_seed(seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"), torch.no_grad():
        made = make_model(model, dtype=getattr(torch, TORCH_TYPES[precision]))
        for table in (made.get_input_embeddings(), made.get_output_embeddings()):
            table.weight[-1] = 0
    made.save_pretrained(directory, max_shard_size="2GB")
    stop = {"eos_token_id": model.vocab_size - 1}
    (directory / "generation_config.json").write_text(json.dumps(stop))
    image = {"start_image_token": "<img>", "end_image_token": "</img>"}  # read for InternVL only
    (directory / "tokenizer_config.json").write_text(json.dumps({"extra_special_tokens": image}))
    if model.processor is not None:
        (directory / "preprocessor_config.json").write_text(json.dumps(model.processor))


def special_tokens(model: PublishedModel) -> dict[str, int]:
    """Return the ids of the special tokens in a model's image, by name."""
    names = [f"{name}>" for name in model.image_text.strip().split(">")[:-1]]
    keys = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
    ids = [model.config[key] for key in keys if key in model.config]
    tokens = dict(zip(names, ids, strict=True))
    if model.model_type == "internvl":  # the processor surrounds an image with these
        tokens |= {"<img>": model.config["image_token_id"] - 2, "</img>": model.config["image_token_id"] - 1}
    return tokens


def write_shards(directory: Path, shards: Sequence[Shapes], precision: str, seed: int) -> None:
    """Write a file of random weights for each shard, and their index."""
    seeds = np.random.SeedSequence(seed).spawn(len(shards))
    files = [f"model-{index + 1:05}-of-{len(shards):05}.safetensors" for index in range(len(shards))]

    def write(index: int) -> None:
        rng = np.random.Generator(np.random.SFC64(seeds[index]))
        tensors = {name: random_tensor(rng, name, size, precision) for name, size in shards[index].items()}
        save_file(tensors, directory / files[index])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(len(shards))))
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


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


def make_tokenizer(
    vocab_size: int, special: Mapping[str, int] | None = None, others: Mapping[str, int] | None = None
) -> Tokenizer:
    """Make a tokenizer of single bytes and meaningless words; every token has a text.

    A prompt has as many tokens as bytes. The last token is the stop token; `special`: ids of other special
    tokens; `others`: ids of tokens with a given text.
    """
    special, others = special or {}, others or {}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    taken = {*special.values(), *others.values()}
    words = [index for index in range(len(alphabet), vocab_size - 1) if index not in taken]
    vocabulary |= {f"\u0120{index}": index for index in words} | special | others  # " 256", ...
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = [*sorted(special, key=special.__getitem__), NEVER]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return tokenizer


def random_tensor(rng: np.random.Generator, name: str, shape: tuple[int, ...], precision: str) -> np.ndarray:
    """Make a random matrix, a scale of ones or a bias of zeros.

    A matrix keeps the scale of its input. The row of the stop token is 0.
    """
    dtype = DTYPES[precision].numpy()
    if len(shape) == 1:
        return (np.zeros if name.endswith("bias") else np.ones)(shape, dtype)
    values = _random(rng, shape, precision, prod(shape[1:]) ** -0.5)
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
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
