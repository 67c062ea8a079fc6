# SPDX-License-Identifier: Apache-2.0
"""`config.json` of a GGUF file."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgellm_ros.builder.gguf.names import ROPE_FACTORS
from edgellm_ros.builder.gguf.reader import GgufFile
from edgellm_ros.echo import quoted

QUANTISATION = {"quant_method": "gguf"}
MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # by `general.architecture`
PAIRED = ("llama",)  # files with queries and keys in pairs of rows
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def make_config(file: GgufFile) -> dict[str, Any]:
    """Make the configuration of a text model.

    ValueError, which names file and key, for an architecture that is not supported and for a key that is
    missing or of another type.
    """
    return _Keys(file).config()


class _Keys:
    """The keys of a file that describe its model."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._name = self._text("general.architecture")
        if self._name not in MODEL_TYPES:
            supported = ", ".join(MODEL_TYPES)
            raise self._fail("general.architecture", f"supported: {supported}")

    def config(self) -> dict[str, Any]:
        own, architecture = self._own, self._name
        heads, hidden = own("attention.head_count"), own("embedding_length")
        if heads > hidden:
            raise self._fail(f"{architecture}.attention.head_count", f"more than embedding_length {hidden}")
        head_dim = own("attention.key_length", hidden // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if own(key, head_dim) != head_dim:
                raise self._fail(f"{architecture}.{key}", f"expected {head_dim}, the size of a key")
        if own("expert_count", 0, least=0):
            raise self._fail(f"{architecture}.expert_count", "mixtures of experts are not supported")
        tensors = self._file.tensors
        embedding = tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise ValueError(f"{self._file.path}: tensor 'token_embd.weight' is missing or no matrix")
        theta = self._float("rope.freq_base", 10000.0)
        config: dict[str, Any] = {
            "model_type": MODEL_TYPES[architecture],
            "hidden_size": hidden,
            "intermediate_size": own("feed_forward_length"),
            "num_hidden_layers": own("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": own("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": own("context_length"),
            "rms_norm_eps": self._float("attention.layer_norm_rms_epsilon"),
            "rope_theta": theta,
            "vocab_size": embedding.shape[0],
            "tie_word_embeddings": "output.weight" not in tensors,
        }
        if any(name.startswith("blk.") and each.type.unpack for name, each in tensors.items()):
            config["quantization_config"] = QUANTISATION
        scaling = self._rope_scaling(head_dim, theta)
        if scaling is not None:
            config["rope_scaling"] = scaling
        for token in ("bos", "eos"):
            number = self._file.keys.get(f"tokenizer.ggml.{token}_token_id")
            if isinstance(number, int):
                config[f"{token}_token_id"] = number
        if architecture == "llama":
            config["attention_bias"] = "blk.0.attn_q.bias" in tensors
        return config

    def _rope_scaling(self, head_dim: int, theta: float) -> dict[str, Any] | None:
        """Return RoPE's scaling: linear, or that of Llama 3, whose factors are a tensor."""
        kind = self._file.keys.get(f"{self._name}.rope.scaling.type", "none")
        factors = self._file.tensors.get(ROPE_FACTORS)
        if factors is not None:
            if (
                kind not in ("none", "llama3")
                or factors.type.name != "F32"
                or factors.shape != (head_dim // 2,)
            ):
                raise ValueError(
                    f"{self._file.path}: tensor {ROPE_FACTORS!r}: supported are factors [{head_dim // 2}] of "
                    f"Llama 3 in F32 beside no other scaling"
                )
            with factors.file.open("rb") as file:
                file.seek(factors.offset)
                return self._llama3(np.fromfile(file, np.float32, head_dim // 2), theta)
        if kind == "none":
            return None
        if kind != "linear":
            raise self._fail(f"{self._name}.rope.scaling.type", "supported: none, linear, Llama 3's factors")
        return {"rope_type": "linear", "factor": self._float("rope.scaling.factor")}

    def _llama3(self, factors: np.ndarray, theta: float) -> dict[str, Any]:
        """Return the scaling whose factors a file has.

        The largest factor is that of the lowest frequencies.
        """
        scaling = {"rope_type": "llama3", "factor": float(factors.max()), **LLAMA3}
        if not np.allclose(factors, llama3_factors(2 * len(factors), theta, scaling), rtol=1e-4, atol=0):
            raise ValueError(f"{self._file.path}: tensor {ROPE_FACTORS!r}: no factors of Llama 3")
        return scaling

    def _own(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Return an integer of the architecture's own keys."""
        name = f"{self._name}.{key}"
        value = self._file.keys.get(name, default)
        if value is None:
            raise ValueError(f"{self._file.path}: key {name!r} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 31:
            raise self._fail(name, f"expected an integer from {least}")
        return value

    def _float(self, key: str, default: float | None = None) -> float:
        """Return a number of 32 bits as the shortest decimal that stands for it."""
        name = f"{self._name}.{key}"
        value = self._file.keys.get(name, default)
        if value is None:
            raise ValueError(f"{self._file.path}: key {name!r} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise self._fail(name, "expected a positive number")
        return float(str(np.float32(value)))

    def _text(self, key: str) -> str:
        value = self._file.keys.get(key)
        if not isinstance(value, str):
            raise ValueError(f"{self._file.path}: key {key!r}: expected a string, got {quoted(value)}")
        return value

    def _fail(self, key: str, reason: str) -> ValueError:
        return ValueError(f"{self._file.path}: {key} {quoted(self._file.keys.get(key))}: {reason}")


def llama3_factors(head_dim: int, theta: float, scaling: dict[str, Any]) -> np.ndarray:
    """Compute what Llama 3's scaling divides the frequencies by, [head_dim/2].

    Source: transformers, modeling_rope_utils.py.
    """
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    length, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    smooth = np.clip((length / wavelengths - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)
