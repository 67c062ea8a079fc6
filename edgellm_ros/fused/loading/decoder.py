# SPDX-License-Identifier: Apache-2.0
"""Loads fused decoding for an engine directory, or tells why the engine decodes."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path

from edgellm_ros.engine.backend import Binding
from edgellm_ros.engine.device import Device
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.engine_directory.draft_config import DFLASH, EAGLE, MTP
from edgellm_ros.fused.description.decoder import FUSED_FILE, FusedModel
from edgellm_ros.fused.description.draft import FUSED_DRAFT_FILE, FusedDraftModel, StoredFusion
from edgellm_ros.fused.loading.availability import (
    FUSED,
    Unavailable,
    check_decode,
    check_device,
    check_shape,
    described,
    load_if_wanted,
    made_or_unavailable,
)
from edgellm_ros.fused.loading.backend import (
    Decoder,
    FusedBackend,
    Head,
    element_type,
    prefill_bindings,
    step_bindings,
)
from edgellm_ros.fused.loading.device_weights import (
    fused_shape,
    fused_weights,
    fusion_shape,
    load_weights,
    state_fusion,
)
from edgellm_ros.fused.loading.drafting import DraftSizes
from edgellm_ros.fused.loading.fused_decoding import FusedDecoding
from edgellm_ros.fused.loading.many_tokens import load_many_tokens

logger = logging.getLogger(__name__)


def load_fused(
    root: Path,
    config: EngineConfig,
    device: Device,
    decode: str,
    decode_backend: str,
    drafting: DraftSizes | None,
) -> FusedDecoding | None:
    """Load fused decoding, if `decode` asks for it and engine and device have it.

    The log gets the reason where `decode` is "auto" and the engine decodes. EngineError with the reason where
    `decode` is "fused".
    """
    check_decode(decode)

    def load() -> FusedDecoding:
        check_device(device)
        if decode_backend:
            raise Unavailable(f"decode_backend is {decode_backend!r}")
        # The engine is faster in steps with adapters, so only "fused" runs these in the kernels.
        return _load(root, config, device, drafting, adapts=decode == FUSED)

    what, instead = "fused decoding is", "the engine decodes"
    return load_if_wanted(load, decode, logger, what=what, instead=instead)


def _load(
    root: Path,
    config: EngineConfig,
    device: Device,
    drafting: DraftSizes | None,
    adapts: bool,
) -> FusedDecoding:
    path = described(root, FUSED_FILE, config, "the engine")
    from edgellm_ros.fused.plan.shape import MOST_ROWS

    model = FusedModel.load(path)
    check_shape(model.problem, "this model")
    batch, nodes = config.max_supported_batch_size, drafting.tree_size if drafting is not None else 1
    rows = max(min(batch, MOST_ROWS), min(batch, MOST_ROWS // nodes) * nodes)
    head_drafts = config.draft if drafting is not None and drafting.has_head else None
    layers = config.hidden_state_layers
    if head_drafts is not None:
        layers = head_drafts.states_of_verification(layers)
    normed = head_drafts is not None and head_drafts.kind == MTP
    shape = fused_shape(config, model, rows, adapts, normed, layers)
    check_shape(shape.unsupported(), "this model")
    _check_memory(device, model)
    states = {*config.hidden_state_layers}
    if head_drafts is not None:
        states |= {*head_drafts.base_state_layers}
    _check_states(model, states)
    draft = _load_fusion(root, config) if head_drafts is not None and head_drafts.kind == EAGLE else None
    dtype = element_type(config.precision)
    tensors = load_weights(path.parent, model, dtype, device)
    fusion = None
    if draft is not None:
        tensors |= load_weights(path.parent, draft, dtype, device)
        fusion = state_fusion(config, draft, tensors, shape.max_rows)
    with made_or_unavailable():
        weights = fused_weights(model, tensors)
        decoder = make_decoder(device, shape, weights, fusion)
    trees = drafting is not None and not drafting.is_chain
    fused_size = head_drafts.hidden_size if head_drafts is not None and head_drafts.kind != DFLASH else 0
    head = _head(model, config)
    bindings = partial(
        step_bindings, shape, head, trees=trees, fused_size=fused_size, recurrent=config.llm.recurrent
    )
    most_rows, verified = min(batch, decoder.max_rows), min(batch, decoder.max_rows // nodes) * nodes
    many = load_many_tokens(device, shape, weights, decoder, config=config, drafting=drafting, fusion=fusion)

    def executor(name: str, bindings: Iterable[Binding], runs: Decoder = decoder) -> EngineExecutor:
        return EngineExecutor(FusedBackend(runs, bindings, device), name)

    adapted = prefill = verification = None
    if decoder.max_adapted_rows:
        adapted = executor("llm/fused with adapters", bindings(adapted=True))
    if many.prefill is not None:
        deepstack, recurrent = config.num_deepstack_features, config.llm.recurrent
        prompt = prefill_bindings(shape, head, deepstack, fused_size, recurrent)
        prefill = executor("llm/fused prefill", prompt, many.prefill)
    if many.verification is not None:
        verification = executor("llm/fused verification", bindings(), many.verification)
    own = {weight.name for weight in model.unshared()}
    return FusedDecoding(
        executor("llm/fused", bindings(verifies=drafting is not None)),
        most_rows,
        {name: tensor for name, tensor in tensors.items() if name not in own},
        max(verified, many.most_nodes) if drafting is not None else 0,
        adapted=adapted,
        most_adapted_rows=decoder.max_adapted_rows,
        most_lora_rank=shape.lora_rank,
        most_step_rows=decoder.max_rows,
        prefill=prefill,
        verification=verification,
    )


def _check_states(model: FusedModel, layers: Collection[int]) -> None:
    """Raise Unavailable if the kernels do not store the states before a layer.

    The kernels that begin a mixer store it. layers: counted from 0; the number of layers = after the last.
    """
    for layer in sorted(layers):
        if layer < len(model.layers) and model.layers[layer].input_norm is None:
            raise Unavailable(
                f"layer {layer} is a feed-forward block alone, and the states before it are asked for"
            )


def _check_memory(device: Device, model: FusedModel) -> None:
    """Raise Unavailable if FP8 weights do not fit beside ONNX Runtime's 16-bit copies."""
    values = sum(weight.size for weight in model.unshared() if len(weight.shape) == 3)
    free, _ = device.memory_info()
    if free and 3 * values > free:
        raise Unavailable(
            f"FP8 weights take {values / 1e6:.1f} MB beside {2 * values / 1e6:.1f} MB in ONNX Runtime, and "
            f"{free / 1e6:.1f} MB are free"
        )


def make_decoder(device: Device, shape, weights, fusion):  # type: ignore[no-untyped-def]
    """Make the decoder that runs steps on a device; fusion: of a draft head, or None."""
    from edgellm_ros.fused.decoder import FusedDecoder

    return FusedDecoder(device, shape, weights, fusion=fusion)


def _load_fusion(root: Path, config: EngineConfig) -> StoredFusion:
    """Return the description of a draft head's fusion, which the kernels take.

    Unavailable if there is none, or if the kernels do not take it.
    """
    fusion = FusedDraftModel.load(described(root, FUSED_DRAFT_FILE, config, "the engine")).fusion
    if fusion is None:
        raise ValueError(f"{root / FUSED_DRAFT_FILE}: fusion is missing, by config.json the head has one")
    check_shape(fusion_shape(config, fusion, 1).unsupported(), "the draft head's fusion")
    return fusion


def _head(model: FusedModel, config: EngineConfig) -> Head | None:
    """Return the LM head if it is an input."""
    hidden, vocab = config.hidden_size, config.output_vocab_size
    if model.tied:
        return Head(names.EMBEDDING, (vocab, hidden))
    own = model.lm_head or model.quantized_head
    return Head(names.LM_HEAD, (hidden, vocab)) if own is None else None
