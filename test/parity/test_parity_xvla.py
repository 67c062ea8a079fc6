# SPDX-License-Identifier: Apache-2.0
"""X-VLA in the engines, against LeRobot's own code with random weights.

LeRobot 0.5 saves Florence-2 in Microsoft's layout, 0.6 in that of transformers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from lerobot_policies import NEWER, run
from recorded_policies import compare
from xvla_shapes import XVLA_SHAPES

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module", params=NEWER)
def recorded(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(f"xvla-{request.param}")
    run(request.param, "record_xvla.py", request.param, str(folder))
    return folder


@pytest.mark.parametrize("name", list(XVLA_SHAPES))
def test_actions_are_those_of_lerobot(recorded, name, tmp_path):
    compare(recorded / name, tmp_path / "engine")
