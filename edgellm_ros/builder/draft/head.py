# SPDX-License-Identifier: Apache-2.0
"""A draft head, and the reader of published EAGLE-3 heads.

`dflash.py` and `mtp.py` read the other kinds.

An EAGLE-3 head is a directory with `config.json` and `model.safetensors`.

What a head has is decided by its tensors: norms, biases, a table of embeddings, an LM head. Its name and its
architecture's name say nothing, because each publisher has names of its own. Sources: EAGLE (cnets.py),
SpecForge (llama3_eagle.py), speculators (models/eagle3), vLLM and SGLang (llama_eagle3.py).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection, read_section
from edgellm_ros.builder.config.rope import read_position_limit, read_rope, rope_section
from edgellm_ros.builder.draft.base_states import is_speculators, read_base_state_layers
from edgellm_ros.builder.draft.layout import (
    D2T,
    EMBEDDING,
    LM_HEAD,
    MODULE,
    canonical_names,
    layer,
    published_name,
)
from edgellm_ros.builder.draft.tensors import check_kind, check_shared, check_tensors, tensor_shapes
from edgellm_ros.builder.draft.unsupported import SUPPORTED, refuse_config, refuse_files, refuse_tensors
from edgellm_ros.builder.families.model import Model
from edgellm_ros.builder.graph.fusion import Fusion, LastStates
from edgellm_ros.builder.model.decoder import Attention, Decoder, RMSNorm, SwiGLU, attention_layer
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory.draft_config import DFLASH, EAGLE, MTP, DraftConfig
from edgellm_ros.engine_directory.language_model_config import LanguageModelConfig
from edgellm_ros.engine_directory.rope_config import RopeConfig

NESTED_LAYER = "transformer_layer_config"  # of the heads of speculators


@dataclass(frozen=True)
class JoinedAttention:
    """EAGLE-3: the first attention takes embedding and state side by side."""

    norm_before_residual: bool  # the first layer adds attention to the normed state


@dataclass(frozen=True)
class Projection:
    """MTP: `fc` makes one row of embedding and state, each after a norm of its own."""

    state_first: bool = False  # the state is before the embedding


@dataclass(frozen=True)
class Block:
    """DFlash: a block of rows, and rows made of the base's states."""

    size: int  # rows, with that of the newest token
    mask_token_id: int  # the token of the other rows
    state_layers: tuple[int, ...]  # whose states; those of the base's outputs `hidden_states_i`


@dataclass(frozen=True)
class DraftHead:
    """A head that was read and checked. Its tensors have the names of `layout.py`."""

    weights: Weights
    decoder: Decoder  # of the layers; the vocabulary is the head's own
    states: Fusion | LastStates | None  # an output of the base for the head alone; None for a block
    entry: JoinedAttention | Projection | Block
    feeds_back_normed_state: bool
    lm_head: bool  # has an LM head of its own; else it uses the base's
    embedding: bool  # has a table of embeddings that differs from the base's
    token_of_logit: np.ndarray | None  # [Vd] i64; None if logit i is that of token i

    @property
    def kind(self) -> str:
        """Return one of HEAD_KINDS."""
        return {JoinedAttention: EAGLE, Projection: MTP, Block: DFLASH}[type(self.entry)]

    @property
    def base_state_layers(self) -> tuple[int, ...]:
        """Return the layers whose states the head takes: see `DraftConfig`."""
        if isinstance(self.entry, Block):
            return self.entry.state_layers
        return self.states.base_state_layers if isinstance(self.states, Fusion) else ()

    def config(self, max_draft_tree_size: int, max_verify_tree_size: int) -> DraftConfig:
        """Make the section of `config.json`. ValueError for a limit that is not possible."""
        llm, block = self.decoder.config, self.entry if isinstance(self.entry, Block) else None
        return DraftConfig(
            kind=self.kind,
            hidden_size=llm.hidden_size,
            num_layers=llm.num_hidden_layers,
            num_attention_heads=llm.num_attention_heads,
            num_key_value_heads=llm.num_key_value_heads,
            head_dim=llm.head_dim,
            vocab_size=llm.vocab_size,
            rope=llm.rope,
            base_state_layers=self.base_state_layers,
            max_draft_tree_size=max_draft_tree_size,
            max_verify_tree_size=max_verify_tree_size,
            shares_embedding=not self.embedding,
            feeds_back_normed_state=self.feeds_back_normed_state,
            block_size=block.size if block else 0,
            mask_token_id=block.mask_token_id if block else 0,
        )


