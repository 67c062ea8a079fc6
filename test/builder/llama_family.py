# SPDX-License-Identifier: Apache-2.0
"""A model family of the tests' own, made of the builder's shared parts: Llama, text only.

This is all that a family needs; nothing in the package knows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tiny_checkpoint import CHAT_TEMPLATE, make_tokenizer, random_tensors, write_json

from edgellm_ros.builder.families import Family
from edgellm_ros.builder.layers import ModelBuilder
from edgellm_ros.builder.llm_graph import llm_inputs, llm_outputs
from edgellm_ros.builder.lm_head import find_lm_head
from edgellm_ros.builder.model import LLMOptions, Model
from edgellm_ros.builder.vocabulary import read_generation_config, special_tokens, stop_token_ids
from edgellm_ros.engine_directory.config import LanguageModelConfig, RopeConfig

EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Llama:
    config: LanguageModelConfig
    inner: int
    epsilon: float


def read(checkpoint, config, weights) -> Model:
    heads = config.size("num_attention_heads")
    llm = LanguageModelConfig(
        hidden_size=config.size("hidden_size"),
        num_hidden_layers=config.size("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=config.size("num_key_value_heads"),
        head_dim=config.size("hidden_size") // heads,
        vocab_size=config.size("vocab_size"),
        reduced_vocab_size=0,
        max_position_embeddings=config.size("max_position_embeddings"),
        num_deepstack_features=0,
        rope=RopeConfig(config.section("rope_parameters").number("rope_theta"), (), False),
    )
    generation = read_generation_config(checkpoint)
    llama = Llama(llm, config.size("intermediate_size"), config.number("rms_norm_eps"))
    return Model(
        llm=llm,
        embedding=EMBEDDING,
        lm_head=find_lm_head(weights, EMBEDDING, config.flag("tie_word_embeddings", False)),
        special_tokens=special_tokens(config, config, generation),
        stop_token_ids=stop_token_ids(config, generation),
        build_llm=partial(build, llama, weights),
    )


def build(llama: Llama, weights, options: LLMOptions) -> ModelBuilder:
    graph = ModelBuilder("llm", weights, options.precision, options.lora)
    config, hidden, epsilon = llama.config, llama.config.hidden_size, llama.epsilon
    inputs, presents = llm_inputs(graph, config, options.capacity), []
    tokens, size = inputs.tokens, config.head_dim
    counts = {
        "q_proj": config.num_attention_heads,
        "k_proj": config.num_key_value_heads,
        "v_proj": config.num_key_value_heads,
    }
    x = tokens.flatten(inputs.embeds, hidden)
    for i in range(config.num_hidden_layers):
        with graph.module(f"model.layers.{i}"):
            normed = graph.rms_norm("input_layernorm", x, hidden, epsilon)
            with graph.module("self_attn"):
                widths = {name: count * size for name, count in counts.items()}
                rows = graph.linears("qkv_proj", widths, normed, hidden)
                q, k, v = (
                    tokens.split_heads(part, count, size)
                    for part, count in zip(rows, counts.values(), strict=True)
                )
                q, k = (graph.op("RotaryEmbedding", part, *inputs.cos_sin) for part in (q, k))
                where = inputs.caches[i], inputs.write_index, inputs.mask
                attended, present = graph.cached_attention(q, k, v, *where, scale=size**-0.5)
                presents.append(present)
                x = graph.op(
                    "Add", x, graph.linear("o_proj", tokens.merge_heads(attended, hidden), hidden, hidden)
                )
            normed = graph.rms_norm("post_attention_layernorm", x, hidden, epsilon)
            x = graph.op("Add", x, graph.swiglu("mlp", normed, hidden, llama.inner))
    with graph.module("model"):
        x = graph.rms_norm("norm", tokens.unflatten(x, hidden), hidden, epsilon)
    logits = options.head.logits(graph, graph.rows(x, inputs.last_token_ids, hidden))
    llm_outputs(graph, config, options.capacity, options.head, logits, presents, {})
    return graph


LLAMA = Family("llama", ("llama",), read)


def write_llama_checkpoint(directory: Path) -> Path:
    """A tiny Llama with random weights, as transformers writes one."""
    directory.mkdir()
    tokenizer = make_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
    }
    write_json(directory / "config.json", config)
    write_json(directory / "generation_config.json", {"eos_token_id": [config["eos_token_id"]]})
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config["vocab_size"], 64), "model.norm.weight": (64,)}
    for i in range(3):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.{name}.weight": (64,) for name in ("input_layernorm", "post_attention_layernorm")
        }
        for name, fan_out in (("q_proj", 64), ("k_proj", 32), ("v_proj", 32), ("o_proj", 64)):
            shapes[f"{layer}.self_attn.{name}.weight"] = (fan_out, 64)
        shapes |= {f"{layer}.mlp.{name}.weight": (96, 64) for name in ("gate_proj", "up_proj")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (64, 96)
    tensors = random_tensors(shapes, np.random.default_rng(0))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
