# SPDX-License-Identifier: Apache-2.0
"""Graph of a dense decoder: Llama's layers, with switches.

RMSNorm before attention and feed-forward block, grouped-query attention with RoPE, SwiGLU. The switches are
those of the families that share the layers.

One graph serves prefill, decode and tree verification. The operators are those that both ONNX Runtime and
TensorRT's parser support: 4D Attention with an explicit mask and one output, TensorScatter into a cache of
fixed capacity, RotaryEmbedding with cos and sin rows of each token. The differences between the phases are
inputs: positions, mask, cache rows to write, rows to compute logits of.

Sources of the models: transformers, modeling_llama.py, modeling_qwen2.py, modeling_qwen3.py and
modeling_qwen3_omni_moe.py (Qwen3OmniMoeThinkerTextModel).
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from edgellm_ros.builder.checkpoint import Weights
from edgellm_ros.builder.layers import Cache, ModelBuilder
from edgellm_ros.builder.llm_graph import LLMInputs, llm_inputs, llm_outputs
from edgellm_ros.builder.model import LLMOptions
from edgellm_ros.engine_directory.config import LanguageModelConfig


@dataclass(frozen=True)
class DecoderArchitecture:
    """A decoder of one checkpoint.

    Sliding windows are those of the layers: a token of a layer with window w attends to itself and the w - 1
    tokens before it; None is full attention. An empty tuple is full attention in all layers.
    """

    runner: LanguageModelConfig  # for the runtime; the graph uses all fields
    intermediate_size: int
    epsilon: float  # of every RMSNorm
    prefix: str = "model"  # of the decoder's tensors, such as "model.language_model"
    qkv_bias: bool = False
    output_bias: bool = False  # of o_proj
    mlp_bias: bool = False
    head_norms: bool = False  # an RMSNorm of each head's queries and keys before RoPE
    sliding_windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        layers, windows = self.runner.num_hidden_layers, self.sliding_windows
        if windows and len(windows) != layers:
            raise ValueError(f"sliding_windows has {len(windows)} entries for {layers} layers")
        if any(window is not None and window < 1 for window in windows):
            raise ValueError(f"a sliding window must be at least 1, got {windows}")

    @property
    def embedding(self) -> str:
        """Return the tensor of the embedding table [V,H]."""
        return f"{self.prefix}.embed_tokens.weight"

    def window(self, layer: int, capacity: int) -> int | None:
        """Return a layer's sliding window; None if it sees all of a cache of `capacity`."""
        window = self.sliding_windows[layer] if self.sliding_windows else None
        return window if window is not None and window < capacity else None


# inputs_embeds -- layers.0 --(+)-- layers.1 --(+)-- ... -- layers.L-1 -- norm -- lm_head -- logits
#                    |  |      |      |  |      |             |  |   |
#                   caches  deepstack_0     deepstack_1      caches  last_token_ids
def build_decoder(architecture: DecoderArchitecture, weights: Weights, options: LLMOptions) -> ModelBuilder:
    """Build `llm/model.onnx`.

    B sequences, S new tokens and N rows of logits of each, C = capacity.

    Inputs, of the precision's type unless said otherwise:
    - inputs_embeds [B,S,H]
    - rope_cos, rope_sin [B,S,R/2] fp32: one row per token; R values of a head are rotated
    - kv_write_index [B] i64: cache row of a sequence's first new token; its last must be below C
    - attention_mask [B,1,S,C] bool: true where a token attends to a cache row; no row may be all false
    - last_token_ids [B,N] i64: the tokens (0..S-1) to compute logits of
    - key_cache_i, value_cache_i [B,Hkv,C,D]
    - deepstack_embeds_i [B,S,H]: added after layer i; zero where there is no image
    - LoRA inputs, if `options.lora`: see engine_directory/lora_inputs.py
    - lm_head.weight [H,V] if the head is an input

    Outputs:
    - logits [B,N,V] fp32
    - present_key_i, present_value_i [B,Hkv,C,D], to be bound to the memory of key_cache_i and value_cache_i
    - hidden_states_i [B,S,H] for each i of `hidden_state_layers`, as transformers counts them: the output
      of layer i (from 1) before deepstack; of the last layer after the final norm
    - fused_hidden_states [B,S,Hd], if `options.fusion`: of all tokens
    """
    graph = ModelBuilder("llm", weights, options.precision, options.lora, kv_cache=options.kv_cache)
    runner, epsilon = architecture.runner, architecture.epsilon
    hidden, layers = runner.hidden_size, runner.num_hidden_layers
    inputs = llm_inputs(graph, runner, options.capacity)
    tokens, last_token_ids = inputs.tokens, inputs.last_token_ids

    presents, hidden_states, fusion = [], {}, options.fusion
    layer_inputs: list[ir.Value] = []  # and the last layer's output
    # Whether anything after the last attention needs the rows of all tokens.
    all_rows = layers in options.hidden_state_layers or len(inputs.deepstack) == layers
    all_rows |= fusion is not None and layers in fusion.base_state_layers
    x = tokens.flatten(inputs.embeds, hidden)
    for i in range(layers):
        layer_inputs.append(x)
        with graph.module(f"{architecture.prefix}.layers.{i}", nodes=f"layers.{i}"):
            normed = graph.rms_norm("input_layernorm", x, hidden, epsilon)
            mask = inputs.windowed_mask(graph, architecture.window(i, options.capacity))
            attended, present = attention(graph, architecture, inputs, mask, normed, inputs.caches[i])
            presents.append(present)
            x = graph.op("Add", x, attended)
            if i == layers - 1 and not all_rows:  # saves 7% of a prefill of 130 tokens
                rows = graph.rows(tokens.unflatten(x, hidden), last_token_ids, hidden)
                x = tokens.flatten(rows, hidden)
            normed = graph.rms_norm("post_attention_layernorm", x, hidden, epsilon)
            inner, bias = architecture.intermediate_size, architecture.mlp_bias
            x = graph.op("Add", x, graph.swiglu("mlp", normed, hidden, inner, bias))
            if i + 1 in options.hidden_state_layers:
                hidden_states[i + 1] = tokens.unflatten(x, hidden)
            if i < len(inputs.deepstack):
                x = graph.op("Add", x, tokens.flatten(inputs.deepstack[i], hidden))
    layer_inputs.append(x)
    x = tokens.unflatten(x, hidden)
    with graph.module(architecture.prefix, nodes=""):
        hidden_states[layers] = x = graph.rms_norm("norm", x, hidden, epsilon)
    if all_rows:
        x = graph.rows(x, last_token_ids, hidden)
    wanted = {i: hidden_states[i] for i in options.hidden_state_layers}
    logits = options.head.logits(graph, x)
    llm_outputs(graph, runner, options.capacity, options.head, logits, presents, wanted)
    if fusion is not None:
        fusion.add_output(graph, tokens, layer_inputs)
    return graph


