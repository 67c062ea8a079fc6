# SPDX-License-Identifier: Apache-2.0
"""What a recorded graph does when it is launched."""

import numpy as np
import pytest

from fixtures.on_device import put

pytestmark = pytest.mark.only_on("cuda", reason="only a GPU has graphs with memset nodes")


@pytest.mark.parametrize("size", [1, 7, 256, 1_000_003])
def test_a_recorded_fill_happens_between_its_neighbours(device, kernels, size):
    """As a kernel node in place of the memset node: `nodes` counts those that run."""
    source, target = put(device, np.full(size, 7, np.uint8)), put(device, np.full(size, 9, np.uint8))
    before = device.zeros((size,), np.uint8)

    def work() -> None:
        device.copy(before, source)
        device.fill_zero(source)
        device.copy(target, source)

    work()
    graph = device.capture(work)
    device.upload(source, np.full(size, 5, np.uint8))
    graph.launch(device.stream)
    assert set(device.download(before)) == {5}
    assert not device.download(target).any()
    assert graph.nodes == 3
