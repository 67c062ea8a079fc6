# SPDX-License-Identifier: Apache-2.0
"""Graph of the action expert of pi0 and pi0.5: velocity of the flow to actions.

Rows attend to the prefix and to each other both ways. In pi0 a row of the state is before the actions, which
it does not see, and the time is part of the actions' rows. In pi0.5 the time scales, shifts and gates every
norm.

Source of the models: LeRobot 0.6.1, modeling_pi0.py and modeling_pi05.py (embed_suffix and denoise_step), and
pi_gemma.py.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.action.action_layers import StepHeads, repeat
from edgellm_ros.builder.graph.graph import BOOL, FLOAT, Dim
from edgellm_ros.builder.graph.layers import Cache, ModelBuilder
from edgellm_ros.builder.policies.expert_layers import (
    attend_rows_and_context,
    embed_actions_and_times,
)
from edgellm_ros.builder.policies.pi.architecture import EXPERT, MODEL, PiArchitecture
from edgellm_ros.builder.policies.pi.gemma import Stream, adaptive_norm, geglu, norm
from edgellm_ros.builder.policies.pi.kernel_attention import attend, has_kernel, lengths
from edgellm_ros.builder.policies.pi.modulation import (
    add_modulation,
    modulation_of_norms,
    modulation_width,
)
from edgellm_ros.builder.policies.rope import rope_table, rows_from
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory import binding_names as names

# From the name of a norm and the stream to the stream, the normalised rows and the gate of what follows.
Norm = Callable[[str, Stream], tuple[Stream, ir.Value, ir.Value | None]]
Attend = Callable[[int, ir.Value], ir.Value]  # from a layer and its normalised rows to the update


# trajectory -- action_in_proj ------ layers.0 -- ... -- layers.L-1 -- norm -- action_out_proj -- velocity
# state ------- state_proj (pi0) -----+ |                    |           |
# time -------- time_mlp (pi0.5) -------+--------------------+-----------+
def build_expert(
    architecture: PiArchitecture, weights: Weights, precision: str, cuda: bool = False
) -> ModelBuilder:
    """Build `action/model.onnx`, or with `cuda` `action/model.cuda.onnx`.

    The graph takes n chunks of T actions of A values, all with one context and one time.

    Inputs:
    - trajectory [n,T,A] fp32
    - time [1] fp32: 1 (noise) to 0 (action)
    - state [1,D] fp32: normalised, filled up with zeros; of a pi0 only
    - context_key_i, context_value_i [1,1,S,D] in the precision's type: outputs of the prefix

    Output: velocity [n,T,A] fp32.

    With `cuda`, a pi0.5 takes modulation [1,W] fp32 in place of the time: a row of `build_modulation`.

    With `cuda`, a pi0.5 in half precision takes one chunk, n = 1. Its contexts [1,1,C,D] have room for the
    actions behind the prefix, C = S + T, and it has further bindings:

    - in: last_action_row [1] i32: C - 1
    - out: present_context_key_i, present_context_value_i [1,1,C,D], to be bound to the memory of the contexts
    """
    graph = ModelBuilder("action", weights, precision)
    hidden, steps, dim = architecture.expert_hidden_size, architecture.horizon, architecture.action_dim
    kernel = cuda and architecture.adaptive and has_kernel(graph, architecture.llm)
    count: Dim = 1 if kernel else "n"
    trajectory = graph.input(names.TRAJECTORY, FLOAT, [count, steps, dim])
    samples = graph.constant([1]) if kernel else graph.op("Shape", trajectory, start=0, end=1)
    x, norms = _embed(graph, architecture, trajectory, samples, cuda)
    length = steps if architecture.adaptive else steps + 1
    if kernel:
        attend_layer = _kernel_attention(graph, architecture)
    else:  # with the mask of a pi0, ONNX Runtime has more to transpose in rows than in heads
        attend_layer = _plain_attention(graph, architecture, samples, length, cuda and architecture.adaptive)
    stream = Stream(x, cuda=cuda)
    for i in range(architecture.llm.num_hidden_layers):
        with graph.module(f"{EXPERT}.layers.{i}", nodes=f"layers.{i}"):
            stream, normed, gate = norms("input_layernorm", stream)
            stream = stream.updated(graph, attend_layer(i, normed), gate)
            stream, normed, gate = norms("post_attention_layernorm", stream)
            update = geglu(graph, "mlp", normed, hidden, architecture.expert_intermediate_size)
            stream = stream.updated(graph, update, gate)
    with graph.module(EXPERT, nodes=""):
        _, x, _ = norms("norm", stream)
    if not architecture.adaptive:
        x = graph.op("Slice", x, graph.constant([1]), graph.constant([length]), graph.constant([1]))
    with graph.module(MODEL, nodes=""):
        velocity = graph.to_fp32(graph.linear("action_out_proj", x, hidden, dim, bias=True))
    graph.output(velocity, names.VELOCITY, FLOAT, [count, steps, dim])
    return graph


def _contexts(graph: ModelBuilder, architecture: PiArchitecture, rows: str) -> list[Cache]:
    """Add keys and values [1,Hkv,rows,D] of each layer as inputs."""
    llm = architecture.llm
    shape: list[Dim] = [1, llm.num_key_value_heads, rows, llm.head_dim]
    return [
        (
            graph.input(names.context_key(i), graph.dtype, shape),
            graph.input(names.context_value(i), graph.dtype, shape),
        )
        for i in range(llm.num_hidden_layers)
    ]


def _plain_attention(
    graph: ModelBuilder, architecture: PiArchitecture, samples: ir.Value, length: int, flat: bool
) -> Attend:
    """Return what adds the attention of a layer, T = `length`.

    flat: attention takes rows as the projections write them.
    """
    llm = architecture.llm
    heads = llm.num_attention_heads, llm.num_key_value_heads
    sizes = StepHeads(architecture.expert_hidden_size, length, *heads, llm.head_dim, rows=flat)
    contexts = _contexts(graph, architecture, "S")
    rows = graph.op("Shape", contexts[0][0], start=2, end=3)
    table = rope_table(graph, llm.head_dim, architecture.max_prefix_rows + length)
    rope = rows_from(graph, table, rows, length)
    visible = () if architecture.adaptive else (_mask(graph, rows, length),)

    def attend_layer(layer: int, x: ir.Value) -> ir.Value:
        context = [repeat(graph, each, samples, 4) for each in contexts[layer]]
        return attend_rows_and_context(
            graph, x, sizes, rope=rope, context=context, visible=visible, samples=samples
        )

    return attend_layer


def _kernel_attention(graph: ModelBuilder, architecture: PiArchitecture) -> Attend:
    """Return what adds the attention of a layer as one operator."""
    llm = architecture.llm
    contexts = _contexts(graph, architecture, "C")
    rows = lengths(graph, names.LAST_ACTION_ROW, graph.op("Shape", contexts[0][0], start=2, end=3))
    table = rope_table(graph, llm.head_dim, architecture.max_prefix_rows + architecture.horizon)

    def attend_layer(layer: int, x: ir.Value) -> ir.Value:
        cache, hidden = contexts[layer], architecture.expert_hidden_size
        update, present = attend(graph, llm, x, hidden, table=table, rows=rows, cache=cache)
        shape: list[Dim] = [1, llm.num_key_value_heads, "C", llm.head_dim]
        for name, value in zip((names.context_key, names.context_value), present, strict=True):
            graph.output(value, names.present_context(name(layer)), graph.dtype, shape)
        return update

    return attend_layer


def _embed(
    graph: ModelBuilder, architecture: PiArchitecture, trajectory: ir.Value, samples: ir.Value, cuda: bool
) -> tuple[ir.Value, Norm]:
    """Add the rows [n,T,hidden] fp32 before the first layer, T with the state's row.

    Returns them and what adds the norms.
    """
    hidden, dim = architecture.expert_hidden_size, architecture.action_dim
    if architecture.adaptive and cuda:
        modulation = graph.input(names.MODULATION, FLOAT, [1, modulation_width(architecture)])
    else:
        time = graph.input(names.TIME, FLOAT, [1])
        if architecture.adaptive:
            modulation = add_modulation(graph, architecture, time)
    if architecture.adaptive:
        with graph.module(MODEL, nodes="embed"):
            x = graph.linear("action_in_proj", graph.from_fp32(trajectory), dim, hidden, bias=True)
        by_norm = modulation_of_norms(graph, architecture, modulation)

        def add_norm(name: str, stream: Stream) -> tuple[Stream, ir.Value, ir.Value]:
            scale, shift, gate = by_norm[graph.full_name(name)]
            return *adaptive_norm(graph, name, stream, (scale, shift)), gate

        return graph.to_fp32(x), add_norm
    state = graph.input(names.STATE, FLOAT, [1, architecture.state_dim])
    with graph.module(MODEL, nodes="embed"):
        x = embed_actions_and_times(graph, trajectory, time, architecture.periods, dim, hidden)
        own = graph.linear("state_proj", graph.from_fp32(state), architecture.state_dim, hidden, bias=True)
        # along the last axis: see `attend_with_context`
        flat = repeat(graph, own, samples, 2), graph.reshape(x, [0, -1])
        x = graph.reshape(graph.op("Concat", *flat, axis=-1), [0, -1, hidden])
    return graph.to_fp32(x), lambda name, stream: (*norm(graph, name, stream, hidden), None)


def _mask(graph: ModelBuilder, rows: ir.Value, length: int) -> ir.Value:
    """Make the mask [1,1,T,T+S] of S = `rows` [1] and T = `length`.

    The first row, the state, sees itself and the prefix; the actions see all.
    """
    with graph.scope("mask"):
        seen = np.ones((length, length), dtype=bool)
        seen[0, 1:] = False
        size = graph.op("Concat", graph.constant([length]), rows, axis=0)
        prefix = graph.op("Expand", graph.constant([[True]], BOOL), size)
        own = graph.constant(seen, BOOL)
        return graph.op("Unsqueeze", graph.op("Concat", own, prefix, axis=1), graph.constant([0, 1]))
