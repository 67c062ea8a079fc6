# SPDX-License-Identifier: Apache-2.0
import pytest
from side import Side


@pytest.fixture(scope="session")
def side(device, kernels) -> Side:
    """The device under test."""
    return Side(device, kernels)
