# SPDX-License-Identifier: Apache-2.0
"""The layers of a language model that a GR00T keeps."""

from __future__ import annotations

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.weights.claimed_sizes import check_decoder_sizes, check_layers
from edgellm_ros.builder.weights.weights import Weights


def keep_layers(config: ConfigSection, text: ConfigSection, weights: Weights, prefix: str) -> ConfigSection:
    """Return a language model's section with the first `select_layer` layers.

    config: GR00T's; text: of the whole language model; prefix: of its tensors. ValueError if the checkpoint
    lacks tensors of these layers or sizes.
    """
    layers = min(text.size("num_hidden_layers"), config.size("select_layer", 16))
    selected = ConfigSection({"select_layer": layers}, config.where)
    check_layers(selected, "select_layer", weights, f"{prefix}.layers")
    kept = ConfigSection({**text.data, "num_hidden_layers": layers}, text.where)
    check_decoder_sizes(kept, weights, prefix)
    return kept
