# SPDX-License-Identifier: Apache-2.0
"""Diffusion Policy in the engine, against LeRobot's own code with random weights."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")

from diffusion_reference import DiffusionReference  # noqa: E402
from policy_shapes import PolicyShape  # noqa: E402

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.kernels.random import normal_noise  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from edgellm_ros.runtime.request import LLMGenerationRequest  # noqa: E402

TOLERANCE = 1e-3  # of the range of the actions
SHAPES = {
    "defaults": PolicyShape({"top": (48, 64)}),
    "DDIM, two cameras, cut": PolicyShape(
        {"top": (56, 64), "wrist": (56, 64)},
        policy={"noise_scheduler_type": "DDIM", "num_inference_steps": 7, "crop_shape": (49, 60)},
    ),
    "an encoder of each camera, resized and cut": PolicyShape(
        {"left": (75, 91), "right": (75, 91)},
        state=3,
        policy={
            "use_separate_rgb_encoder_per_camera": True,
            "resize_shape": (50, 70),
            "crop_ratio": 0.9,
            "num_inference_steps": 8,
        },
    ),
    "clean actions, environment": PolicyShape(
        {"top": (64, 48)},
        environment=4,
        ways={"VISUAL": "IDENTITY", "ENV": "MEAN_STD", "ACTION": "MEAN_STD"},
        policy={"prediction_type": "sample", "clip_sample": False, "beta_schedule": "linear"},
    ),
    "DDIM of clean actions, three observations": PolicyShape(
        {"top": (48, 48)},
        policy={
            "n_obs_steps": 3,
            "noise_scheduler_type": "DDIM",
            "prediction_type": "sample",
            "clip_sample_range": 0.3,
            "use_film_scale_modulation": False,
        },
    ),
    "batch norm, one observation, made larger": PolicyShape(
        {"top": (40, 40)},
        policy={"n_obs_steps": 1, "use_group_norm": False, "resize_shape": (56, 48), "horizon": 12},
    ),
    "resnet34, three levels": PolicyShape(
        {"top": (48, 48)},
        ways={"VISUAL": "MIN_MAX", "STATE": "QUANTILES", "ACTION": "QUANTILES"},
        policy={
            "vision_backbone": "resnet34",
            "down_dims": (16, 24, 32),
            "kernel_size": 5,
            "n_groups": 4,
            "horizon": 16,
            "n_action_steps": 15,
            "beta_schedule": "scaled_linear",
            "num_inference_steps": 11,
        },
    ),
    "resnet50, one level, DDIM without clips": PolicyShape(
        {"top": (48, 48)},
        actions=2,
        policy={
            "vision_backbone": "resnet50",
            "down_dims": (24,),
            "horizon": 6,
            "noise_scheduler_type": "DDIM",
            "clip_sample": False,
            "beta_schedule": "linear",
            "num_inference_steps": 30,
        },
    ),
}


@pytest.mark.parametrize("name", list(SHAPES))
def test_actions_are_those_of_lerobot(name, tmp_path, monkeypatch):
    """One plan is of the first observation, one is made when its actions are taken."""
    seed = list(SHAPES).index(name)
    reference = DiffusionReference(SHAPES[name], seed)
    shape, config = reference.shape, reference.config
    exported = export(reference.save(tmp_path / "checkpoint"), tmp_path / "engine").policy
    rng, taken = np.random.default_rng(seed), config.n_action_steps
    states = rng.normal(size=(taken + 1, shape.state)).astype(np.float32)
    environments = rng.normal(size=(taken + 1, shape.environment)).astype(np.float32)
    frames = {
        camera: np.stack(
            [rng.integers(0, 256 - 150 * (time % 2), (*size, 3), dtype=np.uint8) for time in range(taken + 1)]
        )
        for camera, size in shape.cameras.items()
    }
    steps = config.num_inference_steps or config.num_train_timesteps
    drawn = steps if config.noise_scheduler_type == "DDPM" else 1
    sizes = drawn, config.horizon, shape.actions
    expected, plans = [], []
    with LLMInferenceRuntime(tmp_path / "engine") as runtime:
        for time in range(taken + 1):
            noise = normal_noise(time, 1, int(np.prod(sizes))).reshape(sizes)
            seen = {camera: images[time] for camera, images in frames.items()}
            batch = reference.batch(states[time], environments[time], seen)
            expected.append(reference.action(batch, noise, monkeypatch))
            if time % taken == 0:
                first = max(0, time - config.n_obs_steps + 1)
                # an observation, or several, oldest first
                last = time if first == time else slice(first, time + 1)
                request = LLMGenerationRequest(
                    images=tuple(images[last] for images in frames.values()),
                    state=np.concatenate([states, environments], axis=1)[last],
                    noise_seed=time,
                )
                plans.append(runtime.handle_request(request).actions[0])
    assert plans[0].shape == (taken, shape.actions) == (exported.action_space.horizon, shape.actions)
    range_ = np.max(expected) - np.min(expected)
    assert range_ > 0.5
    found = np.stack([*plans[0], plans[1][0]])
    print(name, np.abs(found - expected).max() / range_)
    np.testing.assert_allclose(found, np.stack(expected), atol=TOLERANCE * range_)
    assert np.abs(plans[0][0] - plans[1][0]).max() > 0.01 * range_
