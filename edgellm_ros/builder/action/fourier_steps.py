# SPDX-License-Identifier: Apache-2.0
"""Steps of an expert from sines and cosines of actions and time, as in Alpamayo."""

from __future__ import annotations

import math

import onnx_ir as ir

from edgellm_ros.builder.action.expert_config import FourierArchitecture
from edgellm_ros.builder.graph.graph import FLOAT
from edgellm_ros.builder.graph.layers import ModelBuilder

ENCODER = "action_in_proj.encoder.trunk"
EPSILON = 1e-5  # of its norms; a constant in the model code


# trajectory -- features --+
#                          +-- Concat -- trunk.0 -- (SiLU -- RMSNorm -- Linear) * n -- LayerNorm -->
# time -- features --------+
def fourier_steps(
    graph: ModelBuilder,
    architecture: FourierArchitecture,
    trajectory: ir.Value,
    time: ir.Value,
    samples: ir.Value,
) -> ir.Value:
    """Embed actions [n,T,A] and time [1] or [T], both fp32 -> [n,T,hidden].

    samples [1]: n. Angles, sines and cosines are fp32 in every precision.
    """
    space, size, hidden = architecture.action_space, architecture.encoder_size, architecture.hidden_size
    features = 2 * len(architecture.frequencies)
    width = (space.dim + 1) * features
    graph.weights.require(f"{ENCODER}.0.weight", (size, width))
    with graph.scope("features"):
        actions = _features(graph, architecture, trajectory)  # [n,T,A,features]
        actions = graph.reshape(actions, [0, space.horizon, space.dim * features])
        shape = graph.op("Concat", samples, graph.constant([space.horizon, features]), axis=0)
        times = graph.op("Expand", _features(graph, architecture, time), shape)
        x = graph.from_fp32(graph.op("Concat", actions, times, axis=-1))
    x = graph.linear(f"{ENCODER}.0", x, width, size, bias=True)
    for layer in range(architecture.encoder_layers):
        out = size if layer + 1 < architecture.encoder_layers else hidden
        x = graph.op("Mul", x, graph.op("Sigmoid", x))
        x = graph.rms_norm(f"{ENCODER}.{3 * layer + 2}", x, size, EPSILON)
        x = graph.linear(f"{ENCODER}.{3 * layer + 3}", x, size, out, bias=True)
    return graph.layer_norm("action_in_proj.norm", x, hidden, EPSILON)


def _features(graph: ModelBuilder, architecture: FourierArchitecture, x: ir.Value) -> ir.Value:
    """Add sines and cosines of x [...] fp32: [..., features]."""
    angles = [2 * math.pi * frequency for frequency in architecture.frequencies]
    x = graph.op("Mul", graph.op("Unsqueeze", x, graph.constant([-1])), graph.constant(angles, FLOAT))
    x = graph.op("Concat", graph.op("Sin", x), graph.op("Cos", x), axis=-1)
    return graph.op("Mul", x, graph.constant(math.sqrt(2), FLOAT))
