# SPDX-License-Identifier: Apache-2.0
"""All that the language model's runner has to know, in one place: shape, limits and tokens of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm_ros.engine_directory.config import EngineConfig, RopeConfig


@dataclass(frozen=True)
class LLMEngineRunnerConfig:
    """Taken together from the sections of `config.json`, where each value was checked.

    Lengths in tokens. reduced_vocab_size 0: logits for the whole vocabulary. hidden_state_layers: whose
    hidden states the engine puts out. max_supported_lora_rank 0: no adapters. audio_token_id,
    image_token_id: placeholders of encoder rows in a prompt, None where the checkpoint has none.
    """

    rope_config: RopeConfig
    num_decoder_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    max_supported_batch_size: int
    max_supported_input_length: int
    max_kv_cache_capacity: int
    vocab_size: int
    reduced_vocab_size: int
    hidden_state_layers: tuple[int, ...]
    max_supported_lora_rank: int
    num_deepstack_features: int
    audio_token_id: int | None
    image_token_id: int | None

    @classmethod
    def from_engine(cls, config: EngineConfig) -> LLMEngineRunnerConfig:
        """From the configuration of an engine directory."""
        llm, builder, tokens = config.llm, config.builder, config.special_tokens
        return cls(
            rope_config=llm.rope,
            num_decoder_layers=llm.num_hidden_layers,
            num_kv_heads=llm.num_key_value_heads,
            head_dim=llm.head_dim,
            hidden_size=llm.hidden_size,
            max_supported_batch_size=builder.max_batch_size,
            max_supported_input_length=builder.max_input_len,
            max_kv_cache_capacity=builder.max_kv_cache_capacity,
            vocab_size=llm.vocab_size,
            reduced_vocab_size=llm.reduced_vocab_size,
            hidden_state_layers=builder.hidden_state_layers,
            max_supported_lora_rank=builder.max_lora_rank,
            num_deepstack_features=llm.num_deepstack_features,
            audio_token_id=tokens.audio_token_id,
            image_token_id=tokens.image_token_id,
        )

    @property
    def output_vocab_size(self) -> int:
        """How many logits there are."""
        return self.reduced_vocab_size or self.vocab_size

    @property
    def use_context_dependent_rope(self) -> bool:
        """Whether a token's position depends on the images and sounds before it (mRoPE)."""
        return bool(self.rope_config.mrope_section)

    @property
    def rotary_dim(self) -> int:
        """How many values of a head are rotated: all of them."""
        return self.head_dim

    @property
    def num_attention_layers(self) -> int:
        """How many layers have a KV cache: all of them."""
        return self.num_decoder_layers
