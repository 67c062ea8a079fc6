# SPDX-License-Identifier: Apache-2.0
"""Graph of SmolVLA's vision tower: from camera images to rows of the prefix.

Source of the model: transformers, modeling_smolvlm.py, SmolVLMVisionTransformer and SmolVLMConnector;
LeRobot 0.4.4, SmolVLMWithExpertModel.embed_image.
"""

from __future__ import annotations

import numpy as np

from edgellm_ros.builder.graph.graph import FLOAT
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.policies.siglip import siglip_rows
from edgellm_ros.builder.policies.smolvla.architecture import (
    CONNECTOR,
    VLM,
    SmolVLAArchitecture,
    TowerArchitecture,
)
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory import binding_names as names


# pixel_values -- vision_model -- blocks of merge x merge patches -- proj -- image_embeds
def build_vision(
    architecture: SmolVLAArchitecture, weights: Weights, precision: str, cuda: bool = False
) -> ModelBuilder:
    """Build `visual/model.onnx`, or with `cuda` `visual/model.cuda.onnx`.

    Input: pixel_values [N,3,side,side] fp32, of N cameras, from -1 to 1.

    Output: image_embeds [R,H] in the precision's type: the rows of each camera, as the prefix has them.
    """
    graph = ModelBuilder("visual", weights, precision)
    tower, out_size = architecture.tower, architecture.llm.hidden_size
    hidden, side, size = tower.hidden_size, tower.side, tower.image_size
    pixels = graph.input(names.PIXEL_VALUES, FLOAT, ["N", 3, size, size])
    with graph.module(f"{VLM}.vision_model", nodes="vision_model"):
        x = siglip_rows(graph, tower, pixels, position_rows(tower), cuda)
    with graph.module(CONNECTOR, nodes="connector"):
        merge, blocks = tower.merge, side // tower.merge
        x = graph.reshape(x, [-1, blocks, merge, blocks, merge, hidden])
        x = graph.reshape(graph.transpose(x, (0, 1, 3, 2, 4, 5)), [-1, merge * merge * hidden])
        x = graph.linear("proj", x, merge * merge * hidden, out_size)
    graph.output(x, names.IMAGE_EMBEDS, graph.dtype, ["R", out_size])
    return graph


def position_rows(tower: TowerArchitecture) -> np.ndarray:
    """Compute the row of the learned grid for each patch of an image.

    An image of another size than the grid's takes the positions at the same shares of its sides. Computed in
    fp32, as in the reference.
    """
    step, one = np.float32(1) / np.float32(tower.side), np.float32(1.0 - 1e-6)
    places = np.minimum(np.arange(tower.side, dtype=np.float32) * step, one)
    share = 1 / tower.position_side
    borders = np.arange(share, 1.0, share).astype(np.float32)
    cells = np.searchsorted(borders, places, side="right")
    return (cells[:, None] * tower.position_side + cells).reshape(-1)
