# SPDX-License-Identifier: Apache-2.0
"""ACT in the engine, against LeRobot's own code with random weights."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.parity
pytest.importorskip("torch")

from act_reference import record_act  # noqa: E402
from policy_shapes import ACT_SHAPES  # noqa: E402
from recorded_policies import compare  # noqa: E402


@pytest.mark.parametrize("name", list(ACT_SHAPES))
def test_actions_are_those_of_lerobot(name, tmp_path):
    record_act(name, tmp_path)
    first, second = (answer.actions for answer in compare(tmp_path, tmp_path / "engine"))
    assert np.abs(first - second).max() > 0.01 * np.ptp(first)  # images have an influence
