# SPDX-License-Identifier: Apache-2.0
"""Files of an engine directory with tensors that the runtime reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from edgellm_ros.builder.calibration.search import GroupScales
from edgellm_ros.builder.checkpoint.safetensors_file import TensorFile
from edgellm_ros.builder.checkpoint.strips import strips
from edgellm_ros.builder.config.vocabulary import VOCAB_MAP
from edgellm_ros.builder.draft.head import DraftHead
from edgellm_ros.builder.draft.layout import EMBEDDING
from edgellm_ros.builder.exporter.sources import Sources
from edgellm_ros.builder.graph.graph import DTYPES
from edgellm_ros.builder.graph.lm_head import LMHead
from edgellm_ros.engine_directory import binding_names
from edgellm_ros.engine_directory.adapters.lora_inputs import engine_module
from edgellm_ros.engine_directory.adapters.lora_scales import LoraScales
from edgellm_ros.engine_directory.files import D2T_FILE, DRAFT_EMBEDDING_FILE

EMBEDDING_FILE = "embedding.safetensors"
LM_HEAD_FILE = "lm_head.safetensors"
TOKEN_OF_DRAFT_LOGIT = "token_of_draft_logit"  # the tensor of D2T_FILE


def tensor_files(sources: Sources, head: LMHead) -> Iterator[tuple[str, TensorFile]]:
    """Yield the path and the contents of each file."""
    model, options, weights, answers = sources.model, sources.options, sources.weights, sources.vocab_map
    dtype = np.dtype(DTYPES[options.precision].numpy())
    table = model.llm.vocab_size, model.llm.hidden_size
    weights.require(model.embedding, table)
    # The runtime looks up rows of the embedding table outside of the graphs.
    blocks: Callable = partial(weights.read_strips, model.embedding, dtype)
    yield EMBEDDING_FILE, TensorFile("embedding", dtype, table, blocks)
    if answers is not None:
        chosen = TensorFile(VOCAB_MAP, answers.dtype, answers.shape, lambda: [answers])
        yield f"{VOCAB_MAP}.safetensors", chosen
    if options.lm_head_input:
        matrix = TensorFile(binding_names.LM_HEAD, dtype, head.shape, lambda: strips(head.read(), dtype))
        yield LM_HEAD_FILE, matrix
    yield from _draft_files(sources.draft, dtype)


def _draft_files(draft: DraftHead | None, precision: np.dtype) -> Iterator[tuple[str, TensorFile]]:
    """Yield the files of a draft head's tensors that the runtime reads."""
    if draft is None:
        return
    tokens = draft.token_of_logit
    if tokens is not None:
        yield D2T_FILE, TensorFile(TOKEN_OF_DRAFT_LOGIT, tokens.dtype, tokens.shape, lambda: [tokens])
    if draft.embedding:
        shape = draft.weights.shape(EMBEDDING)
        blocks: Callable = partial(draft.weights.read_strips, EMBEDDING, precision)
        yield DRAFT_EMBEDDING_FILE, TensorFile("embedding", precision, (shape[0], shape[1]), blocks)


def collected_scales(scales: Sequence[GroupScales]) -> LoraScales:
    """Collect the factors of adapters for layers with scaled inputs."""
    inputs: dict[str, np.ndarray] = {}
    outputs: dict[str, np.ndarray] = {}
    for each in scales:
        group = each.group
        if group.source is None:
            continue
        inputs |= {engine_module(layer): each.scales for layer in group.layers}
        if group.shift is None:
            outputs[engine_module(group.source)] = group.source_factors(each.scales)
    return LoraScales(inputs, outputs)
