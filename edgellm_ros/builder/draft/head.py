# SPDX-License-Identifier: Apache-2.0
"""Reads a published EAGLE-3 head: `config.json` and `model.safetensors`.

What a head has is decided by its tensors: norms, biases, a table of embeddings, an LM head. Its name and its
architecture's name say nothing, because each publisher has names of its own. Sources: EAGLE (cnets.py),
SpecForge (llama3_eagle.py), speculators (models/eagle3), vLLM and SGLang (llama_eagle3.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from edgellm_ros.builder.checkpoint import Weights
from edgellm_ros.builder.checkpoint_config import ConfigSection, read_section
from edgellm_ros.builder.decoder import DecoderArchitecture
from edgellm_ros.builder.draft.fusion import Fusion
from edgellm_ros.builder.draft.layout import (
    D2T,
    EMBEDDING,
    FC,
    LM_HEAD,
    MODULE,
    canonical_names,
    layer,
    published_name,
)
from edgellm_ros.builder.draft.unsupported import (
    SUPPORTED,
    describe,
    refuse_config,
    refuse_files,
    refuse_tensors,
)
from edgellm_ros.builder.model import Model
from edgellm_ros.builder.rope import read_position_limit, read_rope, rope_section
from edgellm_ros.builder.safetensors_file import FLOATS, INTEGERS
from edgellm_ros.engine_directory.config import LanguageModelConfig
from edgellm_ros.engine_directory.draft_config import NUM_BASE_STATES, DraftConfig
from edgellm_ros.engine_directory.rope_config import RopeConfig

LAYER_LIST = "eagle_aux_hidden_state_layer_ids"
NESTED_LAYER = "transformer_layer_config"  # of the heads of speculators


@dataclass(frozen=True)
class DraftHead:
    """A head that was read and checked. Its tensors have the names of `layout.py`."""

    weights: Weights
    decoder: DecoderArchitecture  # of the layers; the vocabulary is the head's own
    fusion: Fusion
    norm_before_residual: bool  # the first layer adds attention to the normed state
    feeds_back_normed_state: bool
    lm_head: bool  # has an LM head of its own; else it uses the base's
    embedding: bool  # has a table of embeddings that differs from the base's
    token_of_logit: np.ndarray | None  # [Vd] i64; None if logit i is that of token i

    def config(self, max_draft_tree_size: int, max_verify_tree_size: int) -> DraftConfig:
        """Make the section of `config.json`. ValueError for a limit that is not possible."""
        runner = self.decoder.runner
        return DraftConfig(
            hidden_size=runner.hidden_size,
            num_layers=runner.num_hidden_layers,
            num_attention_heads=runner.num_attention_heads,
            num_key_value_heads=runner.num_key_value_heads,
            head_dim=runner.head_dim,
            vocab_size=runner.vocab_size,
            rope=runner.rope,
            base_state_layers=self.fusion.base_state_layers,
            max_draft_tree_size=max_draft_tree_size,
            max_verify_tree_size=max_verify_tree_size,
            shares_embedding=not self.embedding,
            feeds_back_normed_state=self.feeds_back_normed_state,
        )


def read_head(
    directory: Path, model: Model, base: Weights, dtype: np.dtype, capacity: int
) -> DraftHead:
    """Read the head in a directory for a model with the weights `base`.

    dtype: of the export; capacity: of the base's KV cache. Only `d2t` is read, and the head's table of
    embeddings if there is one. FileNotFoundError or ValueError, which names file, key and value, for what is
    no EAGLE-3 head, does not fit the model, or would be computed differently.
    """
    # 1. Which kind of drafter.
    config = read_section(directory / "config.json")
    refuse_files(directory)
    refuse_config(config)
    stored = Weights(directory)
    refuse_tensors(stored, stored.where)
    names = canonical_names(stored, stored.where)
    weights = stored.renamed(names)
    llm = model.llm
    _check_kind(config, weights, llm.hidden_size)

    # 2. Sizes, of the config and of the tensors.
    text = config.section(NESTED_LAYER) if config.has(NESTED_LAYER) else config
    if text.has("vocab_size") and text.size("vocab_size") != llm.vocab_size:
        raise text.fail("vocab_size", f"the language model has {llm.vocab_size}: a head of another model")
    rows = weights.stored(LM_HEAD).shape[0] if LM_HEAD in weights else llm.vocab_size
    vocabulary = config.size("draft_vocab_size", rows)
    if vocabulary > llm.vocab_size:
        raise config.fail("draft_vocab_size", f"expected at most the language model's {llm.vocab_size}")
    decoder = _read_decoder(text, weights, vocabulary, model, capacity)
    fusion = Fusion(
        weights,
        read_base_state_layers(config, llm.num_hidden_layers),
        base_hidden_size=llm.hidden_size,
        hidden_size=decoder.runner.hidden_size,
        epsilon=decoder.epsilon,
        bias=f"{MODULE}.fc.bias" in weights,
        state_norms=weights.has_module(f"{MODULE}.fc_norm"),
        joined_norm=weights.has_module(f"{MODULE}.input_norm"),
    )
    if fusion.state_norms and fusion.joined_norm:
        raise ValueError(f"{stored.where}: fc_norm and input_norm in one head: supported is one of them")
    for key, there in (("fc_norm", fusion.state_norms), ("norm_before_fc", fusion.joined_norm)):
        if there and not config.flag(key, True):
            raise config.fail(key, "the tensors of this norm are in the file, supported: true")

    # 3. Tensors.
    optional = {EMBEDDING: (llm.vocab_size, decoder.runner.hidden_size), D2T: (vocabulary,)}
    expected = tensor_shapes(decoder, fusion, config) | optional
    expected[LM_HEAD] = (vocabulary, decoder.runner.hidden_size)
    _check_tensors(weights, names, expected, {*optional, LM_HEAD}, config)
    own_table = EMBEDDING in weights and not _same_table(weights, base, model.embedding, dtype)
    _check_shared(weights, own_table, decoder.runner, llm)
    normed = config.flag("norm_output", False)
    return DraftHead(
        weights,
        decoder,
        fusion,
        norm_before_residual=config.flag("norm_before_residual", False),
        # SpecForge writes norm_output for heads of EAGLE-3 too, where it says nothing about the next state.
        feeds_back_normed_state=normed and (fusion.state_norms or _is_speculators(config)),
        lm_head=LM_HEAD in weights,
        embedding=own_table,
        token_of_logit=_token_of_logit(weights, vocabulary, llm.vocab_size),
    )


def _check_kind(config: ConfigSection, weights: Weights, base_hidden_size: int) -> None:
    """Raise ValueError unless a head is an EAGLE-3 head, and one for states of this size.

    It is one if it has a vocabulary of its own, or if its fc takes three states.
    """
    wanted = NUM_BASE_STATES * base_hidden_size
    claim = f"; {kind}" if (kind := describe(config)) else ""
    if FC not in weights:
        raise ValueError(f"{weights.where}: tensor 'fc.weight' is missing{claim}; {SUPPORTED}")
    fc = weights.stored(FC)
    found = fc.shape[1] if len(fc.shape) == 2 else 0
    if found == wanted:
        return
    if not config.has("draft_vocab_size") or found % NUM_BASE_STATES:
        raise ValueError(
            f"{fc.file}: tensor {fc.name!r} has shape {list(fc.shape)}: no EAGLE-3 head for this language "
            f"model, whose fc takes 3 x {base_hidden_size} = {wanted} values{claim}; {SUPPORTED}"
        )
    raise ValueError(
        f"{fc.file}: tensor {fc.name!r} takes three states of {found // NUM_BASE_STATES} values, but the "
        f"language model has hidden_size {base_hidden_size}: a head of another model"
    )


def _read_decoder(
    text: ConfigSection, weights: Weights, vocabulary: int, model: Model, capacity: int
) -> DecoderArchitecture:
    text.one_of("hidden_act", ["silu"], default="silu")
    heads, hidden = text.size("num_attention_heads"), text.size("hidden_size")
    kv_heads = text.size("num_key_value_heads", heads)
    attention = f"{layer(0)}.self_attn"
    head_dim = _head_dim(text, weights, f"{attention}.q_proj.weight", heads)
    runner = text.make(
        LanguageModelConfig,
        hidden_size=hidden,
        num_hidden_layers=text.size("num_hidden_layers", 1),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocabulary,
        reduced_vocab_size=0,
        max_position_embeddings=capacity,
        num_deepstack_features=0,
        rope=_read_rope(text, head_dim, model.llm.rope, capacity),
    )
    return DecoderArchitecture(
        runner=runner,
        intermediate_size=text.size("intermediate_size"),
        epsilon=text.number("rms_norm_eps", 1e-6),
        prefix=MODULE,
        qkv_bias=text.flag("attention_bias", False) or f"{attention}.q_proj.bias" in weights,
        output_bias=f"{attention}.o_proj.bias" in weights,
        mlp_bias=f"{layer(0)}.mlp.gate_proj.bias" in weights,
        head_norms=f"{attention}.q_norm.weight" in weights,
    )


def _head_dim(text: ConfigSection, weights: Weights, name: str, heads: int) -> int:
    """Compute the size of a head from the rows of its queries: configs leave it out, or have a wrong one."""
    if name not in weights:
        raise ValueError(f"{weights.where}: tensor {published_name(name)} is missing; {SUPPORTED}")
    rows = weights.stored(name).shape[0]
    if rows % heads:
        raise text.fail("num_attention_heads", f"{weights.stored(name).name!r} has {rows} rows, no multiple")
    return rows // heads


def _read_rope(text: ConfigSection, head_dim: int, base: RopeConfig, capacity: int) -> RopeConfig:
    """Read the head's own RoPE, which need not be the base's."""
    plain, rope = read_rope(text, head_dim), rope_section(text)
    if text.has("max_position_embeddings"):
        limit, name = read_position_limit(text)
        if name != "max_position_embeddings" and capacity > limit:
            raise ValueError(f"{text.where}: max_kv_cache_capacity {capacity} exceeds {name} {limit}")
    if not rope.has("mrope_section"):
        return plain
    default = bool(base.mrope_section) and base.mrope_interleaved
    key = "mrope_interleaved" if rope.has("mrope_interleaved") else "interleaved"
    return rope.make(
        partial(dataclasses.replace, plain),
        mrope_section=rope.integers("mrope_section"),
        mrope_interleaved=rope.flag(key, default),
    )


def read_base_state_layers(config: ConfigSection, layers: int) -> tuple[int, ...]:
    """Read the layers whose inputs are the head's states, for a base of so many layers.

    Lists count outputs of layers; speculators counts inputs. Without a list they are the inputs of the layers
    2, L // 2 and L - 3.
    """
    section = config
    if config.has("eagle_config"):
        nested = config.section("eagle_config")
        nested.one_of("use_aux_hidden_state", [True], default=True)
        section = nested if nested.has(LAYER_LIST) else config
    if not section.has(LAYER_LIST):
        usual = (2, layers // 2, layers - 3)
        if not usual[0] < usual[1] < usual[2]:  # of fewer than 7 layers
            raise ValueError(
                f"{config.where}: key {LAYER_LIST!r} is missing: for a language model of {layers} layers it "
                "must list the three layers whose states the head takes"
            )
        return usual
    first = 0 if section is config and _is_speculators(config) else 1
    given = section.integers(LAYER_LIST)
    inputs = tuple(number + first for number in given)
    in_order = list(inputs) == sorted(set(inputs))
    if len(given) != NUM_BASE_STATES or not in_order or inputs[0] < first or inputs[-1] > layers:
        raise section.fail(
            LAYER_LIST,
            f"expected {NUM_BASE_STATES} rising layers from 0 to {layers - first} for a language model of "
            f"{layers} layers",
        )
    return inputs


def _is_speculators(config: ConfigSection) -> bool:
    return config.has("speculators_model_type")


def tensor_shapes(
    decoder: DecoderArchitecture, fusion: Fusion, config: ConfigSection
) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors that a head with these switches must have."""
    runner, hidden = decoder.runner, decoder.runner.hidden_size
    inner, head_dim = decoder.intermediate_size, runner.head_dim
    queries, keys = runner.num_attention_heads * head_dim, runner.num_key_value_heads * head_dim
    joined = NUM_BASE_STATES * fusion.base_hidden_size
    shapes: dict[str, tuple[int, ...]] = {FC: (hidden, joined), f"{MODULE}.norm.weight": (hidden,)}
    if fusion.bias:
        shapes[f"{MODULE}.fc.bias"] = (hidden,)
    if fusion.state_norms or config.flag("fc_norm", False):
        size = fusion.base_hidden_size
        shapes |= {f"{MODULE}.fc_norm.{i}.weight": (size,) for i in range(NUM_BASE_STATES)}
    if fusion.joined_norm or config.flag("norm_before_fc", False):
        shapes[f"{MODULE}.input_norm.weight"] = (joined,)
    for i in range(runner.num_hidden_layers):
        wide = hidden if i else 2 * hidden  # the first layer takes embedding and state side by side
        linears = {
            "self_attn.q_proj": (queries, wide, decoder.qkv_bias),
            "self_attn.k_proj": (keys, wide, decoder.qkv_bias),
            "self_attn.v_proj": (keys, wide, decoder.qkv_bias),
            "self_attn.o_proj": (hidden, queries, decoder.output_bias),
            "mlp.gate_proj": (inner, hidden, decoder.mlp_bias),
            "mlp.up_proj": (inner, hidden, decoder.mlp_bias),
            "mlp.down_proj": (hidden, inner, decoder.mlp_bias),
        }
        for name, (rows, columns, bias) in linears.items():
            shapes[f"{layer(i)}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{layer(i)}.{name}.bias"] = (rows,)
        norms = ("input_layernorm", "post_attention_layernorm", *(() if i else ("hidden_norm",)))
        shapes |= {f"{layer(i)}.{norm}.weight": (hidden,) for norm in norms}
        if decoder.head_norms:
            shapes |= {f"{layer(i)}.self_attn.{norm}_norm.weight": (head_dim,) for norm in "qk"}
    return shapes


