# SPDX-License-Identifier: Apache-2.0
"""Graph of the prefix of pi0 and pi0.5: keys and values of images and prompt.

Of the last layer only the keys and values are computed: nothing reads its result.

Source of the model: LeRobot 0.6.1, modeling_pi05.py (PI05Pytorch.embed_prefix) and pi_gemma.py.
"""

from __future__ import annotations

import onnx_ir as ir

from edgellm_ros.builder.graph.graph import INT64, Dim
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.policies.pi.architecture import EMBEDDING, TEXT, PiArchitecture
from edgellm_ros.builder.policies.pi.gemma import Stream, embedded_words, geglu, norm
from edgellm_ros.builder.policies.pi.kernel_attention import attend, has_kernel, lengths
from edgellm_ros.builder.policies.prefix_layers import attend_rows
from edgellm_ros.builder.policies.rope import first_rows, rope_table
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory import binding_names as names


# image_embeds ----------+
# token_ids -- Gather ---+-- Concat -- layers.0 -- ... -- layers.L-1
#                                         |                   |
#                                 context_key_0,      context_key_L-1,
#                                 context_value_0     context_value_L-1
def build_prefix(
    architecture: PiArchitecture, weights: Weights, precision: str, cuda: bool = False
) -> ModelBuilder:
    """Build `prefix/model.onnx`, or with `cuda` `prefix/model.cuda.onnx`.

    Inputs:
    - image_embeds [I,H] in the precision's type: the rows of all images
    - token_ids [L] i64: of the prompt

    Outputs: for each layer context_key_i and context_value_i [1,1,S,D] in the precision's type, S = I+L.

    All rows attend to each other both ways. With `cuda`, in half precision, another input is
    last_prefix_row [1] i32: S-1.
    """
    graph = ModelBuilder("prefix", weights, precision)
    llm, hidden = architecture.llm, architecture.llm.hidden_size
    images = graph.input(names.IMAGE_EMBEDS, graph.dtype, ["I", hidden])
    tokens = graph.input(names.TOKEN_IDS, INT64, ["L"])
    with graph.scope("embed"):
        words = embedded_words(graph, EMBEDDING, tokens, llm.vocab_size, hidden)
        x = graph.op("Concat", graph.to_fp32(images), words, axis=0)
        x = graph.op("Unsqueeze", x, graph.constant([0]))
    rows = graph.op("Shape", x, start=1, end=2)
    table = rope_table(graph, llm.head_dim, architecture.max_prefix_rows)
    rope = first_rows(graph, table, rows)
    kernel = cuda and has_kernel(graph, llm)
    counts = lengths(graph, names.LAST_PREFIX_ROW, rows) if kernel else None
    shape: list[Dim] = [1, llm.num_key_value_heads, "S", llm.head_dim]
    stream = Stream(x, cuda=cuda)
    for i in range(llm.num_hidden_layers):
        last = i == llm.num_hidden_layers - 1
        with graph.module(f"{TEXT}.layers.{i}", nodes=f"layers.{i}"):
            stream, normed = norm(graph, "input_layernorm", stream, hidden)
            update: ir.Value | None
            if counts is None or last:
                update, keys, values = attend_rows(graph, llm, normed, rope, None, last)
            else:
                update, (keys, values) = attend(graph, llm, normed, hidden, table=table, rows=counts)
            graph.output(keys, names.context_key(i), graph.dtype, shape)
            graph.output(values, names.context_value(i), graph.dtype, shape)
            if update is None:
                break
            stream = stream.updated(graph, update)
            stream, normed = norm(graph, "post_attention_layernorm", stream, hidden)
            update = geglu(graph, "mlp", normed, hidden, architecture.intermediate_size)
            stream = stream.updated(graph, update)
    return graph
