# SPDX-License-Identifier: Apache-2.0
"""CroppedCameraRows: cropped images in a vision tower for images of any size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np

from edgellm_ros.diffusion.groot_config import GrootConfig
from edgellm_ros.engine.device import Device
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory.binding_names import (
    IMAGE_EMBEDS,
    ROPE_COS,
    ROPE_SIN,
    ROW_ORDER,
    ROW_PLACES,
    deepstack_embeds,
)
from edgellm_ros.engine_directory.rope_config import RopeConfig
from edgellm_ros.kernels import Kernels
from edgellm_ros.multimodal.cropped_image import cropped_image
from edgellm_ros.multimodal.image_crop import cropped_size
from edgellm_ros.multimodal.patch_processor import PatchProcessor
from edgellm_ros.multimodal.vision_runner import VisionRunner
from edgellm_ros.runtime.prompt.rope import get_rope_index, plain_rope_index

TEXT, IMAGE = 0, 1  # in place of tokens
KEPT_LAYOUTS = 8


class CroppedCameraRows:
    """Images of any size, one run each; see `CameraRows`.

    All cameras of the policy must have an image. Where a prompt has several images of a camera, the rows of
    the one image are copied.
    """

    def __init__(
        self,
        visual: EngineExecutor,
        config: GrootConfig,
        rope: RopeConfig,
        device: Device,
        kernels: Kernels,
    ) -> None:
        self._config, self._rope = config, rope
        self._processor = PatchProcessor(config.vision)
        self._runner = VisionRunner(visual, config.vision, device, kernels, config.cameras.tokens)
        levels = range(config.vision.num_deepstack_features)
        names = [IMAGE_EMBEDS, *map(deepstack_embeds, levels)]
        shape = config.images * config.cameras.tokens, config.vision.out_hidden_size
        self._device = device
        self._rows = {name: device.empty(shape, visual.dtype(name)) for name in names}
        self._layouts: OrderedDict[tuple, Mapping[str, np.ndarray]] = OrderedDict()

    def count(self, images: Sequence[np.ndarray]) -> int:
        cameras = self._config.cameras
        if len(images) != len(cameras.names):
            raise ValueError(
                f"the request has {len(images)} images; {self._config.kind} needs one of each camera: "
                f"{', '.join(cameras.names)}"
            )
        grids = self._grids(images)
        for name, image, (rows, columns) in zip(cameras.names, images, grids, strict=True):
            if rows * columns > cameras.tokens:
                raise ValueError(
                    f"camera {name}: an image of {image.shape[1]}x{image.shape[0]} pixels becomes "
                    f"{rows * columns} rows, the engine takes at most {cameras.tokens}"
                )
        return cameras.frames * sum(rows * columns for rows, columns in grids)

    def encode(self, images: Sequence[np.ndarray]) -> Mapping[str, Tensor]:
        first, crop, frames = 0, self._config.cameras.crop, self._config.cameras.frames
        for image, (rows, columns) in zip(images, self._grids(images), strict=True):
            last = first + rows * columns
            embeds, *deepstack = (each.rows(first, last) for each in self._rows.values())
            self._runner.encode(cropped_image(crop, image), embeds, deepstack)
            first = last
        for each in self._rows.values():
            for place in range(first, first * frames, first):
                self._device.copy(each.rows(place, place + first), each.rows(0, first))
        return {name: each.rows(0, first * frames) for name, each in self._rows.items()}

    def layout(self, images: Sequence[np.ndarray], tokens: int) -> Mapping[str, np.ndarray]:
        grids = self._grids(images) * self._config.cameras.frames
        key = (*grids, tokens)
        if key not in self._layouts:
            self._layouts[key] = prompt_layout(grids, tokens, self._config.places(tokens), self._rope)
            if len(self._layouts) > KEPT_LAYOUTS:
                self._layouts.popitem(last=False)
        self._layouts.move_to_end(key)
        return self._layouts[key]

    def _grids(self, images: Sequence[np.ndarray]) -> list[tuple[int, int]]:
        crop, grid = self._config.cameras.crop, self._processor.token_grid
        return [grid(*cropped_size(crop, (image.shape[0], image.shape[1]))) for image in images]


def prompt_layout(
    grids: Sequence[tuple[int, int]], tokens: int, places: Sequence[int], rope: RopeConfig
) -> dict[str, np.ndarray]:
    """Compute where images and tokens are in a prompt of S rows, and the rotary rows.

    grids: height and width of each image in rows; places: how many tokens precede each image. Keys:
    - row_order [S] int64: of each row of the prompt, its place among rows of images and then tokens
    - row_places [S] int64: the inverse
    - rope_cos, rope_sin [1,S,D/2] float32
    """
    kinds: list[int] = []
    for before, place, (rows, columns) in zip((0, *places), places, grids, strict=False):
        kinds += [TEXT] * (place - before) + [IMAGE] * (rows * columns)
    kinds += [TEXT] * (tokens - places[-1])
    row_places = np.argsort(np.array(kinds) == TEXT, kind="stable")
    section = rope.mrope_section or (0, 0, 0)
    if rope.mrope_section:
        positions, _ = get_rope_index(kinds, grids, IMAGE, TEXT)
    else:
        positions = plain_rope_index(len(kinds))
    axes = np.zeros(len(rope.frequencies), np.int64)
    for axis in (1, 2):
        axes[axis : 3 * section[axis] : 3] = axis
    angles = positions[axes].T * np.array(rope.frequencies, np.float32)
    scaling = np.float32(rope.attention_scaling)
    return {
        ROW_ORDER: np.argsort(row_places).astype(np.int64),
        ROW_PLACES: row_places.astype(np.int64),
        ROPE_COS: (np.cos(angles) * scaling)[None],
        ROPE_SIN: (np.sin(angles) * scaling)[None],
    }
