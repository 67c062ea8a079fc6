# SPDX-License-Identifier: Apache-2.0
"""FusedShape: sizes and switches of a decoder that fused kernels are compiled for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgellm_ros.engine_directory.recurrent_config import CHAIN_TOKENS
from edgellm_ros.fused.description.values import ModelValues
from edgellm_ros.fused.plan.quantized import Quantized

DTYPES = ("fp16", "bf16")
Forms = tuple[tuple[str, Quantized], ...]  # of a layer's weights, by kernel
MOST_KINDS = 4  # of layers, by the forms of their weights: kernels are compiled for each
HEAD_DIMS = (64, 96, 128, 256)
MOST_ROWS = 16
MOST_HEADS_PER_KV_HEAD = 16
MOST_LORA_RANK = 64
ACTIVATIONS = SILU, SQUARED_RELU = ("silu", "relu2")
MOST_KEY_DIM = 128  # a lane has half as many values of a recurrent state in registers
MIXER_COLUMNS = 16  # of a recurrent state, per warp
MOST_MIXER_WARPS = 5


@dataclass(frozen=True)
class RecurrentShape:
    """Sizes of the recurrent mixers of a hybrid model.

    All layers with one are of the same kind.
    """

    delta_net: bool  # a gated delta net; otherwise Mamba2
    heads: int
    key_heads: int  # heads that share queries and keys are neighbours; Mamba2: groups
    key_dim: int
    value_dim: int
    conv_kernel: int
    state_columns: int  # columns of a head's state that are side by side in memory
    conv_bias: bool = False

    @property
    def keys(self) -> int:
        """Number of key values of a token."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Number of values of a token."""
        return self.heads * self.value_dim

    @property
    def channels(self) -> int:
        """Number of channels of the convolution."""
        return 2 * self.keys + self.values

    @property
    def in_size(self) -> int:
        """Number of columns of in_proj."""
        return self.channels + self.values + self.heads * (2 if self.delta_net else 1)

    @property
    def norm_groups(self) -> int:
        """Number of norms of a token's result."""
        return self.heads if self.delta_net else self.key_heads

    @property
    def warps(self) -> int:
        """Number of warps of a CTA, which has a head or an equal part of it."""
        columns = self.value_dim // MIXER_COLUMNS
        return next(warps for warps in range(MOST_MIXER_WARPS, 0, -1) if columns % warps == 0)

    def unsupported(self, quantized: bool = False) -> str | None:
        """Return why the kernels do not take this mixer; None if they do.

        quantized: whether in_proj is. Where in_proj fits, the rows of out_proj are a multiple of 64.
        """
        columns = 16 if quantized else 8
        for problem, text in (
            (
                self.key_dim % 32 != 0 or self.key_dim > MOST_KEY_DIM,
                f"key_dim is {self.key_dim}, not a multiple of 32 up to {MOST_KEY_DIM}",
            ),
            (
                self.value_dim % MIXER_COLUMNS != 0,
                f"value_dim is {self.value_dim}, not a multiple of {MIXER_COLUMNS}",
            ),
            (self.heads % self.key_heads != 0, f"{self.heads} heads share {self.key_heads} key heads"),
            (
                self.in_size % columns != 0,
                f"in_proj has {self.in_size} columns, not a multiple of {columns}",
            ),
        ):
            if problem:
                return f"recurrent layers: {text}"
        return None

    def macros(self) -> dict[str, int]:
        """Return the macros' names and values."""
        return {
            "MIXER": 1 if self.delta_net else 2,
            "MIXER_HEADS": self.heads,
            "KEY_HEADS": self.key_heads,
            "KEY_DIM": self.key_dim,
            "VALUE_DIM": self.value_dim,
            "CONV_KERNEL": self.conv_kernel,
            "CONV_BIAS": int(self.conv_bias),
            "STATE_COLUMNS": self.state_columns,
            "MIX_WARPS": self.warps,
            "IN_PROJ_SIZE": self.in_size,
            "CHAIN_TOKENS": CHAIN_TOKENS,
        }


