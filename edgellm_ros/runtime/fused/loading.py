# SPDX-License-Identifier: Apache-2.0
"""Loads fused decoding for an engine directory, or tells why the engine decodes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgellm_ros.echo import quoted
from edgellm_ros.engine.device import Device
from edgellm_ros.engine.errors import DeviceLostError, DeviceMemoryError, EngineError
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.engine_directory.fused_draft import FUSED_DRAFT_FILE, FusedDraftModel, StoredFusion
from edgellm_ros.engine_directory.fused_model import FUSED_FILE, FusedModel
from edgellm_ros.runtime.decoding.speculative.drafting_config import EAGLE, SpecDecodeDraftingConfig
from edgellm_ros.runtime.engines.fused_decoding import FusedDecoding
from edgellm_ros.runtime.fused.backend import FusedBackend, element_type
from edgellm_ros.runtime.fused.device_weights import (
    fused_shape,
    fused_weights,
    fusion_shape,
    load_weights,
    state_fusion,
)

logger = logging.getLogger(__name__)

AUTO, ENGINE, FUSED = DECODES = ("auto", "engine", "fused")  # values of the option `decode`


class Unavailable(Exception):
    """Fused decoding is not available; the text tells why."""


def check_decode(decode: str) -> None:
    """Raise ValueError for a value that the option `decode` does not have."""
    if decode not in DECODES:
        raise ValueError(f"decode must be one of {', '.join(DECODES)}, got {quoted(decode)}")


def load_fused(
    root: Path,
    config: EngineConfig,
    device: Device,
    decode: str,
    decode_backend: str,
    drafting: SpecDecodeDraftingConfig | None,
) -> FusedDecoding | None:
    """Load fused decoding, if `decode` asks for it and engine and device have it.

    The log gets the reason where `decode` is "auto" and the engine decodes. EngineError with the reason where
    `decode` is "fused".
    """
    check_decode(decode)
    if decode == ENGINE:
        return None
    try:
        _check_options(device, decode_backend)
        # Steps with adapters are slower in the kernels than in the engine.
        return _load(root, config, device, drafting, adapts=decode == FUSED)
    except Unavailable as reason:
        if decode == FUSED:
            raise EngineError(f"fused decoding is not available: {reason}") from None
        logger.info("the engine decodes: %s", reason)
        return None


def _check_options(device: Device, decode_backend: str) -> None:
    problem = device_problem(device)
    if problem is not None:
        raise Unavailable(problem)
    if decode_backend:
        raise Unavailable(f"decode_backend is {decode_backend!r}")


def device_problem(device: Device) -> str | None:
    """Return why a device cannot run the fused kernels; None if it can."""
    if device.name != "cuda":
        return f"it needs the device 'cuda', not {device.name!r}"
    from edgellm_ros.kernels.cuda.fused.decoder import OLDEST, compute_capability

    if compute_capability(device.arch) < OLDEST:
        return f"it needs a GPU of sm_{OLDEST} or later, not {device.description}"
    return None


@contextmanager
def made_or_unavailable() -> Iterator[None]:
    """Raise Unavailable where kernels cannot be made.

    That is without NVRTC, or if it does not compile them.
    """
    try:
        yield
    except (DeviceLostError, DeviceMemoryError):
        raise
    except (EngineError, ImportError) as error:
        raise Unavailable(str(error)) from None


def _load(
    root: Path,
    config: EngineConfig,
    device: Device,
    drafting: SpecDecodeDraftingConfig | None,
    adapts: bool,
) -> FusedDecoding:
    path = root / FUSED_FILE
    if not path.is_file():
        raise Unavailable(_missing(config))
    from edgellm_ros.kernels.cuda.fused.shape import MOST_ROWS

    model = FusedModel.load(path)
    if model.problem is not None:
        raise Unavailable(f"the kernels do not take this model: {model.problem}")
    batch, nodes = config.max_supported_batch_size, drafting.tree_size if drafting is not None else 1
    rows = max(min(batch, MOST_ROWS), min(batch, MOST_ROWS // nodes) * nodes)
    shape = fused_shape(config, model, rows, adapts)
    problem = shape.unsupported()
    if problem is not None:
        raise Unavailable(f"the kernels do not take this model: {problem}")
    _check_memory(device, model)
    head = _load_fusion(root, config) if drafting is not None and drafting.strategy == EAGLE else None
    dtype = element_type(config.precision)
    tensors = load_weights(path.parent, model, dtype, device)
    fusion = None
    if head is not None:
        tensors |= load_weights(path.parent, head, dtype, device)
        fusion = state_fusion(config, head, tensors, shape.max_rows)
    with made_or_unavailable():
        decoder = make_decoder(device, shape, fused_weights(model, tensors), fusion)
    trees = drafting is not None and not drafting.is_chain
    fused_size = fusion.shape.fused_size if fusion is not None else 0
    sizes = shape, device, _head(model, config), trees, fused_size
    most_rows, verified = min(batch, decoder.max_rows), min(batch, decoder.max_rows // nodes) * nodes
    executor, adapted = EngineExecutor(FusedBackend(decoder, *sizes), "llm/fused"), None
    if decoder.max_adapted_rows:
        adapted = EngineExecutor(FusedBackend(decoder, *sizes, adapted=True), "llm/fused with adapters")
    verified = verified if drafting is not None else 0
    adapters = adapted, decoder.max_adapted_rows, shape.lora_rank
    own = {weight.name for weight in model.unshared()}
    shared = {name: tensor for name, tensor in tensors.items() if name not in own}
    return FusedDecoding(executor, most_rows, shared, verified, *adapters)


def _check_memory(device: Device, model: FusedModel) -> None:
    """Raise Unavailable without room for FP8 weights beside the session's floats."""
    values = sum(weight.size for weight in model.unshared() if len(weight.shape) == 3)
    free, _ = device.memory_info()
    if free and 3 * values > free:
        raise Unavailable(
            f"FP8 weights take {values / 1e6:.1f} MB beside {2 * values / 1e6:.1f} MB in ONNX Runtime, and "
            f"{free / 1e6:.1f} MB are free"
        )


