# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from edgellm_ros.kernels import load_tree_kernels
from fixtures.device_under_test import Side, host_side


@pytest.fixture(scope="session")
def side(device, kernels) -> Side:
    """The device under test."""
    return Side(device, kernels, load_tree_kernels(device))


@pytest.fixture(scope="session")
def double():
    pytest.importorskip("cuda.core", reason="the CUDA wheels are not installed (requirements-test.txt)")
    from doubles.cuda_double import build

    return build()


@pytest.fixture(scope="session")
def cuda_side(request, device, kernels) -> Side:
    """The device under test; on the host the CUDA kernels, with five SMs."""
    if device.memory == "cuda":
        return Side(device, kernels, load_tree_kernels(device))
    from doubles.cuda_double import double_side

    return double_side(request.getfixturevalue("double"), multiprocessors=5)


@pytest.fixture
def agree(cuda_side):
    """Function that checks that run(side) returns equal bits on the host and in CUDA."""

    def check(run) -> None:
        expected, found = (
            [place.read(tensor) for tensor in run(place)] for place in (host_side(), cuda_side)
        )
        for index, (theirs, ours) in enumerate(zip(expected, found, strict=True)):
            np.testing.assert_array_equal(
                ours.view(np.uint8), theirs.view(np.uint8), err_msg=f"output {index}"
            )

    return check


@pytest.fixture(params=["device", pytest.param("cuda", marks=pytest.mark.slow)])
def each_side(request, device, kernels) -> Side:
    """The device under test, and the CUDA kernels on the host."""
    if request.param == "device":
        return Side(device, kernels, load_tree_kernels(device))
    if device.memory == "cuda":
        pytest.skip("the device under test is this one")
    return request.getfixturevalue("cuda_side")
