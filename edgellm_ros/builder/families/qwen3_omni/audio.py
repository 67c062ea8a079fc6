# SPDX-License-Identifier: Apache-2.0
"""Graph of the audio encoder of Qwen3-Omni and Qwen3-ASR.

The encoder makes embeddings of log-mel chunks. The graph encodes one sound. Everything that depends only on
the sound's length (which rows are sound and not padding, their positions in the chunk, the attention mask) is
an input, so that one graph serves all lengths.

Source of the model: transformers, modeling_qwen3_omni_moe.py, Qwen3OmniMoeAudioEncoder.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.families.qwen3_omni.config import AudioArchitecture
from edgellm_ros.builder.graph.graph import BOOL, FLOAT, INT64
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.multimodal.audio.config import AudioEncoder, halved_three_times

EPSILON = 1e-5  # of every LayerNorm; PyTorch's default, which the model code uses
MAX_TIMESCALE = 10000.0  # of the sinusoids; a constant in the model code
FP16_BOUND = 64504.0  # the model code keeps hidden states within this in fp16


# input_features -- conv2d1..3 -- Gather -- conv_out --(+)-- layers.0 -- ... -- ln_post -- proj1 -- proj2
#                                    |                  |
#                               token_index    positions of position_index
def build_audio(architecture: AudioArchitecture, weights: Weights, precision: str) -> ModelBuilder:
    """Build `audio/model.onnx`: N chunks of T frames each, which hold A tokens.

    Inputs:
    - input_features [N,M,T] fp32: log-mel values; the last chunk is padded with zeros
    - token_index [A] i64: which of the N * ceil(T/8) rows after the convolutions are sound
    - position_index [A] i64: position of each of these rows in its chunk
    - attention_mask [1,1,A,A] bool: true where a token attends to another

    Output: audio_embeds [A,H] in the precision's type.
    """
    graph = ModelBuilder("audio", weights, precision)
    config, channels = architecture.config, architecture.downsample_hidden_size
    hidden, bands = config.d_model, halved_three_times(config.num_mel_bins)
    features = graph.input(names.INPUT_FEATURES, FLOAT, ["N", config.num_mel_bins, "T"])
    token_index, position_index = (
        graph.input(name, INT64, ["A"]) for name in (names.TOKEN_INDEX, names.POSITION_INDEX)
    )
    mask = graph.input(names.ATTENTION_MASK, BOOL, [1, 1, "A", "A"])

    with graph.module(architecture.tower, nodes=""):
        x = graph.op("Unsqueeze", graph.from_fp32(features), graph.constant([1]))
        for i in (1, 2, 3):
            x = graph.conv2d(f"conv2d{i}", x, 1 if i == 1 else channels, channels)
            x = graph.op("Gelu", x, approximate="none")
        with graph.scope("tokens"):
            x = graph.reshape(graph.transpose(x, (0, 3, 1, 2)), [-1, channels * bands])
            x = graph.op("Gather", x, token_index, axis=0)
        x = graph.linear("conv_out", x, channels * bands, hidden)
        with graph.scope("positional_embedding"):
            shape = (config.chunk_tokens, hidden)
            table = graph.weight("positional_embedding", shape, lambda: sinusoids(*shape))
            x = graph.op("Add", x, graph.op("Gather", table, position_index, axis=0))
        for i in range(config.encoder_layers):
            with graph.module(f"layers.{i}"):
                x = encoder_layer(graph, config, architecture.encoder_ffn_dim, x, mask)
        x = graph.layer_norm("ln_post", x, hidden, EPSILON)
    module, first, second = architecture.projector
    with graph.module(module, nodes=""):
        x = graph.op("Gelu", graph.linear(first, x, hidden, hidden, bias=True), approximate="none")
        x = graph.linear(second, x, hidden, config.output_dim, bias=True)
    graph.output(x, names.AUDIO_EMBEDS, graph.dtype, ["A", config.output_dim])
    return graph


def sinusoids(length: int, channels: int) -> np.ndarray:
    """Compute fixed position embeddings: sines, then cosines.

    Returns [length, channels] float32.
    """
    step = np.log(MAX_TIMESCALE) / (channels // 2 - 1)
    frequencies = np.exp(np.float32(-step) * np.arange(channels // 2, dtype=np.float32))
    angles = np.arange(length, dtype=np.float32)[:, None] * frequencies
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


# x --+-- self_attn_layer_norm -- self_attn --(+)--+-- final_layer_norm -- fc1 -- Gelu -- fc2 --(+)-->
#     +----------------------------------------+   +-------------------------------------------+
def encoder_layer(
    graph: ModelBuilder,
    config: AudioEncoder,
    inner: int,
    x: ir.Value,
    mask: ir.Value,
    *,
    sequences: tuple[int, int] = (1, -1),
    key_bias: bool = True,
) -> ir.Value:
    """Add a transformer layer, x [A,hidden] -> [A,hidden].

    sequences: the rows are B sequences of L rows each, of which -1 may stand for one number; mask
    [1 or B,1,L,L] is true where a row attends to another of its sequence. inner: width of the feed-forward
    block. key_bias: whether the keys have a bias.
    """
    hidden = config.d_model
    normed = graph.layer_norm("self_attn_layer_norm", x, hidden, EPSILON)
    x = graph.op("Add", x, _attention(graph, config, normed, mask, sequences, key_bias))
    normed = graph.layer_norm("final_layer_norm", x, hidden, EPSILON)
    raised = graph.op("Gelu", graph.linear("fc1", normed, hidden, inner, bias=True), approximate="none")
    x = graph.op("Add", x, graph.linear("fc2", raised, inner, hidden, bias=True))
    if graph.dtype == ir.DataType.FLOAT16:
        bounds = (graph.constant(bound, graph.dtype) for bound in (-FP16_BOUND, FP16_BOUND))
        x = graph.op("Clip", x, *bounds)
    return x


# x --+-- q_proj -- Reshape, Transpose --+
#     +-- k_proj -- Reshape, Transpose --+-- Attention -- Transpose, Reshape -- out_proj -->
#     +-- v_proj -- Reshape, Transpose --+
def _attention(
    graph: ModelBuilder,
    config: AudioEncoder,
    x: ir.Value,
    mask: ir.Value,
    sequences: tuple[int, int],
    key_bias: bool,
) -> ir.Value:
    """Add attention within sequences of rows, x [A,hidden] -> [A,hidden]."""
    hidden, heads = config.d_model, config.encoder_attention_heads

    def heads_of(name: str, bias: bool = True) -> ir.Value:
        rows = graph.linear(name, x, hidden, hidden, bias)
        return graph.transpose(graph.reshape(rows, [*sequences, heads, config.head_dim]), (0, 2, 1, 3))

    with graph.module("self_attn"):
        q, k, v = heads_of("q_proj"), heads_of("k_proj", key_bias), heads_of("v_proj")
        attended = graph.op("Attention", q, k, v, mask, scale=config.head_dim**-0.5)
        attended = graph.reshape(graph.transpose(attended, (0, 2, 1, 3)), [-1, hidden])
        return graph.linear("out_proj", attended, hidden, hidden, bias=True)
