# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints in every quantised layout.

Each comes with the model that it stands for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import quantizers as q
import torch
import transformers
from safetensors.torch import save_file
from text_families import STOP, draw_weights

from fixtures.tiny_checkpoint import CHAT_TEMPLATE, make_tokenizer, write_json

INPUTS = (128, 256)  # of the layers: the hidden size and the feed-forward block's
SIZES = {
    "hidden_size": INPUTS[0],
    "intermediate_size": INPUTS[1],
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
BLOCK = (48, 96)  # divides no size of the layers
Quantizer = Callable[[torch.Tensor], tuple[q.Stored, torch.Tensor]]


class Case(NamedTuple):
    """A layout: its config, and how a layer is quantised."""

    config: dict[str, Any]
    quantize: Quantizer
    file: str = ""  # of a config beside config.json
    lm_head: bool = False  # whether the LM head is quantised too
    kept: str = "lm_head"  # part of the names of layers that are not quantised


def shuffled(inputs: int) -> torch.Tensor:
    """Return an order of inputs, the same for all layers that read the same input."""
    return torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))


def act_order(quantize: Callable, **options: Any) -> Quantizer:
    return lambda weight: quantize(weight, order=shuffled(weight.shape[1]), **options)


def awq(group: int) -> Case:
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Case(config, partial(q.awq, group=group))


def gptq(
    bits: int, group: int, symmetric: bool, ordered: bool = False, version: int = 1, **more: Any
) -> Case:
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric}
    config |= {"desc_act": ordered, "checkpoint_format": {1: "gptq", 2: "gptq_v2"}[version]}
    options = {"bits": bits, "group": group, "symmetric": symmetric, "version": version}
    return Case(config, act_order(q.gptq, **options) if ordered else partial(q.gptq, **options), **more)


def compressed(quantize: Quantizer, form: str, **weights: Any) -> Case:
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
    }
    return Case(config, quantize)


def packed(bits: int, group: int, symmetric: bool, ordered: bool = False, **options: Any) -> Case:
    options |= {"bits": bits, "group": group, "symmetric": symmetric}
    strategy = "channel" if group == -1 else "group"
    return compressed(
        act_order(q.packed, **options) if ordered else partial(q.packed, **options),
        "pack-quantized",
        num_bits=bits,
        type="int",
        symmetric=symmetric,
        strategy=strategy,
        group_size=None if group == -1 else group,
        actorder="group" if ordered else None,
    )


INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
FLOAT8 = {"num_bits": 8, "type": "float"}
MODELOPT = {"quant_algo": "FP8", "exclude_modules": ["lm_head", "*.gate_proj"]}
CASES = {
    **{f"awq-{group}": awq(group) for group in (32, 64, 128, -1)},
    "gptq-4-symmetric-128": gptq(4, 128, True),
    "gptq-4-channel": gptq(4, -1, True),
    "gptq-4-zeros-version-1": gptq(4, 32, False),
    "gptq-4-zeros-version-2": gptq(4, 64, False, version=2),
    "gptq-4-act-order": gptq(4, 32, True, ordered=True),
    "gptq-4-act-order-zeros": gptq(4, 64, False, ordered=True, version=2),
    "gptq-4-lm-head": gptq(4, 128, True, lm_head=True),
    "gptq-8-symmetric": gptq(8, 64, True),
    "gptq-8-zeros": gptq(8, 128, False, version=2),
    "packed-4-symmetric-128": packed(4, 128, True),
    "packed-4-channel": packed(4, -1, True),
    "packed-4-zeros": packed(4, 32, False),
    "packed-4-zeros-of-8-bits": packed(4, 64, False, packed_zeros=False),
    "packed-4-act-order": packed(4, 64, True, ordered=True),
    "packed-8": packed(8, 32, True),
    "packed-8-channel-zeros": packed(8, -1, False),
    "int8-channel": compressed(q.int8, "int-quantized", **INT8, symmetric=True),
    "int8-zeros": compressed(partial(q.int8, symmetric=False), "int-quantized", **INT8, symmetric=False),
    "fp8-channel": compressed(q.fp8_channel, "float-quantized", **FLOAT8, strategy="channel"),
    "fp8-tensor": compressed(q.fp8_tensor, "naive-quantized", **FLOAT8, strategy="tensor"),
    "fp8-block": compressed(
        partial(q.fp8_block, block=BLOCK, name="weight_scale"),
        "float-quantized",
        **FLOAT8,
        strategy="block",
        block_structure=list(BLOCK),
    ),
    "fp8-block-of-transformers": Case(
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [64, 128]},
        partial(q.fp8_block, block=(64, 128), name="weight_scale_inv"),
    ),
    "modelopt-fp8": Case(MODELOPT, q.fp8_tensor, file="hf_quant_config.json", kept="gate_proj"),
    "modelopt-fp8-in-config": Case({"quant_method": "modelopt", **MODELOPT}, q.fp8_tensor),
}


def write_checkpoint(directory: Path, case: Case, family: str = "qwen3") -> torch.nn.Module:
    """Write a checkpoint; return transformers' model with the weights it stands for."""
    tokenizer = make_tokenizer()
    stop = tokenizer.token_to_id(STOP)
    sizes = {**SIZES, "vocab_size": tokenizer.get_vocab_size(), "eos_token_id": stop}
    config = transformers.AutoConfig.for_model(family, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    draw_weights(model, stop, torch.Generator().manual_seed(0))
    tensors = {}
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            module = name.removesuffix(".weight")
            kept = "lm_head" in name and not case.lm_head
            if weight.dim() != 2 or "embed" in name or kept or case.kept in name.replace("lm_head", ""):
                tensors[name] = weight.clone()
                continue
            stored, rounded = case.quantize(weight)
            tensors |= {f"{module}.{suffix}": tensor.contiguous() for suffix, tensor in stored.items()}
            weight.copy_(rounded)
    config.save_pretrained(directory)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_config(directory, case)
    write_json(directory / "generation_config.json", {"eos_token_id": [stop]})
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return model


def write_config(directory: Path, case: Case) -> None:
    """Write how the layers are quantised to where the layout has it."""
    if case.file:
        write_json(directory / case.file, {"quantization": case.config})
        return
    path = directory / "config.json"
    write_json(path, {**json.loads(path.read_text()), "quantization_config": case.config})