@dataclass(frozen=True)
class FusedShape(ModelValues):
    """Sizes and switches of a decoder.

    It has layers of attention, recurrent mixers and feed-forward blocks.

    - dtype: of weights, embeddings, caches and hidden states, "fp16" or "bf16"
    - fp8_cache: whether the caches have E4M3 instead, which GPUs have from compute capability 8.9 on
    - rotary_dim: R, the first values of a head that are rotated; 0 = the model has no RoPE
    - qk_norm: an RMSNorm of each head's queries and keys before RoPE
    - windows: sliding window of each layer, None = all tokens; empty = all tokens in all layers
    - tied: the LM head is the embedding table [V,H]; otherwise it is [H,head_columns]
    - head_columns: of which the first `vocab` are used; 0 = there are as many
    - head: form of an LM head that is quantised, which is neither tied nor has more columns
    - capacity: C, the rows of the KV cache
    - max_rows: most tokens of a step, of all sequences
    - hidden_state_layers: layers, counted from 1, whose hidden states are outputs
    - last_states: whether `fused_hidden_states` are those after the last norm, for an MTP head
    - lora_rank: largest rank of adapters, 0 = none
    - quantized: forms of quantised weights, by kernel: "qkv", "o", "gate_up", "down", "in_proj", "out_proj"
    - other_kinds: the same of layers with other forms
    - layer_kinds: of each layer: 0 = `quantized`, then those of `other_kinds`; empty = all 0
    - activation: "silu": silu(gate) * up; "relu2": relu(up)^2, without a gate
    - recurrent: of the layers that have a recurrent mixer; None = no layer has
    - attention_layers: how many have attention, each with a KV cache; None = all
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
    last_states: bool = False
    quantized: Forms = ()
    other_kinds: tuple[Forms, ...] = ()
    layer_kinds: tuple[int, ...] = ()
    lora_rank: int = 0
    fp8_cache: bool = False
    recurrent: RecurrentShape | None = None
    attention_layers: int | None = None
    head_columns: int = 0
    head: Quantized | None = None

    @property
    def all_head_columns(self) -> int:
        """Number of columns of an LM head that is not tied."""
        return self.head_columns or self.vocab

    @property
    def caches(self) -> int:
        """Number of layers with a KV cache."""
        return self.layers if self.attention_layers is None else self.attention_layers

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
    def drafts(self) -> bool:
        """Whether this is a draft head, whose LM head has a kernel of its own."""
        return False

    @property
    def kv_size(self) -> int:
        """Number of key values of a token."""
        return self.kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Number of query, gate, key and value values of a token."""
        return (1 + self.attention_gate) * self.q_size + 2 * self.kv_size

    @property
    def gate_up_size(self) -> int:
        """Number of gate and up values of a token."""
        return (1 if self.activation == SQUARED_RELU else 2) * self.inner

    def window(self, layer: int) -> int | None:
        """Return the sliding window of a layer, counted from 0; None = the whole cache."""
        window = self.windows[layer] if self.windows else None
        return window if window is not None and window < self.capacity else None

    def of_each_kind(self) -> tuple[FusedShape, ...]:
        """Return the shapes that programs are compiled for, by kind of layers."""
        kinds = (self.quantized, *self.other_kinds)
        return tuple(replace(self, quantized=forms, other_kinds=(), layer_kinds=()) for forms in kinds)

    def kind(self, layer: int) -> int:
        """Return the kind of a layer: an index of `of_each_kind()`."""
        return self.layer_kinds[layer] if self.layer_kinds else 0

    def forms(self) -> Forms:
        """Return the forms of all quantised weights, the LM head's included."""
        layers = (each for kind in (self.quantized, *self.other_kinds) for each in kind)
        return (*layers, *(() if self.head is None else (("lm_head", self.head),)))

    def form(self, kernel: str) -> Quantized | None:
        """Return the form of a kernel's weights; None if they are of the model's type."""
        return self.head if kernel == "lm_head" else dict(self.quantized).get(kernel)

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
                self.rotary_dim % 2 != 0 or not 0 <= self.rotary_dim <= self.head_dim,
                f"rotary_dim is {self.rotary_dim} with head_dim {self.head_dim}",
            ),
            (self.hidden % 64 != 0, f"the hidden size {self.hidden} is not a multiple of 64"),
            (self.inner % 64 != 0, f"the feed-forward size {self.inner} is not a multiple of 64"),
            (
                not self.tied and self.all_head_columns % 8 != 0,
                f"the LM head has {self.all_head_columns} columns, not a multiple of 8",
            ),
            (
                self.lora_rank > MOST_LORA_RANK,
                f"adapters have ranks of up to {self.lora_rank}, more than {MOST_LORA_RANK}",
            ),
            (not 1 <= self.max_rows <= MOST_ROWS, f"a step has {self.max_rows} rows, more than {MOST_ROWS}"),
            (
                self.last_states and self.layers in self.hidden_state_layers,
                "the states after the last norm are an output twice",
            ),
            (
                len(self.other_kinds) >= MOST_KINDS,
                f"layers are quantised in {1 + len(self.other_kinds)} different ways, more than {MOST_KINDS}",
            ),
            (
                self.lora_rank > 0 and (self.recurrent is not None or self.attention_gate),
                "layers are recurrent or gated, and sequences have adapters",
            ),
        ):
            if problem:
                return text
        mixer = None
        if self.recurrent is not None:
            mixer = self.recurrent.unsupported(any(name == "in_proj" for name, _ in self.forms()))
        return mixer or next(filter(None, (form.unsupported() for _, form in self.forms())), None)


@dataclass(frozen=True)
class FusedDraftShape(FusedShape):
    """Sizes and switches of a draft head with an LM head [H,V] of its own.

    - norm_before_residual: the residual stream begins with the normed states
    - feeds_back_normed_state: the next states are those after the last norm
    - joined: the kernels of the first layer of EAGLE-3, whose qkv has 2H inputs; False: those of the layers
      after it, and of an MTP head
    """

    norm_before_residual: bool = False
    feeds_back_normed_state: bool = False
    joined: bool = True

    @property
    def drafts(self) -> bool:
        return True

    def unsupported(self) -> str | None:
        if self.tied:
            return "the LM head is the embedding table"
        return super().unsupported()
