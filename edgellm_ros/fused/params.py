# SPDX-License-Identifier: Apache-2.0
"""The parameters of the fused kernels: a dataclass per kernel.

Names, order and types are those of the kernel in `kernels/` (test/kernels/test_kernel_params.py). Every
parameter has 64 bits: an address on the device, 0 = none, or a number.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Annotated, ClassVar

U16 = Annotated[int, "const u16*"]  # fp16 or bf16
OutU16 = Annotated[int, "u16*"]
F32 = Annotated[int, "const float*"]
OutF32 = Annotated[int, "float*"]
I64 = Annotated[int, "const i64*"]
OutI64 = Annotated[int, "i64*"]
Cache = Annotated[int, "const CacheValue*"]  # the KV cache's type
OutCache = Annotated[int, "CacheValue*"]
Bytes = Annotated[int, "const unsigned char*"]
Adapters = Annotated[int, "const Adapter*"]
Number = Annotated[int, "i64"]


class KernelParams:
    """Parameters of the kernel `kernel` in the file `source`."""

    source: ClassVar[str]
    kernel: ClassVar[str]

    def pack(self) -> ctypes.Array[ctypes.c_int64]:
        """Return the values in the order of the kernel's parameters."""
        values = vars(self).values()
        return (ctypes.c_int64 * len(values))(*values)


@dataclass(kw_only=True)
class PrepQkvParams(KernelParams):
    """RMSNorm of the embeddings or the residual stream, to x of `qkv`."""

    source: ClassVar[str] = "decoder.cu"
    kernel: ClassVar[str] = "prep_qkv"

    norm: U16
    embeds: U16
    residual: OutI64
    hidden: OutU16
    x: OutU16
    rows: Number
    weights: U16


@dataclass(kw_only=True)
class QkvParams(KernelParams):
    """Queries, keys and values of new tokens, as partials."""

    source: ClassVar[str] = "decoder.cu"
    kernel: ClassVar[str] = "qkv"

    weights: U16
    norm: U16
    embeds: U16
    residual: OutI64
    partials: OutF32
    hidden: OutU16
    x: U16
    rows: Number
    adapters: Adapters
    tokens: Number


@dataclass(kw_only=True)
class AttentionParams(KernelParams):
    """Decode attention of one token per sequence."""

    source: ClassVar[str] = "decoder.cu"
    kernel: ClassVar[str] = "attention"

    partials: F32
    bias: U16
    q_norm: U16
    k_norm: U16
    cos_table: F32
    sin_table: F32
    position_ids: I64
    kv_length: I64
    key_cache: OutCache
    value_cache: OutCache
    partial_out: OutF32
    max_and_sum: OutF32
    window: Number


@dataclass(kw_only=True)
class RopeAppendKvParams(KernelParams):
    """Queries, keys and values of new tokens; keys and values go to the cache."""

    source: ClassVar[str] = "decoder.cu"
    kernel: ClassVar[str] = "rope_append_kv"

    partials: F32
    bias: U16
    q_norm: U16
    k_norm: U16
    cos_table: F32
    sin_table: F32
    position_ids: I64
    kv_length: I64
    key_cache: OutCache
    value_cache: OutCache
    queries: OutU16
    tokens: Number


@dataclass(kw_only=True)
class TreeAttentionParams(KernelParams):
    """Attention of several tokens per sequence."""

    source: ClassVar[str] = "decoder.cu"
    kernel: ClassVar[str] = "tree_attention"

    queries: U16
    kv_length: I64
    key_cache: OutCache
    value_cache: OutCache
    partial_out: OutF32
    max_and_sum: OutF32
    window: Number
    mask: Bytes
    tokens: Number
    splits: Number


@dataclass(kw_only=True)
class BatchAttentionParams(KernelParams):
    """Attention of a batch of single tokens; appends their KV rows to the cache."""

    source: ClassVar[str] = "decoder.cu"
    kernel: ClassVar[str] = "batch_attention"

    partials: F32
    bias: U16
    q_norm: U16
    k_norm: U16
    cos_table: F32
    sin_table: F32
    position_ids: I64
    kv_length: I64
    key_cache: OutCache
    value_cache: OutCache
    partial_out: OutF32
    max_and_sum: OutF32
    window: Number
    splits: Number


@dataclass(kw_only=True)
class CombineSplitsParams(KernelParams):
    """The attention's splits, combined to x of `o`."""

    source: ClassVar[str] = "decoder.cu"
    kernel: ClassVar[str] = "combine_splits"

    partial_out: F32
    max_and_sum: F32
    kv_length: I64
    x: OutU16
    window: Number
    tokens: Number
    splits: Number
    weights: U16
    partials: F32
    bias: U16


