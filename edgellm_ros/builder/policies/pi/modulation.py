# SPDX-License-Identifier: Apache-2.0
"""The time of a pi0.5 as scale, shift and gate of every norm of its expert.

Source of the model: LeRobot 0.6.1, modeling_pi05.py (embed_suffix) and pi_gemma.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.action.action_layers import time_features
from edgellm_ros.builder.graph.graph import FLOAT
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.policies.expert_layers import silu
from edgellm_ros.builder.policies.pi.architecture import EXPERT, MODEL, PiArchitecture
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory import binding_names as names

# Most results of a Split: of more, ONNX Runtime's CUDA provider copies the addresses from the host, which no
# CUDA graph can record.
PARTS = 30


def modulation_width(architecture: PiArchitecture) -> int:
    """Return the number of values of all norms."""
    return 3 * architecture.expert_hidden_size * len(_places(architecture))


# time -- time_mlp -- modulation -- 1 + scale, shift, gate of each norm
def build_modulation(architecture: PiArchitecture, weights: Weights, precision: str) -> ModelBuilder:
    """Build `action/modulation.cuda.onnx`.

    Input: time [N] fp32. Output: modulation [N,W] fp32: of each norm 1 + scale, shift and gate.
    """
    graph = ModelBuilder("modulation", weights, precision)
    time = graph.input(names.TIME, FLOAT, ["N"])
    width = modulation_width(architecture)
    graph.output(add_modulation(graph, architecture, time), names.MODULATION, FLOAT, ["N", width])
    return graph


def add_modulation(graph: ModelBuilder, architecture: PiArchitecture, time: ir.Value) -> ir.Value:
    """Add what times [N] make of all norms, as one product: [N,W] fp32."""
    hidden, places = architecture.expert_hidden_size, _places(architecture)
    with graph.module(MODEL, nodes="embed"):
        features = time_features(graph, time, architecture.periods, hidden)
        raised = graph.linear("time_mlp_in", graph.from_fp32(features), hidden, hidden, bias=True)
        raised = graph.linear("time_mlp_out", silu(graph, raised), hidden, hidden, bias=True)
        condition = silu(graph, raised)
    with graph.module(EXPERT, nodes="modulation"):
        parts = {f"{place}.dense": 3 * hidden for place in places}
        product = graph.to_fp32(graph.joined_linears("modulation.dense", parts, condition, hidden, bias=True))
        added = np.tile(np.repeat(np.array([1, 0, 0], np.float32), hidden), len(places))
        # of all scales at once: a kernel of each would take longer than its work
        one = graph.weight("modulation.added", added.shape, lambda: added, FLOAT)
        return graph.op("Add", product, one)


def modulation_of_norms(
    graph: ModelBuilder, architecture: PiArchitecture, modulation: ir.Value
) -> dict[str, Sequence[ir.Value]]:
    """Split a modulation [1,W] into those of the norms.

    Returns 1 + scale, shift and gate [H] of each norm, by its full name.
    """
    hidden, places = architecture.expert_hidden_size, _places(architecture)
    with graph.module(EXPERT, nodes="modulation"):
        flat = graph.reshape(modulation, [-1])
        counts = [min(PARTS, 3 * len(places) - first) for first in range(0, 3 * len(places), PARTS)]
        groups = graph.split(flat, [hidden * count for count in counts], axis=0)
        values = [
            each
            for group, count in zip(groups, counts, strict=True)
            for each in graph.split(group, [hidden] * count, axis=0)
        ]
    return {f"{EXPERT}.{place}": values[3 * k : 3 * k + 3] for k, place in enumerate(places)}


def _places(architecture: PiArchitecture) -> list[str]:
    """List the norms of the expert."""
    layers = range(architecture.llm.num_hidden_layers)
    names_of_layer = ("input_layernorm", "post_attention_layernorm")
    return [*(f"layers.{i}.{name}" for i in layers for name in names_of_layer), "norm"]
