# SPDX-License-Identifier: Apache-2.0
"""Loads a vision tower's fused kernels, and chooses between them and the engine."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from edgellm_ros.engine.backend import Binding
from edgellm_ros.engine.device import Device, on_device
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.fused.description.vision import FUSED_VISION_FILE, FusedVisionModel
from edgellm_ros.fused.loading.agreement import choose
from edgellm_ros.fused.loading.availability import (
    AUTO,
    ENGINE,
    check_device,
    check_shape,
    described,
    load_if_wanted,
    made_or_unavailable,
)
from edgellm_ros.fused.loading.backend import Decoder, FusedBackend, element_type
from edgellm_ros.fused.loading.device_weights import address_in, load_weights, owners_of
from edgellm_ros.multimodal.vision_config import InternVLVisionConfig, Qwen3VisionConfig
from edgellm_ros.multimodal.vision_runner import CAMERA, RowsOf, VisionRunner

if TYPE_CHECKING:
    from edgellm_ros.fused.plan.vision import VisionShape
    from edgellm_ros.fused.vision import VisionWeights

logger = logging.getLogger(__name__)

Tower = Qwen3VisionConfig | InternVLVisionConfig  # the kinds that have kernels


class FusedVisionTower(NamedTuple):
    """The fused kernels of a vision tower, and their weights, which the engine shares."""

    executor: EngineExecutor | None = None  # None = the engine encodes images
    shared: dict[str, Tensor] | None = None  # by name of the graph's initializer


def load_fused_vision(root: Path, config: EngineConfig, device: Device, decode: str) -> FusedVisionTower:
    """Load a vision tower's fused kernels unless `decode` is "engine".

    Empty, with the reason in the log, if the engine encodes images: with `decode` "fused" too, which is about
    decode steps.
    """
    if not isinstance(config.vision, Tower):
        return FusedVisionTower()
    what, instead = "the vision tower's fused kernels are", "the engine encodes images"
    load, wanted = partial(_load, root, config, config.vision, device), ENGINE if decode == ENGINE else AUTO
    return load_if_wanted(load, wanted, logger, what=what, instead=instead) or FusedVisionTower()


def _load(root: Path, config: EngineConfig, tower: Tower, device: Device) -> FusedVisionTower:
    check_device(device)
    path = described(root, FUSED_VISION_FILE, config, "the engine")
    model, dtype = FusedVisionModel.load(path), element_type(config.precision)
    shape = vision_shape(config.precision, tower, model)
    check_shape(shape.unsupported(), "this vision tower")
    tensors = load_weights(path.parent, model, dtype, device)
    with made_or_unavailable():
        vision = make_vision(device, shape, vision_weights(model, tensors, device))
    backend = FusedBackend(vision, vision_bindings(shape, tower), device)
    return FusedVisionTower(EngineExecutor(backend, "visual/fused"), tensors)


def make_vision(device: Any, shape: VisionShape, weights: VisionWeights) -> Decoder:
    """Make what encodes images on a device."""
    from edgellm_ros.fused.cuda.products import CublasProducts
    from edgellm_ros.fused.vision import FusedVision

    return FusedVision(device, shape, weights, CublasProducts(device, shape.dtype))


def vision_shape(precision: str, tower: Tower, model: FusedVisionModel) -> VisionShape:
    """Return the shape of an engine's vision tower."""
    from edgellm_ros.fused.plan.vision import VisionShape

    return VisionShape(
        dtype=precision,
        depth=tower.depth,
        hidden=tower.hidden_size,
        heads=tower.num_heads,
        inner=model.intermediate_size,
        patch=tower.patch_dim,
        merged=tower.patches_per_token * tower.hidden_size,
        raised=model.merger.first.shape[1],
        out=tower.out_hidden_size,
        deepstack=tower.deepstack_visual_indexes if isinstance(tower, Qwen3VisionConfig) else (),
        epsilon=model.epsilon,
        merger_epsilon=model.merger_epsilon,
        tile=tower.tile_patches + 1 if isinstance(tower, InternVLVisionConfig) else 0,
    )


