# SPDX-License-Identifier: Apache-2.0
"""Names of the tensors of a GGUF file's text model as transformers has them.

Source: ggml-org/llama.cpp, gguf-py/gguf/tensor_mapping.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

LAYER = re.compile(r"blk\.(\d+)\.(.+)")
ROPE_FACTORS = "rope_freqs.weight"  # becomes a part of the configuration


@dataclass(frozen=True)
class Names:
    """Names of an architecture: in the file -> in transformers.

    The names are those of modules, or those of tensors with their last part.
    """

    in_layer: Mapping[str, str]  # after "blk.N." -> after "model.layers.N."
    outside: Mapping[str, str]
    in_mtp: Mapping[str, str] = field(default_factory=dict)  # after "blk.N." -> after "mtp."

    def published(self, name: str, layers: int, prefix: str = "model") -> str:
        """Return a tensor's name in transformers; an unknown one keeps its name.

        layers: of the model; those behind are of its MTP head. prefix: of the decoder's names.
        """
        found = LAYER.fullmatch(name)
        if found is None:
            outside = _lookup(self.outside, name)
            return name if outside is None else outside.replace("model.", f"{prefix}.", 1)
        number, rest = int(found[1]), found[2]
        inside, in_mtp = _lookup(self.in_layer, rest), _lookup(self.in_mtp, rest)
        if self.in_mtp and number >= layers:
            if in_mtp is not None:
                return f"mtp.{in_mtp}"
            return name if inside is None else f"mtp.layers.{number - layers}.{inside}"
        return name if inside is None else f"{prefix}.layers.{number}.{inside}"


def _lookup(names: Mapping[str, str], name: str) -> str | None:
    """Find a tensor's name, or that of its module."""
    module, _, tensor = name.rpartition(".")
    if name in names:
        return names[name]
    return f"{names[module]}.{tensor}" if module in names else None


OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
FEED_FORWARD = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
DENSE = Names(
    {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        **ATTENTION,
        **FEED_FORWARD,
    },
    OUTSIDE,
)
QWEN35 = Names(
    {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        **ATTENTION,
        **FEED_FORWARD,
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
        "ssm_a": "linear_attn.A_log",
        "ssm_dt.bias": "linear_attn.dt_bias",
    },
    OUTSIDE,
    {
        "nextn.eh_proj": "fc",
        "nextn.enorm": "pre_fc_norm_embedding",
        "nextn.hnorm": "pre_fc_norm_hidden",
        "nextn.shared_head_norm": "norm",
    },
)
NEMOTRON_H = Names(
    {
        "attn_norm": "norm",
        "attn_q": "mixer.q_proj",
        "attn_k": "mixer.k_proj",
        "attn_v": "mixer.v_proj",
        "attn_output": "mixer.o_proj",
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
        "ssm_in": "mixer.in_proj",
        "ssm_conv1d": "mixer.conv1d",
        "ssm_norm": "mixer.norm",
        "ssm_out": "mixer.out_proj",
        "ssm_a": "mixer.A_log",
        "ssm_d": "mixer.D",
        "ssm_dt.bias": "mixer.dt_bias",
    },
    {"token_embd": "model.embeddings", "output_norm": "model.norm_f", "output": "lm_head"},
)
