# SPDX-License-Identifier: Apache-2.0
"""Reads the multi-token prediction (MTP) head of a checkpoint.

The head is one of the model's own layers on rows that `fc` makes of a token's embedding and the model's state
after its last norm. Table of embeddings and LM head are the model's. Sources: transformers
(modeling_layers.py, MtpModel), vLLM and SGLang (qwen3_5_mtp.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from edgellm_ros.builder.config.prompt_files import TOKENIZER_FILE
from edgellm_ros.builder.draft.frequent_tokens import frequent_tokens
from edgellm_ros.builder.draft.head import DraftHead, Projection
from edgellm_ros.builder.draft.layout import FC, MODULE, layer
from edgellm_ros.builder.draft.tensors import block_shapes
from edgellm_ros.builder.families.model import Model, MTPModule
from edgellm_ros.builder.graph.fusion import LastStates
from edgellm_ros.builder.model.decoder import Decoder
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory.language_model_config import LanguageModelConfig

LEAVE_OUT = "--no-draft exports the model alone"
DRAFTED_TOKENS = 32768


def read_mtp_head(
    checkpoint: Path, model: Model, module: MTPModule, base: Weights, drafted_tokens: int | None
) -> DraftHead:
    """Read the head of a checkpoint; no tensor but headers is read.

    drafted_tokens: how many tokens the head drafts, see `frequent_tokens`; None = DRAFTED_TOKENS. ValueError
    for a tensor that is missing or has another shape.
    """
    if module.count != 1:
        raise ValueError(
            f"{base.where}: {module.count} MTP modules ({module.prefix}); supported is one; {LEAVE_OUT}"
        )
    drafted = DRAFTED_TOKENS if drafted_tokens is None else drafted_tokens
    tokens = frequent_tokens(checkpoint / TOKENIZER_FILE, model.llm.vocab_size, drafted)
    llm = dataclasses.replace(
        model.llm,
        num_hidden_layers=1,
        vocab_size=model.llm.vocab_size if tokens is None else len(tokens),
        num_deepstack_features=0,
        layer_types=(),
        recurrent=None,
    )
    decoder = Decoder(config=llm, layers=(module.layer,), norm=model.decoder.norm, prefix=MODULE)
    modules: dict[str, str] = {}  # name in the checkpoint -> name in the builder
    for name, published, shape in _tensors(module, llm):
        stored = f"{module.prefix}.{published}"
        if stored not in base:
            raise ValueError(f"{base.where}: tensor {stored!r} of the MTP head is missing; {LEAVE_OUT}")
        base.require(stored, shape)
        modules[stored.rpartition(".")[0]] = name.rpartition(".")[0]
    # A module of a quantised head has tensors of other names than `weight`.
    places = ((name, *name.rpartition(".")) for name in base)
    weights = base.renamed(
        {f"{modules[inner]}.{leaf}": name for name, inner, _, leaf in places if inner in modules}
    )
    return DraftHead(
        weights,
        decoder,
        LastStates(llm.hidden_size),
        Projection(module.state_first),
        feeds_back_normed_state=True,
        lm_head=False,
        embedding=False,
        token_of_logit=tokens,
    )


def _tensors(module: MTPModule, llm: LanguageModelConfig) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield the head's tensors: name in the builder, published name, shape.

    The published name is that after the prefix.
    """
    hidden = llm.hidden_size
    yield FC, f"{module.fc}.weight", (hidden, 2 * hidden)
    norms = {"embedding_norm": module.embedding_norm, "hidden_norm": module.hidden_norm, "norm": module.norm}
    for name, published in norms.items():
        yield f"{MODULE}.{name}.weight", f"{published}.weight", (hidden,)
    for residual in module.layer:
        shapes: dict[str, tuple[int, ...]] = {f"{residual.norm}.weight": (hidden,)}
        shapes |= {f"{residual.module}.{name}": shape for name, shape in block_shapes(residual, llm)}
        for name, shape in shapes.items():
            yield f"{layer(0)}.{name}", f"{module.layer_prefix}{name}", shape


def describe_mtp_head(head: DraftHead) -> str:
    """Tell what was read, and what it weighs as it is stored."""
    size = sum(tensor.size for tensor in head.weights.tensors.values())
    return f"MTP head: {size / 1e6:.1f} MB, drafts {head.decoder.config.vocab_size} tokens"
