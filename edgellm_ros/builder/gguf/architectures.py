# SPDX-License-Identifier: Apache-2.0
"""Architectures of GGUF files: configuration, names, changes, vision towers.

A file alone is a text model, and `model_type` is that of the text. With a tower it is a whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from edgellm_ros.builder.checkpoint.safetensors_file import StoredTensor
from edgellm_ros.builder.gguf import changes, names
from edgellm_ros.builder.gguf.config import biased_config, dense_config, mrope_section
from edgellm_ros.builder.gguf.hybrids import nemotron_h_config, own_layers, qwen35_config
from edgellm_ros.builder.gguf.keys import Keys, architecture
from edgellm_ros.builder.gguf.reader import GgufFile, TensorPlace
from edgellm_ros.builder.gguf.tensors import GgufTensor
from edgellm_ros.builder.gguf.vision import CLIP, QWEN2_5_VL, QWEN3_VL, Tower

TEXT_PREFIX = "model.language_model"  # of the decoder's names in a whole model
IMAGE_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
QUANTISATION = {"quant_method": "gguf"}


@dataclass(frozen=True)
class Architecture:
    """How files of an architecture become a checkpoint."""

    model_type: str  # of the text alone
    config: Callable[[Keys], dict[str, Any]] = dense_config
    names: names.Names = names.DENSE
    change: Callable[[Keys, TensorPlace], changes.Change] = changes.no_change
    projectors: Mapping[str, str] = field(default_factory=dict)  # of towers -> `model_type` of the whole


ARCHITECTURES = {
    "llama": Architecture("llama", biased_config, change=changes.llama_change),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", biased_config),
    "qwen2vl": Architecture("qwen2", projectors={QWEN2_5_VL: "qwen2_5_vl"}),
    "qwen3vl": Architecture("qwen3", biased_config, projectors={QWEN3_VL: "qwen3_vl"}),
    "qwen35": Architecture(
        "qwen3_5_text", qwen35_config, names.QWEN35, changes.qwen35_change, {QWEN3_VL: "qwen3_5"}
    ),
    "nemotron_h": Architecture("nemotron_h", nemotron_h_config, names.NEMOTRON_H, changes.nemotron_h_change),
}


def find_architecture(file: GgufFile) -> Architecture:
    """Return the architecture of a text model; ValueError if it is not supported."""
    name, supported = architecture(file), ", ".join(ARCHITECTURES)
    if name == CLIP:
        reason = "a vision tower: give its language model, and this file with --mmproj"
        raise Keys(file, "general").fail("architecture", reason)
    if name not in ARCHITECTURES:
        raise Keys(file, "general").fail("architecture", f"supported: {supported}")
    return ARCHITECTURES[name]


def make_config(file: GgufFile, tower: Tower | None, tokens: list[str]) -> dict[str, Any]:
    """Make `config.json` of a model, with its tower if it has one.

    tokens: the vocabulary. ValueError, which names file and key, for what is missing or not supported.
    """
    found, keys = find_architecture(file), Keys(file, architecture(file))
    text, places = found.config(keys), file.tensors
    config = {"model_type": found.model_type, **text}
    if tower is not None:
        rope = {"rope_type": "default", **text.get("rope_scaling", {}), "mrope_section": mrope_section(keys)}
        config = {
            "model_type": found.projectors[tower.projector],
            "tie_word_embeddings": text["tie_word_embeddings"],
            "text_config": {**text, "rope_scaling": rope},
            "vision_config": tower.config,
        }
        for key, token in IMAGE_TOKENS.items():
            if token not in tokens:
                raise Keys(file, "tokenizer.ggml").fail("tokens", f"expected {token!r}, which images need")
            config[key] = tokens.index(token)
    if any(name.startswith("blk.") and each.type.unpack for name, each in places.items()):
        config["quantization_config"] = QUANTISATION
    return config


def text_tensors(file: GgufFile, whole: bool) -> dict[str, StoredTensor]:
    """Return the tensors of a text model by their names in transformers.

    whole: whether the model has a vision tower.
    """
    found, keys = find_architecture(file), Keys(file, architecture(file))
    layers, prefix = own_layers(keys) if found.names.in_mtp else 0, TEXT_PREFIX if whole else "model"
    tensors: dict[str, StoredTensor] = {}
    for name, place in file.tensors.items():
        if name != names.ROPE_FACTORS:
            published = found.names.published(name, layers, prefix)
            tensors[published] = GgufTensor.of(place, published, found.change(keys, place))
    return tensors
