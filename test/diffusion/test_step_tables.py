# SPDX-License-Identifier: Apache-2.0
"""Tables of steps, by their number."""

from __future__ import annotations

import numpy as np

from edgellm_ros.diffusion.step_tables import KEPT_TABLES, StepTables
from edgellm_ros.engine.tensor import Tensor


def test_a_table_is_made_once_for_a_number_of_steps():
    made = []

    def make(steps: int) -> Tensor:
        made.append(steps)
        return Tensor.from_array(np.zeros((steps, 2), np.float32))

    tables = StepTables(make)
    first = tables.of(10)
    assert first.shape == (10, 2)
    assert tables.of(4) is not first
    assert tables.of(10) is first
    assert made == [10, 4]
    for steps in range(20, 20 + KEPT_TABLES):
        tables.of(steps)
    assert tables.of(10) is not first  # dropped
