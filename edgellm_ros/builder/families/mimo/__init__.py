# SPDX-License-Identifier: Apache-2.0
"""MiMo: Qwen2's layers, and a draft head of one more of them.

Source: the authors' modeling_mimo.py (MiMoMTPLayers).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.families import Family, qwen2
from edgellm_ros.builder.families.model import Model, MTPModule
from edgellm_ros.builder.weights.weights import Weights

MTP = "model.mtp_layers"


def read(checkpoint: Path, config: ConfigSection, weights: Weights) -> Model:
    """Read a checkpoint; see `Family`."""
    model = qwen2.read(checkpoint, config, weights)
    count = weights.list_length(MTP)
    if not count:
        return model
    head = MTPModule(
        f"{MTP}.0",
        model.decoder.layers[0],
        layer_prefix="",
        embedding_norm="token_layernorm",
        hidden_norm="hidden_layernorm",
        fc="input_proj",
        norm="final_layernorm",
        state_first=True,
        count=count,
    )
    return dataclasses.replace(model, mtp=head)


FAMILY = Family("mimo", ("mimo",), read)
