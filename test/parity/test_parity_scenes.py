# SPDX-License-Identifier: Apache-2.0
"""Arena scenes, through the runtime and through transformers and PyTorch.

Training never saw the scenes: 12 of them, 50 with EDGELLM_ALL_DRAWS=1.
"""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.parity, pytest.mark.timeout(600)]
pytest.importorskip("torch")
pytest.importorskip("transformers")

from comparison import Comparison, Differences  # noqa: E402
from unseen_scenes import scenes  # noqa: E402

from fixtures.draws import draws  # noqa: E402

SCENES = draws(12, 50)
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def differences(trained_checkpoint, tmp_path_factory, runtime_device) -> list[Differences]:
    comparison = Comparison.export(trained_checkpoint, tmp_path_factory.mktemp("engine"), runtime_device)
    return [comparison.compare(scene) for scene in scenes(SCENES)]


def test_greedy_tokens_are_equal_in_every_scene(differences):
    unequal = [i for i, found in enumerate(differences) if found.tokens[0] != found.tokens[1]]
    assert unequal == []


@pytest.mark.parametrize("quantity", ["logits", "logprobs", "velocities", "actions"])
def test_largest_difference_is_within_a_thousandth(differences, quantity, record_property):
    worst = max(getattr(found, quantity) for found in differences)
    record_property(quantity, float(worst))
    print(f"{quantity}: {worst:.1e}")
    assert worst <= TOLERANCE


def test_most_scenes_end_in_a_trajectory(differences):
    """Else the comparison of actions would say little."""
    assert sum(found.has_actions for found in differences) > SCENES / 2
