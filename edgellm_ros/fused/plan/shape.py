# SPDX-License-Identifier: Apache-2.0
"""FusedShape: sizes and switches of a decoder that fused kernels are compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm_ros.fused.description.values import ModelValues
from edgellm_ros.fused.plan.quantized import Quantized

DTYPES = ("fp16", "bf16")
HEAD_DIMS = (64, 96, 128, 256)
MOST_ROWS = 16
MOST_HEADS_PER_KV_HEAD = 16
MOST_LORA_RANK = 64
ACTIVATIONS = ("silu",)


@dataclass(frozen=True)
class FusedShape(ModelValues):
    """Sizes and switches of a decoder of attention and gated feed-forward blocks.

    - dtype: of weights, embeddings, caches and hidden states, "fp16" or "bf16"
    - fp8_cache: whether the caches have E4M3 instead, which GPUs have from compute capability 8.9 on
    - rotary_dim: R, the first values of a head that are rotated
    - qk_norm: an RMSNorm of each head's queries and keys before RoPE
    - windows: sliding window of each layer, None = all tokens; empty = all tokens in all layers
    - tied: the LM head is the embedding table [V,H]; otherwise it is [H,V]
    - capacity: C, the rows of the KV cache
    - max_rows: most tokens of a step, of all sequences
    - hidden_state_layers: layers, counted from 1, whose hidden states are outputs
    - lora_rank: largest rank of adapters, 0 = none
    - quantized: forms of quantised weights, by kernel: "qkv", "o", "gate_up", "down"; the same in all layers
    """

    dtype: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    rotary_dim: int
    capacity: int
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    windows: tuple[int | None, ...] = ()
    tied: bool = False
    max_rows: int = 1
    hidden_state_layers: tuple[int, ...] = ()
    quantized: tuple[tuple[str, Quantized], ...] = ()
    lora_rank: int = 0
    fp8_cache: bool = False

    @property
    def q_size(self) -> int:
        """Number of query values of a token."""
        return self.heads * self.head_dim

    @property
    def joined(self) -> bool:
        """Whether the first layer's x is the norms of embedding and state side by side.

        See `FusedDraftShape`.
        """
        return False

    @property
    def kv_size(self) -> int:
        """Number of key values of a token."""
        return self.kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Number of query, key and value values of a token."""
        return self.q_size + 2 * self.kv_size

    def window(self, layer: int) -> int | None:
        """Return the sliding window of a layer, counted from 0; None = the whole cache."""
        window = self.windows[layer] if self.windows else None
        return window if window is not None and window < self.capacity else None

    def form(self, kernel: str) -> Quantized | None:
        """Return the form of a kernel's weights; None if they are of the model's type."""
        return dict(self.quantized).get(kernel)

    def unsupported(self) -> str | None:
        """Return why the kernels do not take this shape; None if they do."""
        ratio = self.heads // self.kv_heads if self.kv_heads else 0
        for problem, text in (
            (self.dtype not in DTYPES, f"weights are {self.dtype}, not {' or '.join(DTYPES)}"),
            (self.activation not in ACTIVATIONS, f"the activation is {self.activation}"),
            (self.head_dim not in HEAD_DIMS, f"head_dim is {self.head_dim}, not one of {HEAD_DIMS}"),
            (
                not ratio or self.heads % self.kv_heads != 0 or ratio > MOST_HEADS_PER_KV_HEAD,
                f"{self.heads} heads share {self.kv_heads} KV heads",
            ),
            (
                self.rotary_dim % 2 != 0 or not 0 < self.rotary_dim <= self.head_dim,
                f"rotary_dim is {self.rotary_dim} with head_dim {self.head_dim}",
            ),
            (self.hidden % 64 != 0, f"the hidden size {self.hidden} is not a multiple of 64"),
            (self.inner % 64 != 0, f"the feed-forward size {self.inner} is not a multiple of 64"),
            (
                not self.tied and self.vocab % 8 != 0,
                f"the LM head has {self.vocab} columns, not a multiple of 8",
            ),
            (
                self.lora_rank > MOST_LORA_RANK,
                f"adapters have ranks of up to {self.lora_rank}, more than {MOST_LORA_RANK}",
            ),
            (not 1 <= self.max_rows <= MOST_ROWS, f"a step has {self.max_rows} rows, more than {MOST_ROWS}"),
        ):
            if problem:
                return text
        return next(filter(None, (form.unsupported() for _, form in self.quantized)), None)


@dataclass(frozen=True)
class FusedDraftShape(FusedShape):
    """Sizes and switches of a draft head with an LM head [H,V] of its own.

    - norm_before_residual: the residual stream begins with the normed states
    - feeds_back_normed_state: the next states are those after the last norm
    - joined: the kernels of the first layer, whose qkv has 2H inputs; False: those of the layers after it
    """

    norm_before_residual: bool = False
    feeds_back_normed_state: bool = False
    joined: bool = True

    def unsupported(self) -> str | None:
        if self.tied:
            return "the LM head is the embedding table"
        return super().unsupported()