def open_head(directory: Path) -> tuple[ConfigSection, dict[str, str], Weights]:
    """Open the files of a draft head.

    Returns the configuration, published names by those of the builder, and the tensors by these. ValueError,
    which names file and key, for a kind of head that is not supported.
    """
    config = read_section(directory / "config.json")
    refuse_files(directory)
    refuse_config(config)
    stored = Weights(directory)
    refuse_tensors(stored, stored.where)
    names = canonical_names(stored, stored.where)
    return config, names, stored.renamed(names)


def read_head(directory: Path, model: Model, base: Weights, dtype: np.dtype, capacity: int) -> DraftHead:
    """Read the head in a directory for a model with the weights `base`.

    dtype: of the export; capacity: of the base's KV cache. Only `d2t` is read, and the head's table of
    embeddings if there is one. FileNotFoundError or ValueError, which names file, key and value, for what is
    no EAGLE-3 head, does not fit the model, or would be computed differently.
    """
    # 1. Which kind of drafter.
    config, names, weights = open_head(directory)
    llm = model.llm
    check_kind(config, weights, llm.hidden_size)

    # 2. Sizes, of the config and of the tensors.
    text = config.section(NESTED_LAYER) if config.has(NESTED_LAYER) else config
    if text.has("vocab_size") and text.size("vocab_size") != llm.vocab_size:
        raise text.fail("vocab_size", f"the language model has {llm.vocab_size}: a head of another model")
    rows = weights.stored(LM_HEAD).rows if LM_HEAD in weights else llm.vocab_size
    vocabulary = config.size("draft_vocab_size", rows)
    if vocabulary > llm.vocab_size:
        raise config.fail("draft_vocab_size", f"expected at most the language model's {llm.vocab_size}")
    decoder = _read_decoder(text, weights, vocabulary, model, capacity)
    fusion = Fusion(
        weights,
        read_base_state_layers(config, llm.num_hidden_layers),
        base_hidden_size=llm.hidden_size,
        hidden_size=decoder.config.hidden_size,
        epsilon=decoder.norm.epsilon,
        bias=f"{MODULE}.fc.bias" in weights,
        state_norms=weights.has_module(f"{MODULE}.fc_norm"),
        joined_norm=weights.has_module(f"{MODULE}.input_norm"),
    )
    if fusion.state_norms and fusion.joined_norm:
        raise ValueError(f"{weights.where}: fc_norm and input_norm in one head: supported is one of them")
    for key, there in (("fc_norm", fusion.state_norms), ("norm_before_fc", fusion.joined_norm)):
        if there and not config.flag(key, True):
            raise config.fail(key, "the tensors of this norm are in the file, supported: true")

    # 3. Tensors.
    optional = {EMBEDDING: (llm.vocab_size, decoder.config.hidden_size), D2T: (vocabulary,)}
    expected = tensor_shapes(decoder, fusion, config) | optional
    expected[LM_HEAD] = (vocabulary, decoder.config.hidden_size)
    check_tensors(weights, names, expected, {*optional, LM_HEAD}, config)
    own_table = EMBEDDING in weights and not _same_table(weights, base, model.embedding, dtype)
    check_shared(weights, own_table, decoder.config, llm)
    normed = config.flag("norm_output", False)
    return DraftHead(
        weights,
        decoder,
        fusion,
        JoinedAttention(config.flag("norm_before_residual", False)),
        # SpecForge writes norm_output for heads of EAGLE-3 too, where it says nothing about the next state.
        feeds_back_normed_state=normed and (fusion.state_norms or is_speculators(config)),
        lm_head=LM_HEAD in weights,
        embedding=own_table,
        token_of_logit=_token_of_logit(weights, vocabulary, llm.vocab_size),
    )