@dataclass(kw_only=True)
class OParams(KernelParams):
    """Output projection, added to the residual stream."""

    source: ClassVar[str] = "decoder.cu"
    kernel: ClassVar[str] = "o"

    weights: U16
    bias: U16
    partial_out: F32
    max_and_sum: F32
    kv_length: I64
    residual: OutI64
    ready: U16
    window: Number
    rows: Number
    tokens: Number
    splits: Number
    adapters: Adapters


@dataclass(kw_only=True)
class PrepInProjParams(KernelParams):
    """RMSNorm of the embeddings or the residual stream, to x of `in_proj`."""

    source: ClassVar[str] = "decoder.cu"
    kernel: ClassVar[str] = "prep_in_proj"

    norm: U16
    embeds: U16
    residual: OutI64
    hidden: OutU16
    x: OutU16
    rows: Number
    weights: U16


@dataclass(kw_only=True)
class InProjParams(KernelParams):
    """All inputs of a recurrent mixer, as partials."""

    source: ClassVar[str] = "decoder.cu"
    kernel: ClassVar[str] = "in_proj"

    weights: U16
    norm: U16
    embeds: U16
    residual: OutI64
    partials: OutF32
    hidden: OutU16
    x: U16
    rows: Number


@dataclass(kw_only=True)
class MixParams(KernelParams):
    """Convolution, state and gate of a recurrent mixer."""

    source: ClassVar[str] = "decoder.cu"
    kernel: ClassVar[str] = "mix"

    partials: F32
    taps: F32
    conv_bias: F32
    decay: F32
    dt_bias: F32
    skip: F32
    norm: F32
    conv_states: F32
    states: F32
    next_conv_states: OutF32
    next_states: OutF32
    mixed: OutF32
    squares: OutF32
    conv_inputs: OutF32
    keys: OutF32
    values: OutF32
    decays: OutF32
    strengths: OutF32
    tokens: Number


@dataclass(kw_only=True)
class PrepOutProjParams(KernelParams):
    """The norm of a recurrent mixer's result, to x of `out_proj`."""

    source: ClassVar[str] = "decoder.cu"
    kernel: ClassVar[str] = "prep_out_proj"

    mixed: F32
    squares: F32
    x: OutU16
    weights: U16


@dataclass(kw_only=True)
class OutProjParams(KernelParams):
    """Output projection of a recurrent mixer, added to the residual stream."""

    source: ClassVar[str] = "decoder.cu"
    kernel: ClassVar[str] = "out_proj"

    weights: U16
    mixed: F32
    squares: F32
    residual: OutI64
    ready: U16
    rows: Number


@dataclass(kw_only=True)
class PrepGateUpParams(KernelParams):
    """RMSNorm of the residual stream, to x of `gate_up`."""

    source: ClassVar[str] = "decoder.cu"
    kernel: ClassVar[str] = "prep_gate_up"

    norm: U16
    residual: OutI64
    x: OutU16
    rows: Number
    weights: U16


@dataclass(kw_only=True)
class GateUpParams(KernelParams):
    """Gate and up projection, as partials."""

    source: ClassVar[str] = "decoder.cu"
    kernel: ClassVar[str] = "gate_up"

    weights: U16
    norm: U16
    residual: OutI64
    partials: OutF32
    x: U16
    rows: Number
    adapters: Adapters
    tokens: Number


@dataclass(kw_only=True)
class PrepDownParams(KernelParams):
    """SiLU(gate) * up, or the square of a ReLU, to x of `down`."""

    source: ClassVar[str] = "decoder.cu"
    kernel: ClassVar[str] = "prep_down"

    bias: U16
    partials: F32
    x: OutU16
    weights: U16


@dataclass(kw_only=True)
class DownParams(KernelParams):
    """Down projection, added to the residual stream."""

    source: ClassVar[str] = "decoder.cu"
    kernel: ClassVar[str] = "down"

    weights: U16
    bias: U16
    gate_up_bias: U16
    partials: F32
    residual: OutI64
    ready: U16
    rows: Number
    adapters: Adapters
    tokens: Number


@dataclass(kw_only=True)
class PrepLmHeadParams(KernelParams):
    """RMSNorm of the residual stream, to x of `lm_head`."""

    source: ClassVar[str] = "decoder.cu"
    kernel: ClassVar[str] = "prep_lm_head"

    norm: U16
    residual: OutI64
    hidden: OutU16
    x: OutU16
    rows: Number


