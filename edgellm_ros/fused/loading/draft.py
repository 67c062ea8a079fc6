# SPDX-License-Identifier: Apache-2.0
"""Loads the fused kernels of a draft head, or tells why the engine drafts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from edgellm_ros.engine.backend import Binding
from edgellm_ros.engine.device import Device
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.fused.description.draft import FUSED_DRAFT_FILE, FusedDraftModel
from edgellm_ros.fused.loading.availability import (
    AUTO,
    Unavailable,
    check_device,
    check_shape,
    described,
    load_if_wanted,
    made_or_unavailable,
)
from edgellm_ros.fused.loading.backend import Decoder, FusedBackend, element_type, token_bindings
from edgellm_ros.fused.loading.device_weights import address_in, layer_addresses, load_weights, owners_of
from edgellm_ros.fused.loading.drafting import DraftSizes
from edgellm_ros.fused.loading.fused_decoding import FusedDecoding

if TYPE_CHECKING:
    from edgellm_ros.fused.draft import Projection
    from edgellm_ros.fused.plan.shape import FusedDraftShape
    from edgellm_ros.fused.weights import FusedWeights
    from edgellm_ros.kernels.chain_protocol import ChainDrafter, PromptRows

logger = logging.getLogger(__name__)


class FusedDraftBackend(FusedBackend):
    """Runs of one draft head.

    The bindings are those of `draft/model.cuda.onnx` that the kernels use. takes_trees: whether a mask says
    which rows a token attends to; False: all up to its own.
    """

    def __init__(self, head: Decoder, shape: FusedDraftShape, device: Device, takes_trees: bool) -> None:
        self._decoder, self._device = head, device
        self.bindings = tuple(_bindings(shape, takes_trees))


def load_fused_draft(
    root: Path, config: EngineConfig, drafting: DraftSizes, device: Device
) -> FusedDecoding | None:
    """Load an engine directory's fused draft kernels, if device and head have them.

    The log gets the reason where the engine drafts.
    """
    load = partial(_load, root, config, drafting, device)
    return load_if_wanted(load, AUTO, logger, what="fused drafting is", instead="the engine drafts")


def _load(root: Path, config: EngineConfig, drafting: DraftSizes, device: Device) -> FusedDecoding:
    check_device(device)
    path = described(root, FUSED_DRAFT_FILE, config, "the head")
    model = FusedDraftModel.load(path)
    shape = draft_shape(config, model, drafting)
    check_shape(shape.unsupported(), "this head")
    tensors = load_weights(path.parent, model, element_type(config.precision), device)
    weights = _weights(model, tensors)
    with made_or_unavailable():
        head = make_head(device, shape, weights, make_projection(config, model, tensors, shape.max_rows))
    chain = prompts = None
    if drafting.is_chain:
        sizes = drafting.tokens_per_round, drafting.drafting_step
        with _noting("the head drafts token by token"), made_or_unavailable():
            chain = make_chain(device, shape, weights, *sizes)
    with _noting("the engine runs the head on prompts"), made_or_unavailable():
        prompts = make_prompts(device, shape, weights)
    backend = FusedDraftBackend(head, shape, device, takes_trees=not drafting.is_chain)
    executor = EngineExecutor(backend, "draft/fused")
    own = {weight.name for weight in model.weights() if weight.fp32}  # in the engine; rounded for the kernels
    shared = {name: tensor for name, tensor in tensors.items() if name not in own}
    return FusedDecoding(executor, head.max_rows, shared, chain=chain, prompts=prompts)


@contextmanager
def _noting(consequence: str) -> Iterator[None]:
    """Log why something is not available, and what follows."""
    try:
        yield
    except Unavailable as reason:
        logger.info("%s: %s", consequence, reason)


class Head(Decoder, Protocol):
    """What runs a head: a `FusedDraft`."""

    max_rows: int


def make_head(
    device: Device, shape: FusedDraftShape, weights: FusedWeights, projection: Projection | None
) -> Head:
    """Make what runs a head on a device."""
    from edgellm_ros.fused.draft import FusedDraft

    return FusedDraft(device, shape, weights, projection=projection)


def make_projection(
    config: EngineConfig, model: FusedDraftModel, tensors: dict[str, Tensor], most_rows: int
) -> Projection | None:
    """Return the projection of an MTP head; None for other heads.

    tensors: the head's weights.
    """
    from edgellm_ros.fused.draft import Projection
    from edgellm_ros.fused.plan.fusion import FusionShape
    from edgellm_ros.fused.weights import FusionWeights

    stored, draft = model.projection, config.draft
    if stored is None:
        return None
    assert draft is not None  # `check_drafting`
    size, epsilon = draft.hidden_size, model.epsilon
    shape = FusionShape(config.precision, size, size, epsilon, state_norms=True, max_rows=most_rows, states=2)
    first, second = (address_in(tensors, norm) for norm in (stored.embedding_norm, model.hidden_norm))
    norms = (second, first, 0) if stored.state_first else (first, second, 0)
    weights = FusionWeights(address_in(tensors, stored.fc), 0, norms, owners_of(tensors))
    return Projection(shape, weights, stored.state_first)


def make_chain(
    device: Device, shape: FusedDraftShape, weights: FusedWeights, rows: int, levels: int
) -> ChainDrafter:
    """Make what drafts whole chains of `levels` tokens on a device.

    A chain follows up to `rows` accepted tokens.
    """
    from edgellm_ros.fused.chain import FusedChain

    return FusedChain(device, shape, weights, rows, levels)


def make_prompts(device: Device, shape: FusedDraftShape, weights: FusedWeights) -> PromptRows:
    """Make what writes a head's KV rows of prompts on a device."""
    from edgellm_ros.fused.prompt import FusedPrompt

    return FusedPrompt(device, shape, weights)


