# SPDX-License-Identifier: Apache-2.0
import pytest

from fixtures.device_under_test import Side


@pytest.fixture(scope="session")
def side(device, kernels) -> Side:
    """The device under test."""
    return Side(device, kernels)
