# SPDX-License-Identifier: Apache-2.0
"""Shape of the language model of an engine directory."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm_ros.engine_directory.recurrent_config import ATTENTION, LAYER_TYPES, RECURRENT, RecurrentConfig
from edgellm_ros.engine_directory.rope_config import RopeConfig, check_heads


@dataclass(frozen=True)
class LanguageModelConfig:
    """Shape of the language model."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    reduced_vocab_size: int  # number of logits, for the tokens in `vocab_map.safetensors`; 0 = all tokens
    max_position_embeddings: int
    num_deepstack_features: int
    rope: RopeConfig
    layer_types: tuple[str, ...] = ()  # of each layer, one of LAYER_TYPES; empty = attention in all
    recurrent: RecurrentConfig | None = None  # None if no layer is recurrent

    @property
    def output_vocab_size(self) -> int:
        """Return the number of logits."""
        return self.reduced_vocab_size or self.vocab_size

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Return the layers with a KV cache, in the order of the caches.

        Layers count from 0.
        """
        types = self.layer_types or (ATTENTION,) * self.num_hidden_layers
        return tuple(layer for layer, kind in enumerate(types) if kind == ATTENTION)

    @property
    def num_attention_layers(self) -> int:
        """Return the number of layers with a KV cache."""
        return len(self.attention_layers)

    @property
    def num_recurrent_layers(self) -> int:
        return self.layer_types.count(RECURRENT)

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "vocab_size",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        check_heads(self.num_attention_heads, self.num_key_value_heads, self.head_dim, self.rope)
        if not 0 <= self.reduced_vocab_size <= self.vocab_size:
            raise ValueError(
                f"reduced_vocab_size must be from 0 to vocab_size {self.vocab_size}, "
                f"got {self.reduced_vocab_size}"
            )
        if self.num_deepstack_features < 0:
            raise ValueError(
                f"num_deepstack_features must not be negative, got {self.num_deepstack_features}"
            )
        self._check_layer_types()

    def _check_layer_types(self) -> None:
        types, layers = self.layer_types, self.num_hidden_layers
        if types and len(types) != layers:
            raise ValueError(f"layer_types has {len(types)} entries, but num_hidden_layers is {layers}")
        for name in types:
            if name not in LAYER_TYPES:
                raise ValueError(f"layer_types must be of {', '.join(LAYER_TYPES)}, got {name!r}")
        if not self.num_attention_layers:
            raise ValueError("layer_types must have an attention layer: models without one are not supported")
        expected = self.recurrent.num_layers if self.recurrent else 0
        if self.num_recurrent_layers != expected:
            raise ValueError(
                f"layer_types has {self.num_recurrent_layers} recurrent layers, but recurrent has {expected}"
            )
