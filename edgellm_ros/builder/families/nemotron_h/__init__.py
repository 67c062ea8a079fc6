# SPDX-License-Identifier: Apache-2.0
"""Nemotron-H, text only.

The layers are Mamba2, attention without positions, and feed-forward blocks.
"""

from __future__ import annotations

from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.families import Family
from edgellm_ros.builder.families.model import Model, make_model
from edgellm_ros.builder.families.nemotron_h.config import MODEL_TYPE, read_decoder
from edgellm_ros.builder.weights.claimed_sizes import check_dimensions
from edgellm_ros.builder.weights.weights import Weights


def read(checkpoint: Path, config: ConfigSection, weights: Weights) -> Model:
    """Read a checkpoint of Nemotron-H; see `Family`."""
    prefix = "backbone" if weights.has_module("backbone") else "model"
    check_dimensions(config, weights)  # the layers are a list, as long as the file has it
    return make_model(checkpoint, config, weights, read_decoder(config, prefix))


FAMILY = Family("nemotron_h", (MODEL_TYPE,), read)
