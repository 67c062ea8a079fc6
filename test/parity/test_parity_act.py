# SPDX-License-Identifier: Apache-2.0
"""ACT in the engine, against LeRobot's own code with random weights."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")

from act_reference import ACTReference  # noqa: E402
from camera_policy import PolicyShape  # noqa: E402

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from edgellm_ros.runtime.request import LLMGenerationRequest  # noqa: E402

TOLERANCE = 1e-3  # of the range of the actions
SHAPES = {
    "defaults": PolicyShape({"top": (48, 64), "wrist": (48, 64)}),
    "one camera, odd size": PolicyShape({"front": (75, 41)}, state=3, actions=2, policy={"chunk_size": 12}),
    "three cameras of two sizes": PolicyShape(
        {"left": (64, 64), "right": (40, 72), "top": (64, 64)},
        policy={"n_decoder_layers": 2, "n_encoder_layers": 1},
    ),
    "environment, ranges": PolicyShape(
        {"top": (64, 48)},
        environment=4,
        ways={"VISUAL": "IDENTITY", "STATE": "MIN_MAX", "ENV": "MEAN_STD", "ACTION": "MIN_MAX"},
    ),
    "no state": PolicyShape({"top": (64, 48)}, state=0, policy={"use_vae": False}),
    "environment alone, norms first": PolicyShape(
        {"top": (48, 48), "side": (48, 48)},
        state=0,
        environment=3,
        policy={"pre_norm": True, "n_decoder_layers": 3, "feedforward_activation": "gelu"},
    ),
    "resnet34, quantiles": PolicyShape(
        {"top": (56, 64)},
        ways={"VISUAL": "MIN_MAX", "STATE": "QUANTILES", "ACTION": "QUANTILES"},
        policy={"vision_backbone": "resnet34", "dim_model": 24, "n_heads": 3},
    ),
    "resnet50, dilated": PolicyShape(
        {"top": (48, 80)},
        policy={
            "vision_backbone": "resnet50",
            "replace_final_stride_with_dilation": True,
            "temporal_ensemble_coeff": 0.01,
            "n_action_steps": 1,
        },
    ),
}


@pytest.mark.parametrize("name", list(SHAPES))
def test_actions_are_those_of_lerobot(name, tmp_path):
    shape, seed = SHAPES[name], list(SHAPES).index(name)
    reference = ACTReference(shape, seed)
    config = export(reference.save(tmp_path / "checkpoint"), tmp_path / "engine")
    assert config.policy.cameras.names == tuple(shape.cameras)
    rng = np.random.default_rng(seed)
    state, environment = (rng.normal(size=n).astype(np.float32) for n in (shape.state, shape.environment))
    both = np.concatenate([state, environment])
    chunks: list[np.ndarray] = []
    with LLMInferenceRuntime(tmp_path / "engine") as runtime:
        for brightest in (256, 60):
            frames = {
                name: rng.integers(0, brightest, (*size, 3), dtype=np.uint8)
                for name, size in shape.cameras.items()
            }
            expected = reference.actions(reference.batch(state, environment, frames))
            request = LLMGenerationRequest(images=tuple(frames.values()), state=both if len(both) else None)
            (found,) = runtime.handle_request(request).actions
            assert found.shape == expected.shape
            range_ = expected.max() - expected.min()
            assert range_ > 0.5
            np.testing.assert_allclose(found, expected, atol=TOLERANCE * range_)
            chunks.append(expected)
        assert np.abs(chunks[0] - chunks[1]).max() > 0.01 * range_  # images have an influence
