# SPDX-License-Identifier: Apache-2.0
"""Graph of PaliGemma's vision tower: from camera images to rows of the prefix.

Source of the model: transformers, modeling_siglip.py and modeling_paligemma.py.
"""

from __future__ import annotations

import numpy as np

from edgellm_ros.builder.graph.graph import FLOAT
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.policies.pi.architecture import PROJECTOR, TOWER, PiArchitecture
from edgellm_ros.builder.policies.siglip import siglip_rows
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory import binding_names as names


# pixel_values -- vision_tower -- multi_modal_projector -- image_embeds
def build_vision(
    architecture: PiArchitecture, weights: Weights, precision: str, cuda: bool = False
) -> ModelBuilder:
    """Build `visual/model.onnx`, or with `cuda` `visual/model.cuda.onnx`.

    Input: pixel_values [N,3,side,side] fp32, of N cameras, from -1 to 1.

    Output: image_embeds [R,H] in the precision's type: the rows of each camera.
    """
    graph = ModelBuilder("visual", weights, precision)
    tower, out_size = architecture.tower, architecture.llm.hidden_size
    size = tower.image_size
    pixels = graph.input(names.PIXEL_VALUES, FLOAT, ["N", 3, size, size])
    with graph.module(TOWER, nodes="vision_tower"):
        x = siglip_rows(graph, tower, pixels, np.arange(tower.side**2), cuda)
    with graph.module(PROJECTOR, nodes="projector"):
        x = graph.linear("linear", x, tower.hidden_size, out_size, bias=True)
    x = graph.reshape(x, [-1, out_size])
    graph.output(x, names.IMAGE_EMBEDS, graph.dtype, ["R", out_size])
    return graph