def vision_weights(model: FusedVisionModel, tensors: Mapping[str, Tensor], device: Device) -> VisionWeights:
    """Return the addresses of weights on the device."""
    from edgellm_ros.fused.vision import MergerWeights, VisionBlockWeights, VisionWeights

    def addresses(kind: type, part: object) -> dict[str, int]:
        return {field.name: address_in(tensors, getattr(part, field.name)) for field in fields(kind)}

    def merger(part: object) -> MergerWeights:
        return MergerWeights(**addresses(MergerWeights, part))

    biases = _summed_biases(model, tensors, device)
    return VisionWeights(
        patch_embed=address_in(tensors, model.patch_embed),
        patch_embed_bias=address_in(tensors, model.patch_embed_bias),
        positions=address_in(tensors, model.positions),
        biases=biases.pointer,
        blocks=tuple(VisionBlockWeights(**addresses(VisionBlockWeights, each)) for each in model.blocks),
        merger=merger(model.merger),
        deepstack_mergers=tuple(map(merger, model.deepstack_mergers)),
        owners=(*owners_of(tensors), biases),
    )


def _summed_biases(model: FusedVisionModel, tensors: Mapping[str, Tensor], device: Device) -> Tensor:
    """Return `VisionWeights.biases` on the device."""
    biases = [bias for block in model.blocks for bias in (block.proj_bias, block.fc2_bias)]
    rows = [device.download(tensors[bias.name]).astype(np.float32) for bias in biases]
    return on_device(device, np.cumsum([np.zeros_like(rows[0]), *rows], axis=0, dtype=np.float32))


def vision_bindings(shape: VisionShape, tower: Tower) -> Iterator[Binding]:
    """Yield the tensors of a run: those of `visual/model.onnx`."""
    float32, dtype = np.dtype(np.float32), element_type(shape.dtype)
    yield Binding(names.IMAGE_EMBEDS, dtype, ("R", shape.out), False)
    if isinstance(tower, InternVLVisionConfig):
        yield Binding(names.PIXEL_VALUES, float32, ("T", tower.tile_patches, shape.patch), True)
        return
    yield Binding(names.PIXEL_VALUES, float32, ("P", shape.patch), True)
    yield Binding(names.ROPE_COS, float32, ("P", shape.head_dim // 2), True)
    yield Binding(names.ROPE_SIN, float32, ("P", shape.head_dim // 2), True)
    yield Binding(names.POS_EMBED_INDEX, np.dtype(np.int64), (4, "P"), True)
    yield Binding(names.POS_EMBED_WEIGHT, float32, (4, "P"), True)
    for i in range(tower.num_deepstack_features):
        yield Binding(names.deepstack_embeds(i), dtype, ("R", shape.out), False)


def choose_by_time(device: Device, runner: VisionRunner, rows_of: RowsOf) -> None:
    """Let a runner's fused kernels encode images if they are faster than the engine.

    The kernels are not used if their rows differ from the engine's, or from run to run. The log has the
    choice and the times. rows_of: as of `VisionRunner.warm_up`.
    """
    if not runner.takes_camera_images:
        runner.uses_fused = False
        logger.info(
            "the engine encodes images: it takes none of %dx%d, on which the kernels are compared",
            *CAMERA[::-1],
        )
        return
    image = np.random.default_rng(0).integers(0, 256, (*CAMERA, 3), np.uint8)

    def run() -> list[Tensor]:
        rows, deepstack = rows_of(runner.camera_tokens)
        runner.encode(image, rows, deepstack)
        return [rows, *deepstack]

    times = choose(device, runner, run, lambda rows: np.concatenate([device.download(each) for each in rows]))
    if times.problem:
        logger.warning("the engine encodes images: the rows of the fused kernels %s", times.problem)
        return
    logger.info(
        "the %s images (ms per image of %dx%d: %.3f fused, %.3f engine)",
        "fused kernels encode" if runner.uses_fused else "engine encodes",
        *CAMERA[::-1],
        1e3 * times.fused,
        1e3 * times.engine,
    )