def _check_tensors(
    weights: Weights,
    names: Mapping[str, str],
    expected: Mapping[str, tuple[int, ...]],
    optional: set[str],
    config: ConfigSection,
) -> None:
    """Raise ValueError for a tensor that is missing, not known, of another shape, or of an unknown type."""
    claim = f"; {kind}" if (kind := describe(config)) else ""
    missing = sorted(set(expected) - set(names) - optional)
    if missing:
        name = published_name(missing[0])
        raise ValueError(f"{weights.where}: tensor {name} is missing{claim}; {SUPPORTED}")
    unknown = sorted(names[name] for name in set(names) - set(expected))
    if unknown:
        raise ValueError(
            f"{weights.where}: tensor {unknown[0]!r} is no part of an EAGLE-3 head that is supported{claim}"
        )
    for name in names:
        tensor, types = weights.stored(name), INTEGERS if name == D2T else FLOATS
        if tensor.dtype not in types:
            raise ValueError(
                f"{tensor.file}: tensor {tensor.name!r} has dtype {tensor.dtype}; supported: "
                f"{', '.join(types)}"
            )
        if tensor.shape != expected[name]:
            raise ValueError(
                f"{tensor.file}: tensor {tensor.name!r} has shape {list(tensor.shape)}, but by the config it "
                f"is {list(expected[name])}"
            )


