# SPDX-License-Identifier: Apache-2.0
"""Runs one image through the vision tower, into embedding rows of the LLM."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.executor import BindingSnapshot, EngineExecutor
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.multimodal.config import VisionConfig
from edgellm_ros.multimodal.image_processor import ImageProcessor, check_image, smart_resize
from edgellm_ros.multimodal.vision_positions import vision_positions

MAX_CACHED_GRIDS = 8


class VisionRunner:
    """Runs the vision tower, one image per run, and owns its inputs.

    The rows of an image depend on that image alone. `max_tokens`: largest number of rows of one image (the
    limit of a prompt).
    """

    def __init__(
        self, executor: EngineExecutor, config: VisionConfig, device: Device, max_tokens: int
    ) -> None:
        self._executor = executor
        self._config = config
        self._device = device
        self._max_tokens = max_tokens
        self._processor = ImageProcessor(config)
        self._pixel_values = device.empty(
            (max_tokens * config.patches_per_token, config.patch_dim), np.float32
        )
        self._last_run: BindingSnapshot | None = None
        self._positions: OrderedDict[tuple[int, int], dict[str, Tensor]] = OrderedDict()

    def token_grid(self, image: np.ndarray) -> tuple[int, int]:
        """Compute rows and columns of tokens of an image [H, W, 3] uint8 RGB.

        ValueError for another shape or type, and for more than max_tokens tokens.
        """
        check_image(image)
        height, width = smart_resize(image.shape[0], image.shape[1], self._config)
        grid = height // self._config.size_factor, width // self._config.size_factor
        if grid[0] * grid[1] > self._max_tokens:
            raise ValueError(
                f"an image of {image.shape[1]}x{image.shape[0]} pixels becomes {grid[0] * grid[1]} tokens, "
                f"the engine takes at most {self._max_tokens}"
            )
        return grid

    def encode(self, image: np.ndarray, image_rows: Tensor, deepstack_rows: Sequence[Tensor]) -> None:
        """Encode an image into image_rows [tokens, H] and the deepstack rows."""
        patches = self._processor.process(image)
        pixel_values = self._pixel_values.rows(0, len(patches.pixel_values))
        self._device.upload(pixel_values, patches.pixel_values)
        tensors = {
            "pixel_values": pixel_values,
            **self._grid_positions(patches.grid_height, patches.grid_width),
            "image_embeds": image_rows,
            **{f"deepstack_embeds_{i}": rows for i, rows in enumerate(deepstack_rows)},
        }
        dims = {"P": pixel_values.shape[0], "R": image_rows.shape[0]}
        self._executor.prepare(0, dims, tensors, self._device.stream)
        self._executor.execute(self._device.stream)
        if self._executor.snapshot == self._last_run:  # the frames of a camera all have the same shape
            self._executor.record(self._device.stream)
        self._last_run = self._executor.snapshot

    def _grid_positions(self, grid_height: int, grid_width: int) -> dict[str, Tensor]:
        """Return the position inputs of a grid, cached on the device.

        A camera always has the same grid.
        """
        key = (grid_height, grid_width)
        if key in self._positions:
            self._positions.move_to_end(key)
            return self._positions[key]
        tensors = {}
        for name, array in vars(vision_positions(grid_height, grid_width, self._config)).items():
            tensors[name] = self._device.empty(array.shape, array.dtype)
            self._device.upload(tensors[name], array)
        self._positions[key] = tensors
        if len(self._positions) > MAX_CACHED_GRIDS:
            self._positions.popitem(last=False)
        return tensors
