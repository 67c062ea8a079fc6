# SPDX-License-Identifier: Apache-2.0
"""Reads block drafters of DFlash, and builds their decoder.

A drafter is a directory with `config.json` and `model.safetensors`: a few layers like those of Qwen3, and
`fc`, which makes one row of the states of several layers of the language model. Its table of embeddings and
its LM head are those of the language model. Source: the authors' code (z-lab/dflash, dflash/model.py).
"""

from __future__ import annotations

import re
from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection, read_section
from edgellm_ros.builder.config.prompt_files import TOKENIZER_FILE
from edgellm_ros.builder.draft.frequent_tokens import frequent_tokens
from edgellm_ros.builder.draft.head import Block, DraftHead, open_head, read_head_rope
from edgellm_ros.builder.draft.layout import FC, MODULE, layer
from edgellm_ros.builder.draft.tensors import block_shapes, check_tensors
from edgellm_ros.builder.families.model import Model
from edgellm_ros.builder.model.decoder import Attention, Decoder, RMSNorm, SwiGLU, attention_layer
from edgellm_ros.engine_directory.language_model_config import LanguageModelConfig

SECTION = "dflash_config"
ARCHITECTURE = re.compile("DFlash(DraftModel)?")
DRAFTED_TOKENS = 65536


def is_block_drafter(directory: Path) -> bool:
    """Tell whether the configuration in a directory is that of a DFlash drafter."""
    config = read_section(directory / "config.json")
    names = config.data.get("architectures")
    named = isinstance(names, list) and any(ARCHITECTURE.fullmatch(str(name)) for name in names)
    return named or config.has(SECTION)


def read_block_drafter(
    directory: Path, checkpoint: Path, model: Model, drafted_tokens: int | None, capacity: int
) -> DraftHead:
    """Read the drafter in a directory for the model of a checkpoint.

    Of the tensors only headers are read. drafted_tokens: how many tokens it drafts, see `frequent_tokens`;
    None = DRAFTED_TOKENS. capacity: of the model's KV cache. FileNotFoundError or ValueError, which names
    file, key and value, for what does not fit the model or would be computed differently.
    """
    config, names, weights = open_head(directory)
    llm = model.llm

    section = config.section(SECTION) if config.has(SECTION) else config
    for key, expected in (
        ("hidden_size", llm.hidden_size),
        ("vocab_size", llm.vocab_size),
        ("num_target_layers", llm.num_hidden_layers),
    ):
        if config.has(key) and config.size(key) != expected:
            raise config.fail(key, f"the language model has {expected}: a drafter of another model")
    block = Block(
        (section if section.has("block_size") else config).size("block_size"),
        (section if section.has("mask_token_id") else config).integer("mask_token_id"),
        _state_layers(config, section, llm.num_hidden_layers),
    )
    if block.size < 2:
        raise config.fail("block_size", "expected at least 2: the newest token and one that is drafted")
    if not 0 <= block.mask_token_id < llm.vocab_size:
        raise section.fail("mask_token_id", f"expected a token below {llm.vocab_size}")

    drafted = DRAFTED_TOKENS if drafted_tokens is None else drafted_tokens
    tokens = frequent_tokens(checkpoint / TOKENIZER_FILE, llm.vocab_size, drafted)
    vocabulary = llm.vocab_size if tokens is None else len(tokens)
    decoder = _read_decoder(config, vocabulary, model, capacity)
    check_tensors(weights, names, _tensor_shapes(decoder, len(block.state_layers)), set(), config)
    return DraftHead(
        weights,
        decoder,
        None,
        block,
        feeds_back_normed_state=False,
        lm_head=False,
        embedding=False,
        token_of_logit=tokens,
    )


def describe_block_drafter(head: DraftHead) -> str:
    """Tell what was read, and what it weighs as it is stored."""
    assert isinstance(head.entry, Block)
    size = sum(tensor.size for tensor in head.weights.tensors.values())
    return (
        f"DFlash drafter: {size / 1e6:.1f} MB, blocks of {head.entry.size}, "
        f"drafts {head.decoder.config.vocab_size} tokens"
    )


def _state_layers(config: ConfigSection, section: ConfigSection, layers: int) -> tuple[int, ...]:
    """Return the layers, from 1, whose outputs the drafter takes.

    `target_layer_ids` counts from 0. Without it the layers are spread evenly from 1 to `layers` - 3.
    """
    given = section if section.has("target_layer_ids") else config
    if not given.has("target_layer_ids"):
        count, last = config.size("num_hidden_layers"), layers - 3
        spread = [layers // 2]
        if count > 1:
            spread = [round(1 + i * (last - 1) / (count - 1)) for i in range(count)]
        if spread != sorted(set(spread)):
            reason = f"'target_layer_ids' is missing, and no {count} of {layers} layers are spread evenly"
            raise config.fail("num_hidden_layers", reason)
        return tuple(number + 1 for number in spread)
    found = given.integers("target_layer_ids")
    if not found or list(found) != sorted(set(found)) or found[0] < 0 or found[-1] >= layers:
        raise given.fail("target_layer_ids", f"expected rising layers from 0 to {layers - 1}")
    return tuple(number + 1 for number in found)


def _read_decoder(config: ConfigSection, vocabulary: int, model: Model, capacity: int) -> Decoder:
    config.one_of("hidden_act", ["silu"], default="silu")
    config.one_of("use_sliding_window", [False], default=False)
    count, heads = config.size("num_hidden_layers"), config.size("num_attention_heads")
    kinds = config.data.get("layer_types") or []
    if any(kind != "full_attention" for kind in kinds):
        raise config.fail("layer_types", "supported is full_attention")
    hidden, has_bias = config.size("hidden_size", model.llm.hidden_size), config.flag("attention_bias", False)
    head_dim = config.size("head_dim", hidden // heads)
    llm = config.make(
        LanguageModelConfig,
        hidden_size=hidden,
        num_hidden_layers=count,
        num_attention_heads=heads,
        num_key_value_heads=config.size("num_key_value_heads", heads),
        head_dim=head_dim,
        vocab_size=vocabulary,
        reduced_vocab_size=0,
        max_position_embeddings=capacity,
        num_deepstack_features=0,
        rope=read_head_rope(config, head_dim, model.llm.rope, capacity),
    )
    attention = Attention(qkv_bias=has_bias, output_bias=has_bias, head_norms=True)
    block = attention_layer(attention, SwiGLU(config.size("intermediate_size"), bias=False))
    norm = RMSNorm(config.number("rms_norm_eps", 1e-6))
    return Decoder(config=llm, layers=(block,) * count, norm=norm, prefix=MODULE)


def _tensor_shapes(decoder: Decoder, states: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of all tensors; states: number of the base's states."""
    hidden = decoder.config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {FC: (hidden, states * hidden)}
    shapes |= {f"{MODULE}.{name}.weight": (hidden,) for name in ("hidden_norm", "norm")}
    for i, residuals in enumerate(decoder.layers):
        for residual in residuals:
            shapes[f"{layer(i)}.{residual.norm}.weight"] = (hidden,)
            module = f"{layer(i)}.{residual.module}"
            shapes |= {f"{module}.{name}": shape for name, shape in block_shapes(residual, decoder.config)}
    return shapes
