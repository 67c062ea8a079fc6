# SPDX-License-Identifier: Apache-2.0
"""Computes the vision tower's pixel_values on the device.

The device resizes images, cuts them into patches and normalises their values.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels import Kernels
from edgellm_ros.multimodal.device_image import DeviceImage, Image
from edgellm_ros.multimodal.image_pixels import ResizedImage
from edgellm_ros.multimodal.vision_config import VisionConfig

CHANNELS = 3


class PixelBuffers:
    """Owns the memory of one run's images, of at most `max_tokens` tokens.

    The values are bit-equal to those of transformers' processors that resize with Pillow (`PilBackend`).
    """

    def __init__(self, device: Device, kernels: Kernels, config: VisionConfig, max_tokens: int) -> None:
        self._device = device
        self._kernels = kernels
        self._frames_per_patch = config.frames_per_patch
        shape = config.pixels_shape(max_tokens)
        self._images = device.empty((0,), np.uint8)  # as they come: grows with the largest image
        self._resized = device.empty(shape, np.uint8)
        self._pixel_values = device.empty(shape, np.float32)

    def compute(self, frames: Sequence[Image], sizes: Sequence[ResizedImage], levels: Tensor) -> Tensor:
        """Compute pixel_values float32 of frames [H, W, 3] uint8.

        The values are valid until the next call. Frames have one size; the last one is repeated up to the
        frames of a patch. The patches of each of `sizes` follow each other. levels [C, 256]: normalised
        values. See `VisionTower.pixels_shape`.
        """
        while len(frames) > 1 and frames[-1] is frames[-2]:
            frames = frames[:-1]
        count, shape = len(frames), frames[0].shape
        if self._images.size < count * prod(shape):
            self._images = self._device.empty((count, *shape), np.uint8)
        images = self._images.view(count, *shape)
        for index, frame in enumerate(frames):
            target = images.rows(index, index + 1)
            if isinstance(frame, DeviceImage):
                self._device.copy(target, frame.on(self._device).view(*target.shape))
            else:
                self._device.upload(target, frame[None])
        rows, row_size = 0, prod(self._pixel_values.shape[1:])
        for size in sizes:
            resized = self._resized.view(count, CHANNELS, size.height, size.width)
            for index in range(count):
                one = images.rows(index, index + 1), resized.rows(index, index + 1)
                self._kernels.resize(*(tensor.view(*tensor.shape[1:]) for tensor in one))
            first = rows
            rows += CHANNELS * self._frames_per_patch * size.height * size.width // row_size
            self._kernels.cut_patches(levels, resized, size.layout, self._pixel_values.rows(first, rows))
        return self._pixel_values.rows(0, rows)
