# SPDX-License-Identifier: Apache-2.0
"""ActionRunner with an engine that predicts clean actions, as of X-VLA."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from edgellm_ros.diffusion.action_head import BoundContext
from edgellm_ros.diffusion.action_runner import STEPS_PER_GRAPH, ActionRunner
from edgellm_ros.diffusion.samplers import StartNoise
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.kernels.random import normal_noise
from fixtures.graphs import FLOAT, helper, save_model

SHAPE = (6, 2)


class Predicting:
    """A head whose engine predicts x * t + t."""

    sampler = StartNoise()
    shape = SHAPE
    space = None
    config = SimpleNamespace(num_denoise_steps=4)

    def bind(self, context) -> BoundContext:
        return BoundContext({}, {})


@pytest.fixture
def runner(device, kernels, tmp_path) -> ActionRunner:
    nodes = [
        helper.make_node("Mul", ["trajectory", "time"], ["product"]),
        helper.make_node("Add", ["product", "time"], ["prediction"]),
    ]
    inputs = {"trajectory": (FLOAT, ["n", *SHAPE]), "time": (FLOAT, [1])}
    path = save_model(tmp_path / "known.onnx", nodes, inputs, {"prediction": (FLOAT, ["n", *SHAPE])}, {})
    return ActionRunner(EngineExecutor.open(path, device), Predicting(), device, kernels, 12)


@pytest.mark.parametrize("steps", [1, 4, STEPS_PER_GRAPH + 3])
@pytest.mark.parametrize("samples", [1, 12])
def test_each_step_puts_the_noise_of_the_start_on_the_prediction(runner, samples, steps):
    found = runner.execute(None, samples, steps, 11, lambda step: True)
    noise = normal_noise(11, samples, SHAPE[0] * SHAPE[1]).reshape(samples, *SHAPE)
    clean = np.zeros_like(noise)
    for number in range(steps, 0, -1):
        time = number / steps
        clean = (noise * time + clean * (1 - time)) * time + time
    np.testing.assert_allclose(found, clean, atol=1e-5)
