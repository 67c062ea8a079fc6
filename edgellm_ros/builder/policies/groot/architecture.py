# SPDX-License-Identifier: Apache-2.0
"""Sizes of GR00T.

The sizes are those of the backbone, which is the first part of a vision language model, and of the action
head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.model.decoder import Decoder
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.multimodal.vision_config import Qwen3VisionConfig, Siglip2VisionConfig

HEAD = "action_head"


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes of a list of layers with attention."""

    layers: int
    heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Return the number of values of a row."""
        return self.heads * self.head_dim


@dataclass(frozen=True)
class Backbone:
    """The part of a vision language model that the action head attends to."""

    where: str = field(compare=False)  # the file that errors name
    decoder: Decoder  # the kept layers of the language model
    norm: bool  # whether the language model's last norm follows them
    vision: Qwen3VisionConfig | Siglip2VisionConfig
    # of weights and precision; compared by the configuration of the tower, as a partial has no equality
    build_vision: Callable[[Weights, str], ModelBuilder] = field(compare=False)
    large_modules: tuple[str, ...]  # of the tower and its connector, for `LargeLayers`


@dataclass(frozen=True)
class GrootArchitecture:
    """All that the graphs of a GR00T use."""

    backbone: Backbone
    vlln: bool  # whether a LayerNorm follows the backbone
    vl: AttentionSizes  # layers over the decoder's result
    dit: AttentionSizes  # every second layer attends to the context, the others to the actions
    text_every: (
        int  # of the layers that attend to the context, each of this number attends to text, not images
    )
    state_dim: int
    action_dim: int
    horizon: int
    inner_size: int  # of the encoder of the state, and of the decoder of actions
    positions: int  # learned positions of actions; 0 = none
    embodiment: int  # number of the one whose encoders and decoder are used
    embodiments: int
    time_steps: int  # whole times of the flow, from 0

    def attends_to_text(self, layer: int) -> bool:
        """Tell whether a layer that attends to the context attends to text."""
        return layer % (2 * self.text_every) == 0

    @property
    def context_layers(self) -> range:
        """Return the layers of the DiT that attend to the context."""
        return range(0, self.dit.layers, 2)
