# SPDX-License-Identifier: Apache-2.0
"""Images of a caller: arrays of any library, on the host or on a GPU."""

from __future__ import annotations

import uuid
from typing import Any, cast

import numpy as np

from edgellm_ros.engine.borrowing import borrow, is_array, is_on_gpu, on_host
from edgellm_ros.engine.device import Device
from edgellm_ros.engine.tensor import Tensor


class DeviceImage:
    """An image [H, W, 3] uint8 RGB on a GPU, which is not copied through the host.

    - array: row-major, with DLPack or the CUDA array interface; must not change before `handle_request` has
      returned
    - key: identifies the contents in the prefix cache, which cannot hash them: a new `DeviceImage` is a new
      image. An object that is given again must not have changed
    """

    dtype = np.dtype(np.uint8)

    def __init__(self, array: object) -> None:
        self.array = array
        self.shape = tuple(int(size) for size in cast(Any, array).shape)
        self.key = uuid.uuid4().hex

    def on(self, device: Device) -> Tensor:
        """View the image on a device, whose later work waits for the image.

        ValueError if it is elsewhere, not row-major or not uint8.
        """
        try:
            tensor = borrow(device, self.array)
        except ValueError as error:
            raise ValueError(f"an image on a GPU: {error}") from None
        if tensor.dtype != self.dtype:
            raise ValueError(f"an image must be uint8 [height, width, 3] in RGB, got {tensor.dtype}")
        return tensor


Image = np.ndarray | DeviceImage


def as_image(value: Any) -> Any:
    """Return an array of any library as an `Image`, and anything else as it is.

    ValueError for an array on the host that NumPy cannot read.
    """
    if isinstance(value, (np.ndarray, DeviceImage)) or not is_array(value):
        return value
    return DeviceImage(value) if is_on_gpu(value) else on_host(value)
