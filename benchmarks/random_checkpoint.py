# SPDX-License-Identifier: Apache-2.0
"""Complete checkpoints of any size with random weights, written in seconds.

Speed does not depend on the values of weights. The checkpoints are text only, in Hugging Face format, as
`edgellm export` reads them. Their tensors have the names of Qwen3.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from math import log2, prod, sqrt
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from edgellm_ros.builder.families.qwen3_omni.config import MODEL_TYPE
from edgellm_ros.builder.graph import DTYPES

NEVER = "<|endoftext|>"  # the stop token; its logit is always 0, which is never the largest
TEMPLATE = (
    "{% for message in messages %}{% for item in message.content %}{{ item.text }}{% endfor %}{% endfor %}"
)
ROPE_THETA, EPSILON, MAX_POSITIONS = 1e6, 1e-6, 40960
MANTISSA_BITS = {"fp16": 10, "bf16": 7, "fp32": 23}
EXPONENT_BIAS = {"fp16": 15, "bf16": 127, "fp32": 127}
BYTES_PER_VALUE = {"fp16": 2, "bf16": 2, "fp32": 4}

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a dense Qwen3 language model, named as in its configuration."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 128
    vocab_size: int = 151936
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        if self.vocab_size < 257:
            raise ValueError(
                f"vocab_size must be at least 257 (256 bytes and a stop token), got {self.vocab_size}"
            )

    def layer(self) -> Shapes:
        """Return name and shape of each tensor of one layer."""
        hidden, inner, size = self.hidden_size, self.intermediate_size, self.head_dim
        q, kv = self.num_attention_heads * size, self.num_key_value_heads * size
        return {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.q_norm.weight": (size,),
            "self_attn.k_norm.weight": (size,),
            "self_attn.o_proj.weight": (hidden, q),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }

    def shards(self) -> Iterator[Shapes]:
        """Yield the tensors of each file."""
        table = (self.vocab_size, self.hidden_size)
        yield {"model.embed_tokens.weight": table, "model.norm.weight": (self.hidden_size,)}
        if not self.tie_word_embeddings:
            yield {"lm_head.weight": table}
        for index in range(self.num_hidden_layers):
            yield {f"model.layers.{index}.{name}": shape for name, shape in self.layer().items()}

    @property
    def parameters(self) -> int:
        """Return the number of weights; a table that is used twice counts once."""
        return sum(prod(shape) for shard in self.shards() for shape in shard.values())

    @property
    def parameters_per_step(self) -> int:
        """Return the number of weights that one decode step reads.

        The embedding table counts only if it is the last matrix too.
        """
        table = self.vocab_size * self.hidden_size
        return self.parameters - (0 if self.tie_word_embeddings else table)

    @property
    def cache_values_per_token(self) -> int:
        """Return the number of values per token in the KV cache."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim


QWEN3_0_6B = ModelShape(1024, 3072, 28, 16, 8)
SHAPES = {
    "qwen3-0.6b": QWEN3_0_6B,
    "qwen3-1.7b": replace(QWEN3_0_6B, hidden_size=2048, intermediate_size=6144),
    "qwen3-4b": ModelShape(2560, 9728, 36, 32, 8),
    "qwen3-8b": ModelShape(4096, 12288, 36, 32, 8, tie_word_embeddings=False),
}


def bytes_per_step(
    shape: ModelShape, precision: str, batch: int, context: int, tokens: int
) -> dict[str, int]:
    """Compute the average bytes that a decode step reads: {"weights", "kv_cache"}.

    The first of tokens - 1 steps reads context + 1 rows of each sequence, the last context + tokens - 1.
    """
    width = BYTES_PER_VALUE[precision]
    rows = context + tokens / 2
    return {
        "weights": shape.parameters_per_step * width,
        "kv_cache": round(batch * rows * shape.cache_values_per_token * width),
    }


def parse_shape(text: str) -> ModelShape:
    """Parse a name of `SHAPES` with optional changes.

    Example: "qwen3-0.6b,num_hidden_layers=2".     ValueError for an unknown name or key, or a value that is
    not a number.
    """
    name, *changes = text.split(",")
    if name not in SHAPES:
        raise ValueError(f"unknown shape {name!r}, expected one of {', '.join(SHAPES)}")
    names = [field.name for field in fields(ModelShape)]
    values: dict[str, int] = {}
    for change in changes:
        key, _, value = change.partition("=")
        if key not in names or not value.isdecimal():
            raise ValueError(f"expected KEY=NUMBER with a key of {', '.join(names)}, got {change!r}")
        values[key] = bool(int(value)) if key == "tie_word_embeddings" else int(value)
    return replace(SHAPES[name], **values)


def write_checkpoint(directory: Path, shape: ModelShape, precision: str, seed: int = 0) -> Path:
    """Write the checkpoint unless the directory has it already; return the directory.

    `precision`: type of the weights.
    """
    config = thinker_config(shape, precision, seed)
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


def thinker_config(shape: ModelShape, precision: str, seed: int) -> dict:
    """Make `config.json`; its key "random" describes the weights."""
    text = asdict(shape)
    tied = text.pop("tie_word_embeddings")
    half = shape.head_dim // 2
    side = half * 5 // 16  # 24, 20 and 20 of 64, as in Qwen3
    return {
        "model_type": MODEL_TYPE,
        "tie_word_embeddings": tied,
        "random": {"precision": precision, "seed": seed},
        "text_config": {
            **text,
            "hidden_act": "silu",
            "max_position_embeddings": MAX_POSITIONS,
            "rms_norm_eps": EPSILON,
            "num_experts": 0,
            "eos_token_id": shape.vocab_size - 1,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": ROPE_THETA,
                "mrope_section": [half - 2 * side, side, side],
                "mrope_interleaved": True,
            },
        },
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
    """Make a random matrix that keeps the scale of its input, or a vector of ones.

    The row of the stop token is 0.
    """
    dtype = DTYPES[precision].numpy()
    if len(shape) == 1:
        return np.ones(shape, dtype)
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
