# SPDX-License-Identifier: Apache-2.0
"""Graph of Qwen2.5-Omni's audio encoder.

The encoder makes embeddings of log-mel chunks, all of them of the full length: frames after the end of the
sound are masked, so that the rows of a sound do not depend on the padding. Everything that depends only on
the sound's length is an input, so that one graph serves all lengths.

Source of the model: transformers, modeling_qwen2_5_omni.py, Qwen2_5OmniAudioEncoder.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from edgellm_ros.builder.families.qwen3_omni.audio import EPSILON, encoder_layer, sinusoids
from edgellm_ros.builder.graph.graph import BOOL, FLOAT, INT64
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.multimodal.audio.config import Qwen2_5AudioConfig


@dataclass(frozen=True)
class AudioArchitecture:
    """Audio encoder."""

    config: Qwen2_5AudioConfig  # for the runtime; the graph uses all fields
    encoder_ffn_dim: int
    tower: str  # module of the encoder's tensors


# input_features -- conv1 -- Gelu -- Mul (frame_mask) -- conv2 -- Gelu --(+)-- layers.0 -- ... -- pairs
#                                                                         |                         |
#                                                                     positions                  Gather
#                                                                                    proj -- ln_post
def build_audio(architecture: AudioArchitecture, weights: Weights, precision: str) -> ModelBuilder:
    """Build `audio/model.onnx`: N chunks of T frames each, which hold A tokens.

    T is 2 * n_window, and a chunk has R = T/2 rows after the convolutions; two rows make a token.

    Inputs:
    - input_features [N,M,T] fp32: log-mel values; the last chunk is padded
    - frame_mask [N,1,T] fp32: 1 for frames of the sound, 0 for padding
    - attention_mask [N,1,R,R] bool: true where a row attends to another of its chunk
    - token_index [A] i64: which of the N * R/2 pairs of neighbouring rows are tokens

    Output: audio_embeds [A,H] in the precision's type.
    """
    graph = ModelBuilder("audio", weights, precision)
    config = architecture.config
    hidden, frames, rows = config.d_model, config.chunk_frames, config.n_window
    features = graph.input(names.INPUT_FEATURES, FLOAT, ["N", config.num_mel_bins, frames])
    frame_mask = graph.input(names.FRAME_MASK, FLOAT, ["N", 1, frames])
    mask = graph.input(names.ATTENTION_MASK, BOOL, ["N", 1, rows, rows])
    token_index = graph.input(names.TOKEN_INDEX, INT64, ["A"])

    with graph.module(architecture.tower, nodes=""):
        x = _conv(graph, "conv1", graph.from_fp32(features), config.num_mel_bins, hidden, stride=1)
        x = graph.op("Mul", x, graph.from_fp32(frame_mask))
        x = graph.transpose(_conv(graph, "conv2", x, hidden, hidden, stride=2), (0, 2, 1))
        with graph.scope("positional_embedding"):
            table = graph.weight("positional_embedding", (rows, hidden), lambda: sinusoids(rows, hidden))
            x = graph.reshape(graph.op("Add", x, table), [-1, hidden])
        for i in range(config.encoder_layers):
            with graph.module(f"layers.{i}"):
                inner = architecture.encoder_ffn_dim
                x = encoder_layer(graph, config, inner, x, mask, sequences=(-1, rows), key_bias=False)
        with graph.scope("tokens"):
            pairs = graph.op("Gather", graph.reshape(x, [-1, 2, hidden]), token_index, axis=0)
            x = graph.op("ReduceMean", pairs, graph.constant([1]), keepdims=0)
        x = graph.layer_norm("ln_post", x, hidden, EPSILON)
        x = graph.linear("proj", x, hidden, config.output_dim, bias=True)
    graph.output(x, names.AUDIO_EMBEDS, graph.dtype, ["A", config.output_dim])
    return graph


def _conv(graph: ModelBuilder, name: str, x: ir.Value, fan_in: int, fan_out: int, *, stride: int) -> ir.Value:
    """Add a convolution over 3 frames, and GELU.

    x [N,fan_in,T] -> [N,fan_out,T/stride].
    """
    with graph.module(name):
        kernel, bias = graph.tensor("weight", fan_out, fan_in, 3), graph.tensor("bias", fan_out)
        x = graph.op("Conv", x, kernel, bias, kernel_shape=[3], strides=[stride], pads=[1, 1])
        return graph.op("Gelu", x, approximate="none")