@dataclass(kw_only=True)
class LmHeadParams(KernelParams):
    """Logits."""

    source: ClassVar[str] = "decoder.cu"
    kernel: ClassVar[str] = "lm_head"

    weights: U16
    norm: U16
    residual: OutI64
    logits: OutF32
    hidden: OutU16
    x: U16
    rows: Number


@dataclass(kw_only=True)
class LastStateParams(KernelParams):
    """The residual stream after the last layer, for a draft head."""

    source: ClassVar[str] = "decoder.cu"
    kernel: ClassVar[str] = "last_state"

    residual: I64
    out: OutU16
    rows: Number


@dataclass(kw_only=True)
class JoinedQkvParams(KernelParams):
    """`qkv` of a draft head's first layer, of two norms side by side."""

    source: ClassVar[str] = "draft.cu"
    kernel: ClassVar[str] = "joined_qkv"

    weights: U16
    embed_norm: U16
    state_norm: U16
    embeds: U16
    states: U16
    residual: OutI64
    partials: OutF32
    begins_normed: Number
    rows: Number


@dataclass(kw_only=True)
class DraftHeadParams(KernelParams):
    """Logits and next states of a draft head."""

    source: ClassVar[str] = "draft.cu"
    kernel: ClassVar[str] = "draft_head"

    weights: U16
    norm: U16
    residual: OutI64
    last_token_ids: I64
    logits: OutF32
    states: OutU16
    batch: Number
    tokens: Number
    chosen: Number
    normed_states: Number


@dataclass(kw_only=True)
class DraftChainParams(KernelParams):
    """A chain of drafted tokens."""

    source: ClassVar[str] = "chain.cu"
    kernel: ClassVar[str] = "draft_chain"

    qkv: U16
    qkv_bias: U16
    q_norm: U16
    k_norm: U16
    o: U16
    o_bias: U16
    gate_up: U16
    gate_up_bias: U16
    down: U16
    down_bias: U16
    lm_head: U16
    embed_norm: U16
    state_norm: U16
    post_norm: U16
    norm: U16
    embedding: U16
    tokens_of_embedding: Number
    token_of_logit: I64
    cos_table: F32
    sin_table: F32
    radians: F32
    positions: Number
    lengths: OutI64
    deltas: F32
    key_cache: OutU16
    value_cache: OutU16
    pending: I64
    counts: I64
    states: U16
    newest: OutI64
    table_tokens: OutI64
    table_scores: OutF32
    table_parents: OutI64
    table_nodes: OutI64
    table_levels: Number
    last_tokens: I64
    tree_tokens: OutI64
    tree_parents: OutI64
    tree_depths: OutI64
    tree_size: Number


@dataclass(kw_only=True)
class DraftPromptParams(KernelParams):
    """A draft head's KV rows of a prompt."""

    source: ClassVar[str] = "prompt.cu"
    kernel: ClassVar[str] = "draft_prompt"

    qkv: U16
    qkv_bias: U16
    k_norm: U16
    embed_norm: U16
    state_norm: U16
    embeds: U16
    states: U16
    cos_table: F32
    sin_table: F32
    lengths: I64
    key_cache: OutU16
    value_cache: OutU16
    tokens: Number


@dataclass(kw_only=True)
class NormTokensParams(KernelParams):
    """RMSNorm of the residual stream of a prefill."""

    source: ClassVar[str] = "prefill.cu"
    kernel: ClassVar[str] = "norm_tokens"

    norm: U16
    embeds: U16 = 0
    bias: U16 = 0
    deepstack: U16 = 0
    residual: OutF32
    hidden: OutU16 = 0
    state: OutU16 = 0
    x: OutU16


@dataclass(kw_only=True)
class RopeTokensParams(KernelParams):
    """Bias, norm and RoPE of a prefill's queries, keys and values."""

    source: ClassVar[str] = "prefill.cu"
    kernel: ClassVar[str] = "rope_tokens"

    qkv: OutU16
    bias: U16
    q_norm: U16
    k_norm: U16
    cos_table: F32
    sin_table: F32
    position_ids: I64
    kv_length: I64
    key_cache: OutCache
    value_cache: OutCache
    tokens: Number
    stride: Number
    behind: Number


@dataclass(kw_only=True)
class PromptAttentionParams(KernelParams):
    """Attention of a prefill's tokens to the KV cache."""

    source: ClassVar[str] = "prefill.cu"
    kernel: ClassVar[str] = "prompt_attention"

    qkv: U16
    kv_length: I64
    key_cache: Cache
    value_cache: Cache
    out: OutU16
    sums: OutF32
    scales: OutF32
    window: Number
    tokens: Number
    behind: Number
    splits: Number
    mask: Bytes


