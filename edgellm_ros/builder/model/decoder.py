# SPDX-License-Identifier: Apache-2.0
"""A decoder as a list of layers, each a list of residual blocks.

    x -+- norm -- block --(+)-- x
       +------------------+

A layer of Llama has two: attention, and a feed-forward block. A layer of Nemotron-H has one of any kind. The
lowerings (`builder/lowering/`) turn each kind of block into nodes of a graph, or into a launch of the fused
kernels; a family only says which blocks its layers have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgellm_ros.builder.model.recurrent import DeltaNet, Mamba2
from edgellm_ros.engine_directory.language_model_config import LanguageModelConfig


@dataclass(frozen=True)
class RMSNorm:
    """What the RMSNorms of a decoder have in common: x / rms(x) * (shift + weight)."""

    epsilon: float
    shift: float = 0.0  # added to the weight; unless 0, a standard graph computes scale and norm in fp32


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Grouped-query attention over a KV cache.

    Heads and their sizes are those of the decoder's `config`, as the runtime has one shape for all caches.
    """

    inputs: int | None = None  # width of its input; None = hidden_size
    qkv_bias: bool = False
    output_bias: bool = False  # of o_proj
    head_norms: bool = False  # q_norm and k_norm: an RMSNorm of each head, before RoPE
    rope: bool = True
    gated: bool = False  # q_proj has a gate beside each head's query; sigmoid(gate) multiplies the result
    window: int | None = None  # a token attends to itself and the window - 1 tokens before it; None = to all

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"a sliding window must be at least 1, got {self.window}")

    def window_in(self, capacity: int) -> int | None:
        """Return the sliding window; None if it sees all of a cache of `capacity`."""
        return self.window if self.window is not None and self.window < capacity else None

    def widths(self, config: LanguageModelConfig) -> dict[str, int]:
        """Return the widths of the layers that read the input, by name."""
        queries, keys = (
            count * config.head_dim for count in (config.num_attention_heads, config.num_key_value_heads)
        )
        return {"q_proj": 2 * queries if self.gated else queries, "k_proj": keys, "v_proj": keys}


@dataclass(frozen=True)
class SwiGLU:
    """Feed-forward block of Llama and Qwen: down(silu(gate(x)) up(x))."""

    inner: int
    bias: bool = False


@dataclass(frozen=True)
class SquaredReLU:
    """Feed-forward block of Nemotron: down(relu(up(x))^2)."""

    inner: int
    bias: bool = False


FeedForward = SwiGLU | SquaredReLU  # each token alone
Block = Attention | DeltaNet | Mamba2 | FeedForward


@dataclass(frozen=True)
class Residual:
    """x + block(norm(x)), with the names that norm and block have in the layer."""

    norm: str
    module: str
    block: Block


Layer = tuple[Residual, ...]


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The language model of a checkpoint, without its LM head."""

    config: LanguageModelConfig  # for the runtime
    layers: tuple[Layer, ...]
    norm: RMSNorm
    prefix: str = "model"  # of the tensors, such as "model.language_model"
    last_norm: str = "norm"  # name of the norm after the layers
    table: str = "embed_tokens"  # name of the embedding table's module

    def __post_init__(self) -> None:
        if len(self.layers) != self.config.num_hidden_layers:
            raise ValueError(
                f"expected num_hidden_layers {self.config.num_hidden_layers}, got {len(self.layers)} layers"
            )

    @property
    def embedding(self) -> str:
        """Return the name of the embedding table's tensor [V,H]."""
        return f"{self.prefix}.{self.table}.weight"

    @property
    def blocks(self) -> list[Block]:
        """Return the blocks of all layers in their order."""
        return [residual.block for layer in self.layers for residual in layer]

    @property
    def has_rope(self) -> bool:
        """Return whether any layer has RoPE."""
        return any(isinstance(block, Attention) and block.rope for block in self.blocks)


def transformer_layer(mixer: Residual, feed_forward: FeedForward) -> Layer:
    """Make a layer of Llama's form: a mixer and a feed-forward block."""
    return mixer, Residual("post_attention_layernorm", "mlp", feed_forward)


def attention_layer(attention: Attention, feed_forward: FeedForward) -> Layer:
    """Make a layer of Llama's form with attention."""
    return transformer_layer(Residual("input_layernorm", "self_attn", attention), feed_forward)


def attention_layers(
    windows: Sequence[int | None],
    feed_forward: FeedForward,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    head_norms: bool = False,
) -> tuple[Layer, ...]:
    """Make Llama's layers, with the switches of the families that share them.

    windows: the sliding window of each layer, None = full attention.
    """
    return tuple(
        attention_layer(
            Attention(qkv_bias=qkv_bias, output_bias=output_bias, head_norms=head_norms, window=window),
            feed_forward,
        )
        for window in windows
    )
