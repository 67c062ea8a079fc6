# SPDX-License-Identifier: Apache-2.0
"""Graph of the action expert: velocity of the flow from noise to a trajectory.

Each layer attends to the KV cache of one of the language model's attention layers, and to the trajectory
itself. Each layer has one Attention, whose keys are those of the trajectory and behind them those of the
cache: the rows in use lie next to each other, and every runtime has a kernel for this form. Of the cache a
run reads the first P rows. P is a size of an input, so the runtimes know it before they run.

Source of the method: flow matching (arXiv 2210.02747) with an expert beside a language model, as in pi0
(arXiv 2410.24164) and Alpamayo-R1 (arXiv 2511.00088).
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from edgellm_ros.builder.action.action_layers import (
    StepHeads,
    attend_with_context,
    project_steps,
    repeat,
    time_features,
)
from edgellm_ros.builder.action.expert_config import (
    ExpertArchitecture,
    FourierArchitecture,
    PlainArchitecture,
)
from edgellm_ros.builder.action.fourier_steps import fourier_steps
from edgellm_ros.builder.graph.graph import BOOL, FLOAT, INT64, Dim
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.lowering.norms import rms_norm
from edgellm_ros.builder.lowering.onnxruntime.norms import add_norm as cuda_add_norm
from edgellm_ros.builder.model.decoder import RMSNorm
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.engine_directory.language_model_config import LanguageModelConfig


# trajectory --+
#              +-- steps -- layers.0 -- ... -- layers.L-1 -- norm -- out_proj -- velocity
# time --------+             |  |               |  |
#                           caches             caches
def build_expert(
    architecture: ExpertArchitecture,
    llm: LanguageModelConfig,
    weights: Weights,
    precision: str,
    capacity: int,
    cuda: bool = False,
    kv_cache: str | None = None,
) -> ModelBuilder:
    """Build `action/model.onnx`, or with `cuda` `action/model.cuda.onnx`.

    `llm`: the language model whose KV caches it reads. n trajectories of one sequence, T steps, A values per
    step.

    Inputs:
    - trajectory [n,T,A] fp32
    - time [1] fp32: 0 (noise) to 1 (action); [T] if the expert was trained to continue chunks of actions
    - rope_cos, rope_sin [1,T,R/2] fp32: one row per step, R = the rotated values of a head
    - kv_length [1] i64: rows of the cache that are filled
    - cache_rows [P] i64: the numbers 0 .. P-1, P from kv_length to C = `capacity`
    - key_cache_i, value_cache_i [1,Hkv,C,D] in the precision's type or in `kv_cache`: only read; i as in the
      language model, for the caches that a layer of the expert reads

    Output: velocity [n,T,A] fp32.

    The graph for CUDA has lengths in place of a mask, which TensorRT lacks, so that the kernel skips the rows
    that are not filled, and ONNX Runtime's own operator for a sum and its norm.
    """
    graph = ModelBuilder("action", weights, precision, kv_cache=kv_cache)
    space, hidden, norm = architecture.action_space, architecture.hidden_size, architecture.norm
    layers, kv_heads, head_dim = (
        architecture.num_hidden_layers,
        architecture.num_key_value_heads,
        architecture.head_dim,
    )
    add_norm = cuda_add_norm if cuda else _add_norm

    trajectory = graph.input(names.TRAJECTORY, FLOAT, ["n", space.horizon, space.dim])
    time = graph.input(names.TIME, FLOAT, [space.horizon if architecture.rtc_max_delay else 1])
    half = llm.rope.rotary_dim // 2
    rope = [graph.input(name, FLOAT, [1, space.horizon, half]) for name in (names.ROPE_COS, names.ROPE_SIN)]
    length = graph.input(names.KV_LENGTH, INT64, [1])
    rows = graph.input(names.CACHE_ROWS, INT64, ["P"])
    read = architecture.kv_caches(llm)
    shape: list[Dim] = [1, kv_heads, capacity, head_dim]
    dtype = graph.cache_dtype
    caches = {
        i: [graph.input(name, dtype, shape) for name in (names.key_cache(i), names.value_cache(i))]
        for i in sorted(set(read))
    }

    samples = graph.op("Shape", trajectory, start=0, end=1)
    with graph.scope("rope"):
        rope = [repeat(graph, graph.from_fp32(each), samples, 3) for each in rope]
    with graph.scope("caches"):
        filled = {
            i: [repeat(graph, _first_rows(graph, cache, rows), samples, 4) for cache in pair]
            for i, pair in caches.items()
        }
    visible: list[ir.Value | None] = (
        [None, None, None, _lengths(graph, length, samples, space.horizon)]
        if cuda
        else [_mask(graph, length, rows, space.horizon)]
    )
    x, update = _embed(graph, architecture, trajectory, time, samples), None
    for i in range(layers):
        with graph.module(f"layers.{i}"):
            x, normed = add_norm(graph, norm, "input_layernorm", x, update, hidden)
            rotation, cache = (rope, llm.rope.rotary_dim), filled[read[i]]
            update = _attention(graph, architecture, normed, rotation, cache, visible)
            x, normed = add_norm(graph, norm, "post_attention_layernorm", x, update, hidden)
            update = graph.swiglu("mlp", normed, hidden, architecture.intermediate_size)
    x, normed = add_norm(graph, norm, "norm", x, update, hidden)
    velocity = graph.to_fp32(graph.linear("out_proj", normed, hidden, space.dim, bias=True))
    graph.output(velocity, names.VELOCITY, FLOAT, ["n", space.horizon, space.dim])
    return graph


def _add_norm(
    graph: ModelBuilder, norm: RMSNorm, name: str, x: ir.Value, update: ir.Value | None, size: int
) -> tuple[ir.Value, ir.Value]:
    """Add x + update and its RMSNorm."""
    x = x if update is None else graph.op("Add", x, update)
    return x, rms_norm(graph, norm, name, x, size)


def _first_rows(graph: ModelBuilder, cache: ir.Value, rows: ir.Value) -> ir.Value:
    """Take the first P rows of a cache [1,Hkv,C,D], in the graph's type; rows [P]."""
    if graph.cache_dtype != graph.dtype:
        cache = graph.op("Cast", cache, to=int(graph.dtype))  # the whole cache: Slice lacks FP8
    return graph.op("Slice", cache, graph.constant([0]), graph.op("Shape", rows), graph.constant([2]))