def make_decoder(device: Device, shape, weights, fusion):  # type: ignore[no-untyped-def]
    """Make the decoder that runs steps on a device; fusion: of a draft head, or None."""
    from edgellm_ros.kernels.cuda.fused.decoder import FusedDecoder

    return FusedDecoder(device, shape, weights, fusion=fusion)


def _load_fusion(root: Path, config: EngineConfig) -> StoredFusion:
    """Return the description of a draft head's fusion, which the kernels take.

    Unavailable if there is none, or if the kernels do not take it.
    """
    path = root / FUSED_DRAFT_FILE
    if not path.is_file():
        raise Unavailable(f"the engine has no {FUSED_DRAFT_FILE}: export it again")
    fusion = FusedDraftModel.load(path).fusion
    problem = fusion_shape(config, fusion, 1).unsupported()
    if problem is not None:
        raise Unavailable(f"the kernels do not take the draft head's fusion: {problem}")
    return fusion


def _missing(config: EngineConfig) -> str:
    if config.precision == "fp32":
        return "the engine has fp32, the kernels take fp16 and bf16"
    if config.llm.recurrent is not None:
        return "the model has recurrent layers"
    return f"the engine has no {FUSED_FILE}: export it again"


def _head(model: FusedModel, config: EngineConfig) -> tuple[str, tuple[int, ...]] | None:
    """Return name and shape of the LM head if it is an input."""
    hidden, vocab = config.hidden_size, config.output_vocab_size
    if model.tied:
        return names.EMBEDDING, (vocab, hidden)
    return (names.LM_HEAD, (hidden, vocab)) if model.lm_head is None else None