@dataclass(kw_only=True)
class CombinePromptParams(KernelParams):
    """The splits of a prefill's attention, combined."""

    source: ClassVar[str] = "prefill.cu"
    kernel: ClassVar[str] = "combine_prompt"

    qkv: U16
    sums: F32
    scales: F32
    kv_length: I64
    out: OutU16
    window: Number
    tokens: Number
    behind: Number
    splits: Number


@dataclass(kw_only=True)
class ConvolveTokensParams(KernelParams):
    """The convolution of a recurrent mixer over a prefill's tokens."""

    source: ClassVar[str] = "prompt_mixer.cu"
    kernel: ClassVar[str] = "convolve_tokens"

    projected: U16
    taps: F32
    conv_bias: F32
    conv_states: F32
    next_conv_states: OutF32
    valid_tokens: I64
    convolved: OutU16
    tokens: Number
    first: Number


@dataclass(kw_only=True)
class PrepareChunksParams(KernelParams):
    """What the scan of a chunk needs beside the state before it."""

    source: ClassVar[str] = "prompt_mixer.cu"
    kernel: ClassVar[str] = "prepare_chunks"

    projected: U16
    convolved: U16
    decay: F32
    dt_bias: F32
    valid_tokens: I64
    operands: OutU16
    tokens: Number
    first: Number


@dataclass(kw_only=True)
class ScanChunksParams(KernelParams):
    """From chunk to chunk: the mixer's results, and the states after the last."""

    source: ClassVar[str] = "prompt_mixer.cu"
    kernel: ClassVar[str] = "scan_chunks"

    operands: U16
    states: F32
    next_states: OutF32
    y: OutF32
    tokens: Number


@dataclass(kw_only=True)
class GateTokensParams(KernelParams):
    """Norm and gate of a mixer's results, to x of `out_proj`."""

    source: ClassVar[str] = "prompt_mixer.cu"
    kernel: ClassVar[str] = "gate_tokens"

    projected: U16
    convolved: U16
    y: F32
    norm: F32
    skip: F32
    x: OutU16


@dataclass(kw_only=True)
class ActivateParams(KernelParams):
    """SiLU(gate) * up, or the square of a ReLU, of a prefill's tokens."""

    source: ClassVar[str] = "prefill.cu"
    kernel: ClassVar[str] = "activate"

    gate_up: U16
    bias: U16
    x: OutU16
    rows: Number


@dataclass(kw_only=True)
class LastTokensParams(KernelParams):
    """The residual stream of each prompt's last token, to that of decode steps."""

    source: ClassVar[str] = "prefill.cu"
    kernel: ClassVar[str] = "last_tokens"

    residual: F32
    bias: U16
    deepstack: U16
    last_token_ids: I64
    stream: OutI64
    tokens: Number
    first: Number
    each: Number


@dataclass(kw_only=True)
class KeepLastParams(KernelParams):
    """The input of a product, and the residual stream, of each prompt's last token."""

    source: ClassVar[str] = "prefill.cu"
    kernel: ClassVar[str] = "keep_last"

    x: U16
    residual: F32
    last_token_ids: I64
    last_x: OutU16
    last_residual: OutF32
    width: Number
    tokens: Number
    first: Number


@dataclass(kw_only=True)
class BeginPatchesParams(KernelParams):
    """Pixels in the model's type, and the begin of the residual stream."""

    source: ClassVar[str] = "vision.cu"
    kernel: ClassVar[str] = "begin_patches"

    pixels: F32
    bias: U16
    grid: U16
    index: I64
    weight: F32
    x: OutU16
    residual: OutF32
    patches: Number


@dataclass(kw_only=True)
class BeginTilesParams(KernelParams):
    """`begin_patches` of tiles, whose first rows are class tokens."""

    source: ClassVar[str] = "vision.cu"
    kernel: ClassVar[str] = "begin_tiles"

    pixels: F32
    positions: U16
    x: OutU16
    residual: OutF32
    tokens: Number


@dataclass(kw_only=True)
class NormPatchesParams(KernelParams):
    """LayerNorm of a vision tower's residual stream."""

    source: ClassVar[str] = "vision.cu"
    kernel: ClassVar[str] = "norm_patches"

    norm: U16
    shift: U16
    bias: F32
    residual: F32
    x: OutU16


@dataclass(kw_only=True)
class NormMergedParams(KernelParams):
    """LayerNorm of the patches that become a row of embeddings."""

    source: ClassVar[str] = "vision.cu"
    kernel: ClassVar[str] = "norm_merged"

    norm: U16
    shift: U16
    bias: F32
    residual: F32
    x: OutU16
    tile_rows: Number