def _mask(graph: ModelBuilder, length: ir.Value, rows: ir.Value, steps: int) -> ir.Value:
    """Make the mask [1,1,T,T+P] of keys.

    The mask is true for the trajectory's keys and for those of filled rows of the cache.
    """
    with graph.scope("mask"):
        own = graph.constant([True] * steps, BOOL)
        seen = graph.op("Concat", own, graph.op("Less", rows, length), axis=0)
        seen = graph.op("Unsqueeze", seen, graph.constant([0, 1, 2]))
        return graph.op("Expand", seen, graph.constant([1, 1, steps, 1]))


def _lengths(graph: ModelBuilder, length: ir.Value, samples: ir.Value, steps: int) -> ir.Value:
    """Count the keys [n] that each sample attends to, which are the first ones."""
    with graph.scope("lengths"):
        return repeat(graph, graph.op("Add", length, graph.constant([steps])), samples, 1)


def _embed(
    graph: ModelBuilder,
    architecture: ExpertArchitecture,
    trajectory: ir.Value,
    time: ir.Value,
    samples: ir.Value,
) -> ir.Value:
    """Embed actions [n,T,A] and time [1] or [T], both fp32 -> [n,T,hidden].

    samples [1]: n.
    """
    if isinstance(architecture, FourierArchitecture):
        return fourier_steps(graph, architecture, trajectory, time, samples)
    assert isinstance(architecture, PlainArchitecture)
    values, hidden = architecture.action_space.dim, architecture.hidden_size
    x = graph.linear("in_proj", graph.from_fp32(trajectory), values, hidden, bias=True)
    return graph.op("Add", x, _time_embedding(graph, architecture, time))


# time -- sines and cosines -- time_mlp.0 -- SiLU -- time_mlp.2 -->
def _time_embedding(graph: ModelBuilder, architecture: PlainArchitecture, time: ir.Value) -> ir.Value:
    """Embed time [1] or [T] -> [1,hidden] or [T,hidden].

    Angles, sines and cosines are fp32 in every precision.
    """
    hidden, size = architecture.hidden_size, architecture.time_embedding_dim
    graph.weights.require("time_mlp.0.weight", (hidden, size))
    periods = architecture.time_min_period, architecture.time_max_period
    with graph.scope("time"):
        features = time_features(graph, time, periods, size)
        raised = graph.linear("time_mlp.0", graph.from_fp32(features), size, hidden, bias=True)
        raised = graph.op("Mul", raised, graph.op("Sigmoid", raised))
        return graph.linear("time_mlp.2", raised, hidden, hidden, bias=True)


# x -- qkv_proj -- Split --+-- q -- q_norm -- RotaryEmbedding -------------+
#                          +-- k -- k_norm -- RotaryEmbedding -- Concat -- Attention -- o_proj -->
#                          |                    cached keys --------+       |   |
#                          +-- v ------------------------------- Concat ----+  visible
#                                              cached values -------+
def _attention(
    graph: ModelBuilder,
    architecture: ExpertArchitecture,
    x: ir.Value,
    rope: tuple[Sequence[ir.Value], int],
    cache: Sequence[ir.Value],
    visible: Sequence[ir.Value | None],
) -> ir.Value:
    """Add attention of all steps to each other and to the cache.

    x [n,T,hidden] -> the same shape; rope: cos and sin [n,T,R/2], and R; cache: keys and values [n,Hkv,P,D];
    visible: the inputs of Attention after the values, a mask [1,1,T,T+P] or lengths [n].
    """
    head_dim, norm, (cos_sin, rotary_dim) = architecture.head_dim, architecture.norm, rope
    sizes = StepHeads(
        architecture.hidden_size,
        architecture.action_space.horizon,
        architecture.num_attention_heads,
        architecture.num_key_value_heads,
        head_dim,
    )
    part = {"rotary_embedding_dim": rotary_dim} if rotary_dim < head_dim else {}
    with graph.module("self_attn", nodes="attn"):
        q, k, v = project_steps(graph, x, sizes)
        q, k = (
            graph.op("RotaryEmbedding", rms_norm(graph, norm, name, x, head_dim), *cos_sin, **part)
            for name, x in (("q_norm", q), ("k_norm", k))
        )
        return attend_with_context(graph, (q, k, v), cache, visible, sizes)