def _read_decoder(
    text: ConfigSection, weights: Weights, vocabulary: int, model: Model, capacity: int
) -> Decoder:
    text.one_of("hidden_act", ["silu"], default="silu")
    heads, hidden = text.size("num_attention_heads"), text.size("hidden_size")
    kv_heads = text.size("num_key_value_heads", heads)
    attention = f"{layer(0)}.self_attn"
    head_dim = _head_dim(text, weights, f"{attention}.q_proj.weight", heads)
    llm = text.make(
        LanguageModelConfig,
        hidden_size=hidden,
        num_hidden_layers=_num_layers(text, weights),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocabulary,
        reduced_vocab_size=0,
        max_position_embeddings=capacity,
        num_deepstack_features=0,
        rope=read_head_rope(text, head_dim, model.llm.rope, capacity),
    )
    mlp = SwiGLU(text.size("intermediate_size"), bias=f"{layer(0)}.mlp.gate_proj.bias" in weights)
    later = Attention(
        qkv_bias=text.flag("attention_bias", False) or f"{attention}.q_proj.bias" in weights,
        output_bias=f"{attention}.o_proj.bias" in weights,
        head_norms=f"{attention}.q_norm.weight" in weights,
    )
    first = dataclasses.replace(later, inputs=2 * hidden)  # embedding and state side by side
    blocks = [first, *[later] * (llm.num_hidden_layers - 1)]
    return Decoder(
        config=llm,
        layers=tuple(attention_layer(block, mlp) for block in blocks),
        norm=RMSNorm(text.number("rms_norm_eps", 1e-6)),
        prefix=MODULE,
    )


def _num_layers(text: ConfigSection, weights: Weights) -> int:
    """Read the number of layers, all of which the file has."""
    layers, stored = text.size("num_hidden_layers", 1), weights.list_length(f"{MODULE}.layers")
    if layers > stored:
        name = published_name(layer(stored - 1))
        raise text.fail("num_hidden_layers", f"the last layer in {weights.where.name} is {name}; {SUPPORTED}")
    return layers


def _head_dim(text: ConfigSection, weights: Weights, name: str, heads: int) -> int:
    """Compute head_dim from the rows of the query projection.

    Some configurations lack it or have a wrong one.
    """
    if name not in weights:
        raise ValueError(f"{weights.where}: tensor {published_name(name)} is missing; {SUPPORTED}")
    rows = weights.stored(name).rows
    if rows % heads:
        raise text.fail("num_attention_heads", f"{weights.stored(name).name!r} has {rows} rows, no multiple")
    return rows // heads


def read_head_rope(text: ConfigSection, head_dim: int, base: RopeConfig, capacity: int) -> RopeConfig:
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


def _same_table(weights: Weights, base: Weights, embedding: str, dtype: np.dtype) -> bool:
    """Tell whether the head's table of embeddings is the base's.

    The tables are compared in the type of the export.
    """
    if weights.shape(EMBEDDING) != base.shape(embedding):
        return False
    pairs = zip(weights.read_strips(EMBEDDING, dtype), base.read_strips(embedding, dtype), strict=True)
    return all(np.array_equal(ours, theirs) for ours, theirs in pairs)


def _token_of_logit(weights: Weights, vocabulary: int, base_vocabulary: int) -> np.ndarray | None:
    """Compute the token of each logit [Vd] i64 from `d2t`.

    `d2t` has the distance of each token from its logit.
    """
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
