# SPDX-License-Identifier: Apache-2.0
"""The device that `pytest --device NAME` names: what goes in, what comes out, what counts as equal."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgellm_ros.engine.device import Device, open_device
from edgellm_ros.engine.tensor import Tensor

DEVICES = ("cpu", "cuda", "tensorrt")  # what --device takes
ROUNDING = 1e-4  # of the largest value: what fp32 sums may differ in that were added in another order


def for_runtime(name: str) -> str | Device:
    """What `LLMInferenceRuntime(..., device=...)` takes, of the name that --device gave."""
    return name


def open_for_tests(name: str) -> Device:
    """The device itself, of the name that --device gave."""
    made = for_runtime(name)
    return open_device(made) if isinstance(made, str) else made


def put(device: Device, array: Any, dtype: Any = None) -> Tensor:
    """A new tensor on the device with the contents of an array or list."""
    array = np.ascontiguousarray(array, dtype)
    tensor = device.empty(array.shape, array.dtype)
    device.upload(tensor, array)
    return tensor


def assert_same_up_to_rounding(device: Device, found: Any, expected: Any) -> None:
    """The same bits on the CPU. Elsewhere the libraries choose how to add by the shapes, so there within 1e-4
    of the largest expected value.
    """
    if device.name == "cpu":
        np.testing.assert_array_equal(found, expected)
        return
    largest = float(np.abs(expected).max(initial=0.0))
    np.testing.assert_allclose(found, expected, rtol=ROUNDING, atol=ROUNDING * largest)
