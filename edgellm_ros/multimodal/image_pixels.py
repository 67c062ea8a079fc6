# SPDX-License-Identifier: Apache-2.0
"""Checks and resizes images, and cuts them into patches.

These steps are common to all kinds of vision tower. With `Kernels.normalise_pixels` after them they are
bit-equal to transformers' processors that resize with Pillow (`PilBackend`: resize, rescale, normalise).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np
from PIL import Image

from edgellm_ros.multimodal.vision_config import VisionTower


def check_image(image: np.ndarray) -> None:
    """Check that an image is [H, W, 3] uint8 with at least one pixel.

    ValueError otherwise.
    """
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        described = (
            f"{image.dtype} {list(image.shape)}" if isinstance(image, np.ndarray) else type(image).__name__
        )
        raise ValueError(f"an image must be a uint8 array [height, width, 3] in RGB, got {described}")
    if image.size == 0:
        raise ValueError(f"an image must not be empty, got shape {list(image.shape)}")


class PatchCutter:
    """Resizes images and cuts them into patches.

    levels [C, 256]: the normalised value of each of a pixel's 256 values. resample: PIL's code of the filter.
    """

    def __init__(self, config: VisionTower, levels: np.ndarray, resample: int) -> None:
        self._config = config
        self.levels = levels
        self._resample = Image.Resampling(resample)
        self._threads = ThreadPoolExecutor(3, thread_name_prefix="resize")

    @classmethod
    def for_images(cls, config: VisionTower) -> PatchCutter:
        """Make the cutter of a tower's image processor."""
        # A pixel has 256 values: rescaling and normalising are one look-up, in the reference's order of
        # roundings.
        levels = (np.arange(256, dtype=np.float64) * config.rescale_factor).astype(np.float32)
        mean, std = np.array(config.image_mean, np.float32), np.array(config.image_std, np.float32)
        return cls(config, (levels[None, :] - mean[:, None]) / std[:, None], config.resample)

    def resize(self, image: np.ndarray, height: int, width: int) -> np.ndarray:
        """Resize an image [H, W, 3] to this height and width in pixels; return its channels [3, h, w].

        The channels are resized side by side, since Pillow uses one thread.
        """
        planes = cv2.split(image)
        if (height, width) == image.shape[:2]:
            return np.stack(planes)
        resized = np.empty((3, height, width), np.uint8)

        def work(channel: int) -> None:
            plane = Image.fromarray(planes[channel]).resize((width, height), self._resample)
            resized[channel] = np.asarray(plane)

        list(self._threads.map(work, range(3)))
        return resized

    def cut(self, *frames: np.ndarray) -> np.ndarray:
        """Cut frames [3, h, w] of one size into patches, merge block by merge block, channels side by side.

        Their sides are multiples of the merge block's. Returns [P, C*T*p*p] uint8, T frames of each patch.
        """
        patch, merge = self._config.patch_size, self._config.spatial_merge_size
        rows, columns = frames[0].shape[1] // patch, frames[0].shape[2] // patch
        blocks = rows // merge, columns // merge, merge, merge
        patches = np.empty((*blocks, 3, len(frames), patch, patch), np.uint8)
        repeated = [index > 0 and frame is frames[index - 1] for index, frame in enumerate(frames)]

        def work(channel: int) -> None:
            for index, frame in enumerate(frames):
                target = patches[..., channel, index, :, :]
                if repeated[index]:
                    target[...] = patches[..., channel, index - 1, :, :]
                    continue
                # lines of bytes are copied, not single ones
                lines = frame[channel].reshape(blocks[0], merge, patch, blocks[1], merge, patch)
                target[...] = lines.transpose(0, 3, 1, 4, 2, 5)

        list(self._threads.map(work, range(3)))
        return patches.reshape(rows * columns, -1)