# (q_norm and k_norm: only with head_norms)
#
# x -- qkv_proj --+-- q -- q_norm -- RotaryEmbedding ----------------------------+
#                 +-- k -- k_norm -- RotaryEmbedding -- TensorScatter --+---- Attention -- o_proj -->
#                 |                         key_cache --------+         |      |   |
#                 +-- v --------------------- TensorScatter --+---------|------+  mask
#                              value_cache ---------+         |         |
#                                                     present_value  present_key
def attention(
    graph: ModelBuilder,
    architecture: DecoderArchitecture,
    inputs: LLMInputs,
    mask: ir.Value,
    x: ir.Value,
    cache: Cache,
    fan_in: int | None = None,
) -> tuple[ir.Value, Cache]:
    """Add grouped-query attention over the cache.

    x and the result are in the layout of the layers; fan_in: width of x, None = the hidden size. Returns the
    updated cache too.
    """
    runner = architecture.runner
    hidden, head_dim = runner.hidden_size, runner.head_dim
    heads, kv_heads = runner.num_attention_heads, runner.num_key_value_heads
    with graph.module("self_attn", nodes="attn"):
        counts = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
        widths = {name: count * head_dim for name, count in counts.items()}
        projected = graph.linears("qkv_proj", widths, x, fan_in or hidden, architecture.qkv_bias)
        q, k, v = (
            inputs.tokens.split_heads(rows, count, head_dim)
            for rows, count in zip(projected, counts.values(), strict=True)
        )
        q = rotate_heads(graph, architecture, "q_norm", q, *inputs.cos_sin)
        k = rotate_heads(graph, architecture, "k_norm", k, *inputs.cos_sin)
        attended, present = graph.cached_attention(
            q, k, v, cache, inputs.write_index, mask, scale=head_dim**-0.5
        )
        attended = inputs.tokens.merge_heads(attended, heads * head_dim)
        return graph.linear("o_proj", attended, heads * head_dim, hidden, architecture.output_bias), present


def rotate_heads(
    graph: ModelBuilder, architecture: DecoderArchitecture, norm: str, x: ir.Value, *rope: ir.Value
) -> ir.Value:
    """Add the norm of heads, if the decoder has one, and RoPE.

    x and the result: [B,heads,S,D]; rope: cos, sin and, if these are tables, position ids.
    """
    if architecture.head_norms:
        x = graph.rms_norm(norm, x, architecture.runner.head_dim, architecture.epsilon)
    rotary_dim = architecture.runner.rope.rotary_dim
    partial = {"rotary_embedding_dim": rotary_dim} if rotary_dim < architecture.runner.head_dim else {}
    return graph.op("RotaryEmbedding", x, *rope, **partial)
