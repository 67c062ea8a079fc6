# SPDX-License-Identifier: Apache-2.0
"""`config.json` of hybrids in GGUF files: Qwen3.5 and Nemotron-H.

Source of the keys: ggml-org/llama.cpp, conversion/qwen.py and conversion/nemotron.py.
"""

from __future__ import annotations

from typing import Any

from edgellm_ros.builder.gguf.config import no_rope_scaling, read_head_dim, shared_config
from edgellm_ros.builder.gguf.keys import Keys

RECURRENT = "attention.recurrent_layers"
EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")  # the first that a file has


def qwen35_config(keys: Keys) -> dict[str, Any]:
    """Make the configuration of a Qwen3.5; ValueError as in `dense_config`."""
    no_rope_scaling(keys)
    heads, layers, values = keys.integer("attention.head_count"), own_layers(keys), value_heads(keys)
    head_dim = read_head_dim(keys, heads)
    rotated = keys.integer("rope.dimension_count", head_dim)
    if keys.has(RECURRENT):
        recurrent = keys.flags(RECURRENT, layers)
    else:
        interval = keys.integer("full_attention_interval", 4)
        recurrent = [(i + 1) % interval != 0 for i in range(layers)]
    return {
        **shared_config(keys),
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": layers,
        "layer_types": ["linear_attention" if each else "full_attention" for each in recurrent],
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": any(name.endswith(".attn_q.bias") for name in keys.file.tensors),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "partial_rotary_factor": rotated / head_dim,
        "linear_num_key_heads": keys.integer("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": keys.integer("ssm.state_size"),
        "linear_value_head_dim": keys.integer("ssm.inner_size") // values,
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
        "mtp_num_hidden_layers": keys.integer("nextn_predict_layers", 0, least=0),
    }


def own_layers(keys: Keys) -> int:
    """Read the number of layers without those of an MTP head, which are the last."""
    layers, tensors = keys.integer("block_count"), len(keys.file.tensors)
    if layers > tensors:  # a list with an entry of each layer is made
        raise keys.fail("block_count", f"the file has {tensors} tensors")
    heads = keys.integer("nextn_predict_layers", 0, least=0)
    if heads >= layers:
        raise keys.fail("nextn_predict_layers", f"expected less than block_count {layers}")
    return layers - heads


def value_heads(keys: Keys) -> int:
    """Read the number of heads of recurrent values, which share `ssm.inner_size`."""
    heads = keys.integer("ssm.time_step_rank")
    if keys.integer("ssm.inner_size") % heads:
        raise keys.fail("ssm.inner_size", f"expected a multiple of ssm.time_step_rank {heads}")
    return heads


def nemotron_h_config(keys: Keys) -> dict[str, Any]:
    """Make the configuration of a Nemotron-H; ValueError as in `dense_config`.

    A layer without KV heads and without a feed-forward size is a Mamba2 layer.
    """
    if keys.integer("nextn_predict_layers", 0, least=0):
        raise keys.fail("nextn_predict_layers", "MTP heads of Nemotron-H are not supported")
    layers, tensors = own_layers(keys), keys.file.tensors
    inner, kv_heads = (
        keys.of_layers(key, layers) for key in ("feed_forward_length", "attention.head_count_kv")
    )
    if any(size and heads for size, heads in zip(inner, kv_heads, strict=True)):
        raise keys.fail("feed_forward_length", "expected 0 in layers with attention")
    heads, mamba_heads = _only(keys, "attention.head_count", layers), value_heads(keys)
    letters = ["-" if size else "*" if count else "M" for size, count in zip(inner, kv_heads, strict=True)]
    return {
        **shared_config(keys),
        "intermediate_size": _only(keys, "feed_forward_length", layers),
        "hybrid_override_pattern": "".join(letters),
        "num_attention_heads": heads,
        "num_key_value_heads": _only(keys, "attention.head_count_kv", layers),
        "head_dim": read_head_dim(keys, heads),
        "attention_bias": any(name.endswith(".attn_q.bias") for name in tensors),
        "mlp_bias": any(name.endswith(".ffn_up.bias") for name in tensors),
        "layer_norm_epsilon": keys.number(next((key for key in EPSILONS if keys.has(key)), EPSILONS[0])),
        "mamba_num_heads": mamba_heads,
        "mamba_head_dim": keys.integer("ssm.inner_size") // mamba_heads,
        "n_groups": keys.integer("ssm.group_count"),
        "ssm_state_size": keys.integer("ssm.state_size"),
        "conv_kernel": keys.integer("ssm.conv_kernel"),
        "use_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in tensors),
        "use_bias": any(name.endswith(".ssm_in.bias") for name in tensors),
    }


def _only(keys: Keys, key: str, layers: int) -> int:
    """Read a number that is the same in all layers that have one."""
    found = sorted(set(keys.of_layers(key, layers)) - {0})
    if len(found) > 1:
        raise keys.fail(key, "layers of different sizes are not supported")
    return found[0] if found else 1
