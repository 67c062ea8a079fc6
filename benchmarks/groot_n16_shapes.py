# SPDX-License-Identifier: Apache-2.0
"""Sizes of Eagle, the vision language model of GR00T N1.6.

Sources of the numbers: NVIDIA Isaac-GR00T, branch n1.6-release, Eagle-Block2A-2B-v2/config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.groot_shapes import affine_shapes, decoder_shapes, head_shapes
from benchmarks.model_shapes import Shapes

MODEL = "backbone.model"


def eagle_shapes(model: Mapping[str, Any], eagle: Mapping[str, Any]) -> Shapes:
    """Return the shape of each tensor of a GR00T N1.6 with these configurations."""
    text, vision = eagle["text_config"], eagle["vision_config"]
    decoder = decoder_shapes(text, f"{MODEL}.language_model.model", model["select_layer"])
    return decoder | _tower(vision) | _connector(eagle) | head_shapes(model)


def _tower(vision: Mapping[str, Any]) -> Shapes:
    wide, raised, tower = (
        vision["hidden_size"],
        vision["intermediate_size"],
        f"{MODEL}.vision_model.vision_model",
    )
    linears = {f"{tower}.embeddings.patch_embedding": (wide, 3 * vision["patch_size"] ** 2)}
    norms = {f"{tower}.post_layernorm": wide}
    for i in range(vision["num_hidden_layers"]):
        layer = f"{tower}.encoder.layers.{i}"
        attention = (f"{layer}.self_attn.{name}_proj" for name in ("q", "k", "v", "out"))
        linears |= {name: (wide, wide) for name in attention}
        linears |= {f"{layer}.mlp.fc1": (raised, wide), f"{layer}.mlp.fc2": (wide, raised)}
        norms |= {f"{layer}.layer_norm1": wide, f"{layer}.layer_norm2": wide}
    positions = f"{tower}.embeddings.position_embedding.weight"
    return {positions: (vision["num_patches"], wide), **affine_shapes(linears, norms)}


def _connector(eagle: Mapping[str, Any]) -> Shapes:
    hidden = eagle["text_config"]["hidden_size"]
    merged = eagle["vision_config"]["hidden_size"] * round(1 / eagle["downsample_ratio"]) ** 2
    linears = {f"{MODEL}.mlp1.1": (hidden, merged), f"{MODEL}.mlp1.3": (hidden, hidden)}
    return affine_shapes(linears, {f"{MODEL}.mlp1.0": merged})