def draft_shape(config: EngineConfig, model: FusedDraftModel, drafting: DraftSizes) -> FusedDraftShape:
    """Return the shape of an engine's head, for runs of the largest batch."""
    from edgellm_ros.fused.plan.shape import MOST_ROWS, FusedDraftShape

    draft, first = config.draft, model.layers[0]
    assert draft is not None  # `check_drafting`
    top_k = 1 if drafting.is_chain else drafting.drafting_top_k
    tokens = max(drafting.tokens_per_round, top_k)
    return FusedDraftShape(
        dtype=config.precision,
        layers=draft.num_layers,
        hidden=draft.hidden_size,
        heads=draft.num_attention_heads,
        kv_heads=draft.num_key_value_heads,
        head_dim=draft.head_dim,
        inner=model.intermediate_size,
        vocab=draft.vocab_size,
        rotary_dim=draft.rope.rotary_dim,
        capacity=draft.cache_capacity(config.max_kv_cache_capacity),
        epsilon=model.epsilon,
        qk_norm=first.q_norm is not None,
        qkv_bias=first.qkv_bias is not None,
        o_bias=first.o_bias is not None,
        mlp_bias=first.down_bias is not None,
        windows=tuple(layer.window for layer in model.layers),
        max_rows=min(config.max_supported_batch_size * tokens, MOST_ROWS),
        attention_gate=model.attention_gate,
        head_columns=model.lm_head.shape[1],
        norm_before_residual=model.norm_before_residual,
        joined=model.projection is None,
        feeds_back_normed_state=draft.feeds_back_normed_state,
    )


def _weights(model: FusedDraftModel, tensors: dict[str, Tensor]) -> FusedWeights:
    """Return the addresses of a head's weights on the device."""
    from edgellm_ros.fused.weights import FusedLayerWeights, FusedWeights

    address = partial(address_in, tensors)
    layers = []
    for i, layer in enumerate(model.layers):
        weights = layer_addresses(layer, tensors)
        state_norm = 0 if i or model.projection is not None else address(model.hidden_norm)
        layers.append(FusedLayerWeights(**weights, state_norm=state_norm))
    return FusedWeights(tuple(layers), address(model.norm), address(model.lm_head), owners_of(tensors))


def _bindings(shape: FusedDraftShape, takes_trees: bool) -> Iterator[Binding]:
    dtype, hidden = element_type(shape.dtype), shape.hidden
    yield from token_bindings(shape, takes_trees)
    yield Binding(names.HIDDEN_STATES, dtype, ("B", "S", hidden), True)
    yield Binding(names.LAST_TOKEN_IDS, np.dtype(np.int64), ("B", "N"), True)
    yield Binding(names.LOGITS, np.dtype(np.float32), ("B", "N", shape.vocab), False)
    yield Binding(names.NEXT_HIDDEN_STATES, dtype, ("B", "S", hidden), False)
