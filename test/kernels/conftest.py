# SPDX-License-Identifier: Apache-2.0
import pytest

from edgellm_ros.kernels import load_tree_kernels
from fixtures.device_under_test import Side


@pytest.fixture(scope="session")
def side(device, kernels) -> Side:
    """The device under test."""
    return Side(device, kernels, load_tree_kernels(device))
