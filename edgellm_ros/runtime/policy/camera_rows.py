# SPDX-License-Identifier: Apache-2.0
"""CameraRows: what turns camera images into rows of a policy's prefix.

`PaddedCameraRows` is for images that are squares of one size, `CroppedCameraRows` for images of any size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from edgellm_ros.diffusion.policy_config import PaddedCameraConfig
from edgellm_ros.engine.device import Device
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory.binding_names import IMAGE_EMBEDS, PIXEL_VALUES
from edgellm_ros.kernels import Kernels
from edgellm_ros.multimodal.image_pixels import check_image
from edgellm_ros.multimodal.padded_image import padded_image, placement

CHANNELS = 3


class CameraRows(Protocol):
    """Runs the vision tower, and owns its inputs and outputs."""

    def count(self, images: Sequence[np.ndarray]) -> int:
        """Return the number of rows of a request's images.

        ValueError for images that do not fit the engine.
        """
        ...

    def encode(self, images: Sequence[np.ndarray]) -> Mapping[str, Tensor]:
        """Queue the vision tower for the images; return the prefix engine's inputs."""
        ...

    def layout(self, images: Sequence[np.ndarray], tokens: int) -> Mapping[str, np.ndarray]:
        """Return the prefix engine's inputs about the places of images among tokens."""
        ...


class PaddedCameraRows:
    """Images that are filled up to squares, all in one run; see `CameraRows`.

    The device resizes them, but those that Pillow filters.
    """

    def __init__(
        self, visual: EngineExecutor, cameras: PaddedCameraConfig, device: Device, kernels: Kernels
    ) -> None:
        self._visual, self._cameras, self._device, self._kernels = visual, cameras, device, kernels
        self._frame = device.empty((0,), np.uint8)  # of one camera
        count, size = len(cameras.names), cameras.image_size
        self._pixels = device.empty((count, CHANNELS, size, size), np.float32)
        width = int(visual.bindings[IMAGE_EMBEDS].shape[1])
        self._rows = device.empty((count * cameras.tokens, width), visual.dtype(IMAGE_EMBEDS))

    def count(self, images: Sequence[np.ndarray]) -> int:
        return len(images) * self._cameras.tokens

    def encode(self, images: Sequence[np.ndarray]) -> Mapping[str, Tensor]:
        pixels = self._pixels.rows(0, len(images))
        for i, image in enumerate(images):
            self._place(image, self._pixels.rows(i, i + 1).view(*self._pixels.shape[1:]))
        rows = self._rows.rows(0, self.count(images))
        tensors = {PIXEL_VALUES: pixels, IMAGE_EMBEDS: rows}
        run_recorded(self._visual, self._device, {"N": len(images), "R": rows.shape[0]}, tensors)
        return {IMAGE_EMBEDS: rows}

    def layout(self, images: Sequence[np.ndarray], tokens: int) -> Mapping[str, np.ndarray]:
        return {}

    def _place(self, image: np.ndarray, pixels: Tensor) -> None:
        """Queue a frame to become the tower's input [3,side,side]."""
        size, fill, centred = self._cameras.image_size, self._cameras.fill, self._cameras.centred
        if self._cameras.filtered:
            self._device.upload(pixels, padded_image(image, size, fill, centred, filtered=True))
            return
        check_image(image)
        if self._frame.size < image.size:
            self._frame = self._device.empty((image.size,), np.uint8)
        frame = self._frame.view(*image.shape)
        self._device.upload(frame, image)
        self._kernels.place_image(frame, placement(image, size, centred), fill, pixels)


def run_recorded(
    engine: EngineExecutor, device: Device, dims: Mapping[str, int], tensors: Mapping[str, Tensor]
) -> None:
    """Queue a run, and record it if its tensors are those of an earlier run."""
    engine.prepare(0, dims, tensors, device.stream)
    engine.execute(device.stream)
    engine.record_repeated(device.stream)
