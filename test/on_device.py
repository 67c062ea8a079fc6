# SPDX-License-Identifier: Apache-2.0
"""The device that `pytest --device NAME` names: what goes in, what comes out, what counts as equal."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from edgellm_ros.engine.device import Device, open_device
from edgellm_ros.engine.tensor import Tensor

DOUBLE = "tensorrt-double"  # test/tensorrt_double_device.py
DEVICES = ("cpu", "cuda", "tensorrt", DOUBLE)  # what --device takes
ROUNDING = 1e-4  # of the largest value: what fp32 sums may differ in that were added in another order
chosen = "cpu"  # what --device gave


def for_runtime(name: str) -> str | Device:
    """What `LLMInferenceRuntime(..., device=...)` takes, of the name that --device gave."""
    if name == DOUBLE:
        from tensorrt_double_device import open_double

        return open_double()
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


@contextmanager
def edited(device: Device, tensor: Tensor) -> Iterator[np.ndarray]:
    """`with edited(device, tensor) as array`: what the block does to the array happens to the tensor."""
    array = device.download(tensor)
    yield array
    device.upload(tensor, array)


def assert_same_up_to_rounding(found: Any, expected: Any) -> None:
    """For what was computed in different batches or pieces: the same bits on the CPU.

    Elsewhere the libraries choose by the shapes how they add, so there within 1e-4 of the largest expected
    value.
    """
    if chosen == "cpu":
        np.testing.assert_array_equal(found, expected)
        return
    largest = float(np.abs(expected).max(initial=0.0))
    np.testing.assert_allclose(found, expected, rtol=ROUNDING, atol=ROUNDING * largest)


def error_without_gpu(*arguments: object) -> str:
    """The last line on standard error of `python ARGUMENTS` in a process that sees no GPU; it must fail."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0, done.stdout
    return done.stderr.splitlines()[-1]
