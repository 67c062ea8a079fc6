# SPDX-License-Identifier: Apache-2.0
"""Configuration of a draft head in `config.json` of an engine directory."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm_ros.echo import quoted
from edgellm_ros.engine_directory.rope_config import RopeConfig, check_heads

EAGLE, MTP = "eagle", "mtp"
HEAD_KINDS = (EAGLE, MTP)
NUM_BASE_STATES = 3  # states of a token that an EAGLE-3 head takes


@dataclass(frozen=True)
class DraftConfig:
    """Shape of a draft head, and the limits of the trees that it drafts.

    The head is a small decoder. It takes the embedding of a token and a state: for a token that the base has
    run, that of the base; for a drafted token, the head's own state of its parent. The base's state is the
    fusion of three layers' for an EAGLE-3 head, and the one after its last norm for an MTP head.
    """

    kind: str  # one of HEAD_KINDS
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int  # number of its logits; `draft/d2t.safetensors` has their tokens, if not all in order
    rope: RopeConfig
    base_state_layers: tuple[int, ...]  # of EAGLE-3: whose inputs; the number of layers: the last output
    max_draft_tree_size: int  # most drafted tokens in the head's KV cache, after the committed rows
    max_verify_tree_size: int  # most tokens that the base verifies in one run, the newest one included
    shares_embedding: bool  # takes rows of the base's embedding table; else `draft/embedding.safetensors`
    feeds_back_normed_state: bool  # `next_hidden_states` is the state after the head's last norm

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "num_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "vocab_size",
            "max_draft_tree_size",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_verify_tree_size < 2:
            raise ValueError(f"max_verify_tree_size must be at least 2, got {self.max_verify_tree_size}")
        check_heads(self.num_attention_heads, self.num_key_value_heads, self.head_dim, self.rope)
        if self.kind not in HEAD_KINDS:
            raise ValueError(f"kind must be one of {', '.join(HEAD_KINDS)}, got {quoted(self.kind)}")
        layers = self.base_state_layers
        if self.kind == MTP:
            if layers:
                raise ValueError(f"base_state_layers must be empty for an MTP head, got {list(layers)}")
        elif len(layers) != NUM_BASE_STATES or list(layers) != sorted(set(layers)) or layers[0] < 0:
            raise ValueError(
                f"base_state_layers must be {NUM_BASE_STATES} rising numbers from 0, got {list(layers)}"
            )

    def cache_capacity(self, base_capacity: int) -> int:
        """Return the rows of the head's KV cache of one sequence.

        base_capacity: the rows of the base's cache.
        """
        return base_capacity + self.max_draft_tree_size