def _check_shared(
    weights: Weights, own_table: bool, head: LanguageModelConfig, base: LanguageModelConfig
) -> None:
    """Raise ValueError for a head that lacks a tensor which it cannot share with the base."""
    if not own_table and head.hidden_size != base.hidden_size:
        raise ValueError(
            f"{weights.where}: tensor 'embed_tokens.weight' is missing: a head of hidden_size "
            f"{head.hidden_size} cannot use the table of the language model, whose hidden_size is "
            f"{base.hidden_size}"
        )
    if LM_HEAD not in weights and head.hidden_size != base.hidden_size:
        raise ValueError(
            f"{weights.where}: tensor 'lm_head.weight' is missing: a head of hidden_size {head.hidden_size} "
            f"cannot use the language model's, whose hidden_size is {base.hidden_size}"
        )
    for name in (LM_HEAD, D2T):
        if name not in weights and head.vocab_size != base.vocab_size:
            raise ValueError(
                f"{weights.where}: tensor {published_name(name)} is missing: draft_vocab_size "
                f"{head.vocab_size} is not the language model's vocab_size {base.vocab_size}"
            )


def _same_table(weights: Weights, base: Weights, embedding: str, dtype: np.dtype) -> bool:
    """Tell whether the head's table of embeddings is the base's in the type of the export."""
    if weights.shape(EMBEDDING) != base.shape(embedding):
        return False
    pairs = zip(weights.read_strips(EMBEDDING, dtype), base.read_strips(embedding, dtype), strict=True)
    return all(np.array_equal(ours, theirs) for ours, theirs in pairs)


def _token_of_logit(weights: Weights, vocabulary: int, base_vocabulary: int) -> np.ndarray | None:
    """Compute the token of each logit [Vd] i64 from `d2t`, the distance of each token from its logit."""
    if D2T not in weights:
        return None
    stored = weights.stored(D2T)
    logits = np.arange(vocabulary)
    tokens = stored.read().astype(np.int64) + logits
    outside = np.flatnonzero((tokens < 0) | (tokens >= base_vocabulary))
    if outside.size:
        raise ValueError(
            f"{stored.file}: tensor {stored.name!r}: logit {outside[0]} is that of token "
            f"{tokens[outside[0]]}, outside of the vocabulary of {base_vocabulary}"
        )
    unique, counts = np.unique(tokens, return_counts=True)
    if counts.max() > 1:
        raise ValueError(
            f"{stored.file}: tensor {stored.name!r}: {counts.max()} logits are those of token "
            f"{unique[counts.argmax()]}, expected one"
        )
    return None if vocabulary == base_vocabulary and np.array_equal(tokens, logits) else tokens
