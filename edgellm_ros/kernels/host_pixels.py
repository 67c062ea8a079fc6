# SPDX-License-Identifier: Apache-2.0
"""The kernels that prepare images, in NumPy, OpenCV and Pillow."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import cv2
from PIL import Image

from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels.bilinear import Placement, resized, write_placed
from edgellm_ros.kernels.protocol import PatchLayout


class HostPixelKernels:
    """The kernels that prepare images, on a CPU; `Kernels` documents the methods."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(3, thread_name_prefix="pixels")  # one for each channel

    def resize(self, image: Tensor, out: Tensor) -> None:
        # Pillow uses one thread, so the channels are resized side by side.
        channels, height, width = out.shape
        planes = cv2.split(image.array) if channels > 1 else [image.array[..., 0]]
        same = image.shape[:2] == (height, width)

        def work(channel: int) -> None:
            plane = planes[channel]
            if not same:
                plane = Image.fromarray(plane).resize((width, height), Image.Resampling.BICUBIC)
            out.array[channel] = plane

        list(self._threads.map(work, range(channels)))

    def place_image(self, image: Tensor, placement: Placement, fill: float, out: Tensor) -> None:
        write_placed(resized(image.array, placement.rows, placement.columns), placement, fill, out.array)

    def cut_patches(self, levels: Tensor, frames: Tensor, layout: PatchLayout, out: Tensor) -> None:
        count, channels, height, width = frames.shape
        patch, merge = layout.patch_size, layout.block_size // layout.patch_size
        rows, columns = height // layout.tile_height, width // layout.tile_width
        blocks = layout.tile_height // layout.block_size, layout.tile_width // layout.block_size
        patches = out.array.reshape(rows, columns, *blocks, merge, merge, channels, -1, patch, patch)

        def work(channel: int) -> None:
            values = levels.array[channel]
            for place in range(patches.shape[-3]):
                target = patches[..., channel, place, :, :]
                if place >= count:
                    target[...] = patches[..., channel, place - 1, :, :]
                    continue
                # lines of pixels are looked up and copied, not single ones
                lines = frames.array[place, channel].reshape(
                    rows, blocks[0], merge, patch, columns, blocks[1], merge, patch
                )
                target[...] = values[lines.transpose(0, 4, 1, 5, 2, 6, 3, 7)]

        list(self._threads.map(work, range(channels)))
