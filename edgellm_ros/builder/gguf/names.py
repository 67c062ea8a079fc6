# SPDX-License-Identifier: Apache-2.0
"""Names and rows of a GGUF file's tensors as transformers has them.

Source: ggml-org/llama.cpp, gguf-py/gguf/tensor_mapping.py and conversion/llama.py.
"""

from __future__ import annotations

import re

import numpy as np

OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"  # becomes a part of the configuration


def published_name(name: str) -> str:
    """Return a tensor's name in transformers; an unknown one keeps its name."""
    found = LAYER.fullmatch(name)
    if found is not None and found[2] in IN_LAYER:
        return f"model.layers.{found[1]}.{IN_LAYER[found[2]]}.{found[3]}"
    module, _, tensor = name.rpartition(".")
    return f"{OUTSIDE[module]}.{tensor}" if module in OUTSIDE else name


def is_paired(name: str) -> bool:
    """Tell by a tensor's name in the file if its rows are of queries or keys."""
    found = LAYER.fullmatch(name)
    return found is not None and found[2] in ("attn_q", "attn_k")


def rows_from_pairs(rows: int, heads: int) -> np.ndarray:
    """Return for each row in transformers its row in the file of a Llama.

    The file has the two rows that RoPE rotates together beside each other, transformers has them half a head
    apart.
    """
    places = np.arange(rows).reshape(heads, -1, 2)
    return places.transpose(0, 2, 1).reshape(-1)
