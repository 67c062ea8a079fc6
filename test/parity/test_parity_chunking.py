# SPDX-License-Identifier: Apache-2.0
"""Chunks that continue the one before, against PyTorch.

Whole samplings are compared, with the reference's own velocity.
"""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")

from expert_reference import ExpertReference  # noqa: E402

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.diffusion.chunking import ChunkCondition  # noqa: E402
from edgellm_ros.kernels.random import normal_noise  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from edgellm_ros.runtime.request import LLMGenerationRequest  # noqa: E402
from fixtures.action_trigger import trigger_after  # noqa: E402
from fixtures.decoder_checkpoint import write_decoder_checkpoint  # noqa: E402
from fixtures.hybrid_checkpoints import add_action_expert  # noqa: E402

ROWS, STEPS, EXECUTED, DELAY, END = 6, 5, 1, 2, 4
CHUNK = np.linspace(-0.9, 0.8, 2 * ROWS, dtype=np.float32).reshape(ROWS, 2)
TOLERANCE = 5e-5  # of normalised actions: the engine and the reference round differently


class Sampled:
    """The runtime's trajectories, and what the reference needs for them."""

    def __init__(self, runtime, checkpoint) -> None:
        self.runtime = runtime
        config = runtime.config
        self.expert = ExpertReference.load(checkpoint / "action_expert", config.llm.rope.rotary_dim)
        space = config.action.action_space
        self.mean, self.std = torch.tensor(space.mean), torch.tensor(space.std)

    def found(self, **condition) -> torch.Tensor:
        """Return the runtime's normalised actions; read the KV cache they attend to."""
        request = LLMGenerationRequest("go", action_samples=2, noise_seed=5, denoise_steps=STEPS)
        if condition:
            chunk = ChunkCondition(actions=CHUNK, executed=EXECUTED, delay=DELAY, **condition)
            request = dataclasses.replace(request, previous_chunk=chunk)
        response = self.runtime.handle_request(request)
        device, cache = self.runtime.pipeline.device, self.runtime.pipeline.runner.kv_cache
        tensors = {name: device.download(rows)[0] for name, rows in cache.bindings(range(1)).items()}
        self.length = response.prompt_tokens + len(response.token_ids)
        self.caches = [
            tuple(
                torch.from_numpy(tensors[f"{kind}_cache_{i}"][:, : self.length]) for kind in ("key", "value")
            )
            for i in self.runtime.config.action.kv_caches
        ]
        return (torch.from_numpy(response.actions) - self.mean) / self.std

    def velocity(self, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        """Compute the reference's velocity of each sample; times [T]."""
        return torch.stack([self.expert.velocity(one, times, self.caches, self.length) for one in x])

    def clipped(self, x: torch.Tensor) -> torch.Tensor:
        """Return normalised actions within the limits of the action space."""
        return (self.expert.physical(x) - self.mean) / self.std

    @property
    def previous(self) -> torch.Tensor:
        rows = (torch.from_numpy(CHUNK) - self.mean) / self.std
        return torch.cat([rows[EXECUTED:], torch.zeros(EXECUTED, 2)])

    @property
    def noise(self) -> torch.Tensor:
        return torch.from_numpy(normal_noise(5, 2, 2 * ROWS).reshape(2, ROWS, 2))


@pytest.fixture(scope="module")
def sampled(tmp_path_factory, runtime_device):
    """A model whose action expert was trained to continue chunks."""
    folder = tmp_path_factory.mktemp("chunking")
    checkpoint = write_decoder_checkpoint(folder / "checkpoint", "qwen3")
    layers = json.loads((checkpoint / "config.json").read_text())["num_hidden_layers"]
    add_action_expert(checkpoint, None, layers, rtc_max_delay=3)
    export(checkpoint, folder / "engine")
    trigger_after(folder / "engine", 4)
    with LLMInferenceRuntime(folder / "engine", runtime_device) as runtime:
        yield Sampled(runtime, checkpoint)


def times(step: int, clean: int = 0) -> torch.Tensor:
    return torch.where(torch.arange(ROWS) < clean, 1.0, step / STEPS)


def test_no_condition_samples_as_before(sampled):
    found, x = sampled.found(), sampled.noise
    for step in range(STEPS):
        x = x + sampled.velocity(x, times(step)) / STEPS
    torch.testing.assert_close(found, sampled.clipped(x), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("schedule", ["linear", "exp"])
def test_guided_actions_match(sampled, schedule):
    found = sampled.found(horizon=END, schedule=schedule, max_guidance_weight=4.0)
    falling = ((END - torch.arange(ROWS)) / (END - DELAY + 1)).clamp(0, 1)
    weights = falling if schedule == "linear" else falling * falling.expm1() / (math.e - 1)
    weights[:DELAY], x = 1.0, sampled.noise
    for step in range(STEPS):
        tau = torch.tensor(step / STEPS)
        v = sampled.velocity(x, times(step))
        error = weights[:, None] * (sampled.previous - (x + (1 - tau) * v))
        r2 = (1 - tau) ** 2 / (tau**2 + (1 - tau) ** 2)
        guidance = torch.clamp((1 - tau) / tau / r2, max=4.0) if step else torch.tensor(4.0)
        x = x + (v + guidance * error) / STEPS
    torch.testing.assert_close(found, sampled.clipped(x), atol=TOLERANCE, rtol=0)


def test_frozen_actions_match(sampled):
    found = sampled.found(horizon=END, form="frozen")
    ramp = torch.linspace(0, 1, END - DELAY + 2)
    ramp = (1 - torch.exp(-6 * ramp)) / (1 - math.exp(-6))
    strength = torch.ones(ROWS, 1)
    strength[:DELAY], strength[DELAY:END, 0] = 0.0, ramp[1:-1]
    x = sampled.noise
    x[:, :END] = sampled.previous[:END]
    for step in range(STEPS):
        x = x + strength * sampled.velocity(x, times(step)) / STEPS
    torch.testing.assert_close(found, sampled.clipped(x), atol=TOLERANCE, rtol=0)


def test_trained_actions_match(sampled):
    found, x = sampled.found(form="trained"), sampled.noise
    for step in range(STEPS):
        x[:, :DELAY] = sampled.previous[:DELAY]
        x = x + sampled.velocity(x, times(step, clean=DELAY)) / STEPS
    x[:, :DELAY] = sampled.previous[:DELAY]
    torch.testing.assert_close(found, sampled.clipped(x), atol=TOLERANCE, rtol=0)
