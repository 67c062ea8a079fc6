# SPDX-License-Identifier: Apache-2.0
"""Configuration of a draft head in `config.json` of an engine directory."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm_ros.echo import quoted
from edgellm_ros.engine_directory.rope_config import RopeConfig, check_heads

EAGLE, MTP, DFLASH = "eagle", "mtp", "dflash"
HEAD_KINDS = (EAGLE, MTP, DFLASH)
NUM_BASE_STATES = 3  # states of a token that an EAGLE-3 head takes


@dataclass(frozen=True)
class DraftConfig:
    """Shape of a draft head, and the limits of the trees that it drafts.

    The head is a small decoder. One of EAGLE-3 or MTP takes the embedding of a token and a state: for a token
    that the base has run, that of the base; for a drafted token, the head's own state of its parent. The
    base's state is the fusion of three layers' for an EAGLE-3 head, and the one after its last norm for an
    MTP head. A block drafter (DFlash) takes the embeddings of a block, the newest token and mask tokens, and
    attends to keys and values that it makes of several layers' states of the base.
    """

    kind: str  # one of HEAD_KINDS
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int  # number of its logits; `draft/d2t.safetensors` has their tokens, if not all in order
    rope: RopeConfig
    # Of EAGLE-3: whose inputs; the number of layers: the last output. Of DFlash: those of the base's outputs
    # `hidden_states_i`. Of MTP: none.
    base_state_layers: tuple[int, ...]
    max_draft_tree_size: int  # most drafted tokens in the head's KV cache, after the committed rows
    max_verify_tree_size: int  # most tokens that the base verifies in one run, the newest one included
    shares_embedding: bool  # takes rows of the base's embedding table; else `draft/embedding.safetensors`
    feeds_back_normed_state: bool  # `next_hidden_states` is the state after the head's last norm
    block_size: int = 0  # of DFlash: rows of a run, with that of the newest token
    mask_token_id: int = 0  # of DFlash: the token of the other rows

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
        if self.kind == DFLASH:
            self._check_block()
        elif self.kind == MTP:
            if layers:
                raise ValueError(f"base_state_layers must be empty for an MTP head, got {list(layers)}")
        elif len(layers) != NUM_BASE_STATES or list(layers) != sorted(set(layers)) or layers[0] < 0:
            raise ValueError(
                f"base_state_layers must be {NUM_BASE_STATES} rising numbers from 0, got {list(layers)}"
            )

    def _check_block(self) -> None:
        layers, most = self.base_state_layers, self.max_draft_tree_size
        if not 2 <= self.block_size <= most:
            raise ValueError(
                f"block_size must be from 2 to max_draft_tree_size {most}, got {self.block_size}"
            )
        if not layers or list(layers) != sorted(set(layers)) or layers[0] < 1:
            raise ValueError(f"base_state_layers must be rising numbers from 1, got {list(layers)}")
        if self.mask_token_id < 0:
            raise ValueError(f"mask_token_id must be a token id, got {self.mask_token_id}")

    def states_of_verification(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        """Return the layers of the outputs `hidden_states_i` of `llm/verify.onnx`.

        layers: those of the language model's graph without drafting.
        """
        return tuple(sorted({*layers, *self.base_state_layers})) if self.kind == DFLASH else layers

    def cache_capacity(self, base_capacity: int) -> int:
        """Return the rows of the head's KV cache of one sequence.

        base_capacity: the rows of the base's cache.
        """
        return base_capacity + self.max_draft_tree_size
