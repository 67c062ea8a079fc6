# SPDX-License-Identifier: Apache-2.0
"""Sizes of published text models, and of models like them.

Source of the numbers: the models' public `config.json`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import Any

BYTES_PER_VALUE = {"fp16": 2, "bf16": 2, "fp32": 4}
FLAGS = ("tie_word_embeddings",)

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a dense decoder, named as in its configuration."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 128
    vocab_size: int = 151936
    tie_word_embeddings: bool = True
    model_type: str = "qwen3"
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 1e6}
    )

    def __post_init__(self) -> None:
        if self.vocab_size < 257:
            raise ValueError(
                f"vocab_size must be at least 257 (256 bytes and a stop token), got {self.vocab_size}"
            )

    def layer(self) -> Shapes:
        """Return name and shape of each tensor of one layer."""
        hidden, inner, size = self.hidden_size, self.intermediate_size, self.head_dim
        q, kv = self.num_attention_heads * size, self.num_key_value_heads * size
        shapes: Shapes = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, q),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        if self.model_type == "qwen3":
            shapes |= {"self_attn.q_norm.weight": (size,), "self_attn.k_norm.weight": (size,)}
        if self.model_type == "qwen2":
            biases = {"q": q, "k": kv, "v": kv}
            shapes |= {f"self_attn.{name}_proj.bias": (width,) for name, width in biases.items()}
        return shapes

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

    @property
    def state_bytes(self) -> int:
        """Return 0: there is no recurrent state."""
        return 0


def _llama(*sizes: int, factor: float = 0, theta: float = 5e5, **others: Any) -> ModelShape:
    """Make a shape of the family of Llama.

    factor: of Llama 3's scaled RoPE, 0 = plain RoPE.
    """
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if factor:
        rope |= {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope["original_max_position_embeddings"] = 8192
    return ModelShape(*sizes, model_type="llama", rms_norm_eps=1e-5, rope_parameters=rope, **others)


QWEN25_0_5B = ModelShape(896, 4864, 24, 14, 2, 64, model_type="qwen2")
QWEN3_0_6B = ModelShape(1024, 3072, 28, 16, 8)
SHAPES = {
    "qwen2.5-0.5b": QWEN25_0_5B,
    "qwen2.5-1.5b": ModelShape(1536, 8960, 28, 12, 2, model_type="qwen2"),
    "qwen2.5-3b": ModelShape(2048, 11008, 36, 16, 2, model_type="qwen2"),
    "qwen2.5-7b": ModelShape(3584, 18944, 28, 28, 4, 128, 152064, False, model_type="qwen2"),
    "qwen3-0.6b": QWEN3_0_6B,
    "qwen3-1.7b": replace(QWEN3_0_6B, hidden_size=2048, intermediate_size=6144),
    "qwen3-4b": ModelShape(2560, 9728, 36, 32, 8),
    "qwen3-8b": ModelShape(4096, 12288, 36, 32, 8, tie_word_embeddings=False),
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, 8, 64, 128256, factor=32),
    "llama-3.2-3b": _llama(3072, 8192, 28, 24, 8, 128, 128256, factor=32),
    "llama-3.1-8b": _llama(4096, 14336, 32, 32, 8, 128, 128256, factor=8, tie_word_embeddings=False),
    "smollm2-135m": _llama(576, 1536, 30, 9, 3, 64, 49152, theta=1e5),
    "smollm2-1.7b": _llama(2048, 8192, 24, 32, 32, 64, 49152, theta=1.3e5),
}


def parse_shape(text: str) -> ModelShape:
    """Parse a name of `SHAPES` with optional changes of sizes.

    Example: "qwen3-0.6b,num_hidden_layers=2". ValueError for an unknown name or key, or a value that is not a
    number.
    """
    name, *changes = text.split(",")
    if name not in SHAPES:
        raise ValueError(f"unknown shape {name!r}, expected one of {', '.join(SHAPES)}")
    names = [each.name for each in fields(ModelShape) if each.type in ("int", "bool")]
    values: dict[str, int] = {}
    for change in changes:
        key, _, value = change.partition("=")
        if key not in names or not value.isdecimal():
            raise ValueError(f"expected KEY=NUMBER with a key of {', '.join(names)}, got {change!r}")
        values[key] = bool(int(value)) if key in FLAGS else int(value)
    return replace(SHAPES[name], **values)


def add_shape(
    parser: argparse._ActionsContainer,
    parse: Callable[[str], Any] = parse_shape,
    names: Iterable[str] = SHAPES,
    default: str = "qwen3-0.6b",
) -> None:
    """Add the option --shape; names: those that `parse` knows, for the help."""

    def checked(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    parser.add_argument(
        "--shape",
        type=checked,
        default=default,
        metavar="NAME[,KEY=NUMBER...]",
        help=f"{', '.join(names)}, with changes such as hidden_size=64 (default: %(default)s)",
    )