@dataclass(kw_only=True)
class RopePatchesParams(KernelParams):
    """Bias and RoPE of the queries, keys and values of patches."""

    source: ClassVar[str] = "vision.cu"
    kernel: ClassVar[str] = "rope_patches"

    qkv: OutU16
    bias: U16
    cos_rows: F32
    sin_rows: F32


@dataclass(kw_only=True)
class PatchAttentionParams(KernelParams):
    """Attention of every patch to all patches of its image or tile."""

    source: ClassVar[str] = "vision.cu"
    kernel: ClassVar[str] = "patch_attention"

    qkv: U16
    out: OutU16
    tokens: Number


@dataclass(kw_only=True)
class ActivateMergedParams(KernelParams):
    """Bias and GELU in a merger of a vision tower."""

    source: ClassVar[str] = "vision.cu"
    kernel: ClassVar[str] = "activate_merged"

    values: OutU16
    bias: U16


@dataclass(kw_only=True)
class JoinStatesParams(KernelParams):
    """Three base states of a prefill's tokens side by side, for a draft head."""

    source: ClassVar[str] = "prefill.cu"
    kernel: ClassVar[str] = "join_states"

    low: U16
    middle: U16
    high: U16
    low_norm: U16
    middle_norm: U16
    high_norm: U16
    bias: U16
    x: OutU16
    fused: OutF32


@dataclass(kw_only=True)
class RoundStatesParams(KernelParams):
    """A draft head's states of a prefill, in the model's type."""

    source: ClassVar[str] = "prefill.cu"
    kernel: ClassVar[str] = "round_states"

    fused: F32
    out: OutU16


@dataclass(kw_only=True)
class FuseParams(KernelParams):
    """States of the base, or embedding and state, times `fc`, as partials."""

    source: ClassVar[str] = "fusion.cu"
    kernel: ClassVar[str] = "fuse"

    weights: U16
    low: U16
    middle: U16
    high: U16
    low_norm: U16
    middle_norm: U16
    high_norm: U16
    partials: OutF32
    rows: Number


@dataclass(kw_only=True)
class FusedStatesParams(KernelParams):
    """The sum of the partials, with the bias."""

    source: ClassVar[str] = "fusion.cu"
    kernel: ClassVar[str] = "fused_states"

    partials: F32
    bias: U16
    out: OutU16
    rows: Number


@dataclass(kw_only=True)
class ExpertQkvParams(KernelParams):
    """Queries, keys and values of a trajectory's rows."""

    source: ClassVar[str] = "expert.cu"
    kernel: ClassVar[str] = "qkv"

    weights: U16
    norm: U16
    q_norm: U16
    k_norm: U16
    cos_rows: F32
    sin_rows: F32
    residual: OutF32
    out: OutU16
    trajectory: F32
    in_weights: U16
    time_row: F32
    clean: I64
    clean_time_row: F32
    rows: Number


@dataclass(kw_only=True)
class ExpertAttentionParams(KernelParams):
    """Attention of a trajectory to the KV cache and to itself."""

    source: ClassVar[str] = "expert.cu"
    kernel: ClassVar[str] = "attention"

    qkv: U16
    kv_length: I64
    keys: Cache
    values: Cache
    out: OutU16


@dataclass(kw_only=True)
class ExpertOParams(KernelParams):
    """Output projection, added to the residual stream."""

    source: ClassVar[str] = "expert.cu"
    kernel: ClassVar[str] = "o"

    weights: U16
    x: U16
    residual: OutF32
    rows: Number


@dataclass(kw_only=True)
class ExpertGateUpParams(KernelParams):
    """SiLU(gate) * up."""

    source: ClassVar[str] = "expert.cu"
    kernel: ClassVar[str] = "gate_up"

    weights: U16
    norm: U16
    residual: F32
    out: OutU16
    rows: Number


@dataclass(kw_only=True)
class ExpertDownParams(KernelParams):
    """Down projection, added to the residual stream."""

    source: ClassVar[str] = "expert.cu"
    kernel: ClassVar[str] = "down"

    weights: U16
    x: U16
    residual: OutF32
    rows: Number


@dataclass(kw_only=True)
class ExpertFinishParams(KernelParams):
    """The velocity, and the trajectory after the step."""

    source: ClassVar[str] = "expert.cu"
    kernel: ClassVar[str] = "finish"

    weights: U16
    bias: U16
    norm: U16
    residual: F32
    trajectory: OutF32
    step: Number
    previous: F32
    factors: F32
    rows: Number
