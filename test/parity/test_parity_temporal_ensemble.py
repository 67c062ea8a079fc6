# SPDX-License-Identifier: Apache-2.0
"""Temporal ensembling by stamps, against LeRobot's ACTTemporalEnsembler."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")

import lerobot_policies  # noqa: E402
from act_reference import ACTReference  # noqa: E402
from policy_shapes import PolicyShape  # noqa: E402

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.ros.arm.temporal_ensemble import TemporalEnsemble  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from edgellm_ros.runtime.request import LLMGenerationRequest  # noqa: E402

DT = 1 / 30
BEGIN = 1_700_000_000_123_456_789  # ns


def stamp(frame: int) -> int:
    """Return the stamp in ns of a frame, one of each DT."""
    return BEGIN + round(frame * DT * 1e9)


@pytest.mark.parametrize("coeff", [0.01, 0.0, -0.05, 0.3])
@pytest.mark.parametrize("rows", [1, 7, 100])
def test_means_are_those_of_lerobots_class(rows, coeff):
    modeling, _ = lerobot_policies.act()
    theirs, ours = modeling.ACTTemporalEnsembler(coeff, rows), TemporalEnsemble()
    rng = np.random.default_rng(rows)
    differences = []
    for frame in range(2 * rows + 20):
        chunk = rng.normal(size=(rows, 6))
        expected = theirs.update(torch.from_numpy(chunk)[None])
        found = ours.add(stamp(frame), DT, chunk, coeff)
        differences.append(np.abs(found[0] - expected[0].numpy()).max())
        rest = theirs.ensembled_actions[0].numpy()  # what is predicted by now for later times
        differences.append(np.abs(found[1:] - rest).max(initial=0.0))
    assert max(differences) < 1e-6
    assert rows == 1 or np.abs(found - chunk).max() > 0.1


def test_executed_actions_are_those_of_lerobots_policy(tmp_path):
    """LeRobot averages before, and this package after the actions have their units."""
    size, coeff = (48, 64), 0.1
    options = {"temporal_ensemble_coeff": coeff, "n_action_steps": 1}
    reference = ACTReference(PolicyShape({"top": size}, policy=options), seed=3)
    export(reference.save(tmp_path / "checkpoint"), tmp_path / "engine")
    reference.policy.reset()
    ensemble, rng = TemporalEnsemble(), np.random.default_rng(3)
    found, expected = [], []
    with LLMInferenceRuntime(tmp_path / "engine") as runtime:
        for frame in range(12):
            image = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
            state = rng.normal(size=6).astype(np.float32)
            batch = reference.batch(state, np.zeros(0, np.float32), {"top": image})
            with torch.inference_mode():
                action = reference.policy.select_action(batch)
            expected.append(reference.after(action)[0].numpy())
            (chunk,) = runtime.handle_request(LLMGenerationRequest(images=(image,), state=state)).actions
            found.append(ensemble.add(stamp(frame), DT, chunk.astype(np.float64), coeff)[0])
    np.testing.assert_allclose(found, expected, atol=1e-3 * np.ptp(expected))
    assert np.ptp(expected, axis=0).max() > 0.1
