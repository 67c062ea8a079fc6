# SPDX-License-Identifier: Apache-2.0
"""Checks the tensors of a draft head and their shapes.

Some tensors must be there, others may be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.checkpoint.safetensors_file import FLOATS, INTEGERS
from edgellm_ros.builder.draft.layout import D2T, FC, LM_HEAD, MODULE, layer, published_name
from edgellm_ros.builder.draft.unsupported import SUPPORTED, describe
from edgellm_ros.builder.graph.fusion import Fusion
from edgellm_ros.builder.model.decoder import Attention, Decoder, Residual, SwiGLU
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory.draft_config import NUM_BASE_STATES
from edgellm_ros.engine_directory.language_model_config import LanguageModelConfig


def check_kind(config: ConfigSection, weights: Weights, base_hidden_size: int) -> None:
    """Raise ValueError unless it is an EAGLE-3 head for states of this size.

    A head is one of EAGLE-3 if it has a vocabulary of its own, or if its fc takes three states.
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


def tensor_shapes(decoder: Decoder, fusion: Fusion, config: ConfigSection) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors that a head must have.

    The tensors depend on the head's switches.
    """
    hidden = decoder.config.hidden_size
    joined = NUM_BASE_STATES * fusion.base_hidden_size
    shapes: dict[str, tuple[int, ...]] = {FC: (hidden, joined), f"{MODULE}.norm.weight": (hidden,)}
    if fusion.bias:
        shapes[f"{MODULE}.fc.bias"] = (hidden,)
    if fusion.state_norms or config.flag("fc_norm", False):
        size = fusion.base_hidden_size
        shapes |= {f"{MODULE}.fc_norm.{i}.weight": (size,) for i in range(NUM_BASE_STATES)}
    if fusion.joined_norm or config.flag("norm_before_fc", False):
        shapes[f"{MODULE}.input_norm.weight"] = (joined,)
    shapes[f"{layer(0)}.hidden_norm.weight"] = (hidden,)
    for i, residuals in enumerate(decoder.layers):
        for residual in residuals:
            shapes[f"{layer(i)}.{residual.norm}.weight"] = (hidden,)
            module = f"{layer(i)}.{residual.module}"
            shapes |= {f"{module}.{name}": shape for name, shape in block_shapes(residual, decoder.config)}
    return shapes


def block_shapes(residual: Residual, config: LanguageModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of a block's tensors."""
    block, hidden, linears = residual.block, config.hidden_size, {}
    if isinstance(block, Attention):
        for name, rows in block.widths(config).items():
            linears[name] = rows, block.inputs or hidden, block.qkv_bias
        linears["o_proj"] = hidden, config.num_attention_heads * config.head_dim, block.output_bias
        for norm in ("q_norm", "k_norm") if block.head_norms else ():
            yield f"{norm}.weight", (config.head_dim,)
    elif isinstance(block, SwiGLU):
        linears = {name: (block.inner, hidden, block.bias) for name in ("gate_proj", "up_proj")}
        linears["down_proj"] = hidden, block.inner, block.bias
    else:
        raise TypeError(f"no draft head has {type(block).__name__}")
    for name, (rows, columns, bias) in linears.items():
        yield f"{name}.weight", (rows, columns)
        if bias:
            yield f"{name}.bias", (rows,)


def check_tensors(
    weights: Weights,
    names: Mapping[str, str],
    expected: Mapping[str, tuple[int, ...]],
    optional: set[str],
    config: ConfigSection,
) -> None:
    """Raise ValueError for a tensor that is missing, unknown or wrong.

    A wrong one has another shape or an unknown type.
    """
    claim = f"; {kind}" if (kind := describe(config)) else ""
    missing = sorted(set(expected) - set(names) - optional)
    if missing:
        name = published_name(missing[0])
        raise ValueError(f"{weights.where}: tensor {name} is missing{claim}; {SUPPORTED}")
    unknown = sorted(names[name] for name in set(names) - set(expected))
    if unknown:
        raise ValueError(
            f"{weights.where}: tensor {unknown[0]!r} is no part of a draft head that is supported{claim}"
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


def check_shared(
    weights: Weights, own_table: bool, head: LanguageModelConfig, base: LanguageModelConfig
) -> None:
    """Raise ValueError if a head lacks a tensor and cannot share the base's."""
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
