# SPDX-License-Identifier: Apache-2.0
"""Random checkpoints of the text families, and transformers' own answers.

transformers saves the checkpoints. Each family's settings take all their values within its eight checkpoints.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from edgellm_ros.engine.device import CpuDevice
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.runtime.prompt.rope import make_rope_table
from fixtures.tiny_checkpoint import CHAT_TEMPLATE, make_tokenizer, write_json

COUNT = 8  # checkpoints of each family
STOP = "<|im_end|>"
LIMITS = {"max_input_len": 128, "max_kv_cache_capacity": 192}
MAX_TOKENS = 32
EMBEDDING_SCALE = 0.2  # small beside what the layers add; else a tied head repeats the last token
PROMPTS = ("What do you see?", "go to the red box behind the table and wait there", "", "turn left at once")

SIZES: dict[str, list] = {
    "hidden_size": [48, 64, 96],
    "intermediate_size": [40, 96, 112],
    "num_hidden_layers": [1, 2, 3, 4],
    ("num_attention_heads", "num_key_value_heads"): [(4, 4), (4, 2), (6, 2), (8, 1), (2, 2)],
    "max_position_embeddings": [512, 4096],
    "rms_norm_eps": [1e-6, 1e-5],
    "tie_word_embeddings": [False, True],
    "padded_vocabulary": [0, 13],
    "transformers_4": [False, True],
    "shards": [1, 3],
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    {**LLAMA3, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 256},
]
THETAS = [1e4, 5e5, 5e6]
WINDOWS = {
    "use_sliding_window": [False, True, True, True],
    "sliding_window": [20, 40, 1000],  # 1000 is more than the cache holds
    "max_window_layers": [0, 1, 2],
    "mixed_layer_types": [False, True],
}
HEAD_DIMS = [8, 16, 24, 32]
SETTINGS: dict[str, dict] = {
    "qwen2": {**SIZES, **WINDOWS, "hidden_size": [48, 96, 192]},
    "qwen3": {**SIZES, **WINDOWS, "head_dim": HEAD_DIMS, "attention_bias": [False, True]},
    "llama": {
        **SIZES,
        "hidden_size": [48, 96, 192],
        "head_dim": [None, *HEAD_DIMS],
        "attention_bias": [False, True],
        "mlp_bias": [False, True],
    },
    "mistral": {**SIZES, "head_dim": HEAD_DIMS, "sliding_window": [20, None, 40, 1000]},
}
FAMILIES = tuple(SETTINGS)
CASES = [(family, index) for family in FAMILIES for index in range(COUNT)]


def choose(family: str) -> list[dict[str, Any]]:
    """Choose the settings of a family's checkpoints.

    Each setting has each of its values in turn, and the order is shuffled.
    """
    rng = np.random.default_rng(FAMILIES.index(family))
    chosen: list[dict[str, Any]] = [{} for _ in range(COUNT)]
    for name, values in {**SETTINGS[family], "rope": ROPE, "rope_theta": THETAS}.items():
        order = rng.permutation([index % len(values) for index in range(COUNT)])
        for settings, index in zip(chosen, order, strict=True):
            value = values[index]
            settings |= dict(zip(name, value, strict=True)) if isinstance(name, tuple) else {name: value}
    return chosen


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of one family."""

    directory: Path
    settings: dict[str, Any]

    def reference(self) -> transformers.PreTrainedModel:
        model = transformers.AutoModelForCausalLM.from_pretrained(self.directory, dtype=torch.float32)
        return model.eval()


def write_checkpoint(directory: Path, family: str, index: int) -> Checkpoint:
    """Write a checkpoint with random weights, with tokenizer and chat template."""
    settings = choose(family)[index]
    rng = np.random.default_rng([FAMILIES.index(family), index])
    tokenizer = make_tokenizer()
    stop = tokenizer.token_to_id(STOP)
    config = make_config(family, settings, tokenizer.get_vocab_size(), stop, rng)
    model = transformers.AutoModelForCausalLM.from_config(config)
    draw_weights(model, stop, torch.Generator().manual_seed(index))
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    model.save_pretrained(directory, max_shard_size=size // settings["shards"] + 1)
    if settings["transformers_4"]:
        spell_as_transformers_4(directory / "config.json")
    write_json(directory / "generation_config.json", {"eos_token_id": [stop]})
    write_json(directory / "tokenizer_config.json", {"eos_token": STOP})
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return Checkpoint(directory, settings)


def make_config(family: str, settings: dict[str, Any], vocabulary: int, stop: int, rng: np.random.Generator):
    values = {key: value for key, value in settings.items() if key not in ("transformers_4", "shards")}
    vocabulary += values.pop("padded_vocabulary")
    rope = {"rope_theta": values.pop("rope_theta"), **values.pop("rope")}
    heads = values["num_attention_heads"]
    if rope["rope_type"] == "longrope":
        pairs = (values.get("head_dim") or values["hidden_size"] // heads) // 2
        rope |= {name: rng.uniform(1, 3, pairs).tolist() for name in ("short_factor", "long_factor")}
    if values.pop("mixed_layer_types", False) and values["use_sliding_window"]:
        kinds = rng.choice(["full_attention", "sliding_attention"], values["num_hidden_layers"])
        values["layer_types"] = kinds.tolist()
    return transformers.AutoConfig.for_model(
        family, **values, vocab_size=vocabulary, eos_token_id=stop, rope_parameters=rope
    )


def draw_weights(model: torch.nn.Module, stop: int, generator: torch.Generator) -> None:
    """Draw matrices that preserve magnitudes, scales near 1 and biases near 0.

    No answer stops by itself.
    """
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(generator=generator)
            if weight.dim() == 2:
                weight *= EMBEDDING_SCALE if "embed_tokens" in name else weight.shape[1] ** -0.5
            elif name.endswith("weight"):
                weight.mul_(0.2).add_(1)
            else:
                weight *= 0.3
        model.get_output_embeddings().weight[stop] = 0


def spell_as_transformers_4(path: Path) -> None:
    """Write the configuration as transformers 4 wrote it."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    if rope["rope_type"] == "linear":
        rope["type"] = rope.pop("rope_type")
    config["torch_dtype"] = config.pop("dtype")
    if len(set(config.get("layer_types") or ["full_attention"])) == 1:
        config.pop("layer_types", None)
    write_json(path, config)


def rope_rows(config: EngineConfig, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Compute cos and sin [1, stop - start, R/2] as the runtime does."""
    table = make_rope_table(config.llm.rope, stop, CpuDevice())
    return table.cos.array[None, start:], table.sin.array[None, start:]


def reference_logits(model: torch.nn.Module, ids: list[int]) -> np.ndarray:
    """Compute the logits at every position, [S, V]."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()
