# SPDX-License-Identifier: Apache-2.0
"""`config.json` of the text model in a GGUF file.

Dense decoders, and what all architectures have.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edgellm_ros.builder.gguf.keys import Keys
from edgellm_ros.builder.gguf.names import ROPE_FACTORS

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def dense_config(keys: Keys) -> dict[str, Any]:
    """Make the configuration of layers with attention and SwiGLU.

    ValueError, which names file and key, for a key that is missing or not supported.
    """
    heads, theta = keys.integer("attention.head_count"), keys.number("rope.freq_base", 10000.0)
    head_dim = read_head_dim(keys, heads)
    if keys.integer("rope.dimension_count", head_dim) != head_dim:
        raise keys.fail("rope.dimension_count", f"expected {head_dim}, the size of a key")
    config = {
        **shared_config(keys),
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
    }
    scaling = _rope_scaling(keys, head_dim, theta)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config


def biased_config(keys: Keys) -> dict[str, Any]:
    """Make the configuration of a model whose attention may have biases."""
    return {**dense_config(keys), "attention_bias": "blk.0.attn_q.bias" in keys.file.tensors}


def shared_config(keys: Keys) -> dict[str, Any]:
    """Make the part of the configuration that does not depend on the layers."""
    if keys.integer("expert_count", 0, least=0):
        raise keys.fail("expert_count", "mixtures of experts are not supported")
    tensors = keys.file.tensors
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ValueError(f"{keys.file.path}: tensor 'token_embd.weight' is missing or no matrix")
    config: dict[str, Any] = {
        "hidden_size": keys.integer("embedding_length"),
        "max_position_embeddings": keys.integer("context_length"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    for token in ("bos", "eos"):
        number = keys.file.keys.get(f"tokenizer.ggml.{token}_token_id")
        if isinstance(number, int):
            config[f"{token}_token_id"] = number
    return config


def read_head_dim(keys: Keys, heads: int) -> int:
    """Read the size of keys, which values must have too."""
    hidden = keys.integer("embedding_length")
    if heads > hidden:
        raise keys.fail("attention.head_count", f"more than embedding_length {hidden}")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise keys.fail("attention.value_length", f"expected {head_dim}, the size of a key")
    return head_dim


def mrope_section(keys: Keys) -> list[int]:
    """Read how many rotated pairs belong to time, height and width."""
    key = "rope.dimension_sections"
    sections = keys.integers(key)
    if len(sections) not in (3, 4) or any(sections[3:]):
        raise keys.fail(key, "expected numbers of pairs for time, height and width, and a 0")
    return sections[:3]


def no_rope_scaling(keys: Keys) -> None:
    """Raise ValueError if a file scales RoPE."""
    if keys.text("rope.scaling.type", "none") != "none" or ROPE_FACTORS in keys.file.tensors:
        raise keys.fail("rope.scaling.type", f"{keys.prefix} is supported without scaling of RoPE")


def _rope_scaling(keys: Keys, head_dim: int, theta: float) -> dict[str, Any] | None:
    """Return RoPE's scaling: linear, or that of Llama 3, whose factors are a tensor."""
    kind = keys.text("rope.scaling.type", "none")
    factors = keys.file.tensors.get(ROPE_FACTORS)
    if factors is not None:
        if kind not in ("none", "llama3") or factors.type.name != "F32" or factors.shape != (head_dim // 2,):
            raise ValueError(
                f"{keys.file.path}: tensor {ROPE_FACTORS!r}: supported are factors [{head_dim // 2}] of "
                f"Llama 3 in F32 beside no other scaling"
            )
        with factors.file.open("rb") as file:
            file.seek(factors.offset)
            return _llama3(keys, np.fromfile(file, np.float32, head_dim // 2), theta)
    if kind == "none":
        return None
    if kind != "linear":
        raise keys.fail("rope.scaling.type", "supported: none, linear, Llama 3's factors")
    return {"rope_type": "linear", "factor": keys.number("rope.scaling.factor")}


def _llama3(keys: Keys, factors: np.ndarray, theta: float) -> dict[str, Any]:
    """Return the scaling whose factors a file has.

    The largest factor is that of the lowest frequencies.
    """
    scaling = {"rope_type": "llama3", "factor": float(factors.max()), **LLAMA3}
    if not np.allclose(factors, llama3_factors(2 * len(factors), theta, scaling), rtol=1e-4, atol=0):
        raise ValueError(f"{keys.file.path}: tensor {ROPE_FACTORS!r}: no factors of Llama 3")
    return scaling


def llama3_factors(head_dim: int, theta: float, scaling: dict[str, Any]) -> np.ndarray:
    """Compute what Llama 3's scaling divides the frequencies by, [head_dim/2].

    Source: transformers, modeling_rope_utils.py.
    """
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    length, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    smooth = np.clip((length / wavelengths - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)
