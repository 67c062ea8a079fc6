# SPDX-License-Identifier: Apache-2.0
"""The graphs of pi0 and pi0.5 for CUDA, whose attention is GroupQueryAttention.

Here the CPU loads them in half precision, beside the standard graphs of the same engine.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from doubles.deferred_runtime import WatchedDevice, queueing
from edgellm_ros.builder import export
from edgellm_ros.diffusion.chunking import ChunkCondition
from edgellm_ros.engine.executor import KEPT_BINDINGS
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest
from fixtures.cuda_graphs import use_on_cpu
from fixtures.pi_checkpoint import CAMERAS, WIDER_SIZES, write_pi
from fixtures.smolvla_checkpoint import ACTIONS, HORIZON

pytestmark = pytest.mark.only_on("cpu", reason="a CUDA device takes the variants anyway")
FRAMES = {
    name: np.random.default_rng(i).integers(0, 256, (*size, 3), dtype=np.uint8)
    for i, (name, size) in enumerate(CAMERAS.items())
}
REQUEST = LLMGenerationRequest(
    "pick it up", images=tuple(FRAMES.values()), state=np.array([0.3, -1, 2]), noise_seed=7
)
LATER = dataclasses.replace(REQUEST, prompt="put the red cube into the box")  # a longer prefix
CHUNK = np.linspace(-1, 1, HORIZON * ACTIONS).reshape(HORIZON, ACTIONS)


@pytest.fixture(scope="module", params=["pi0", "pi05"])
def engine(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = write_pi(folder / "checkpoint", request.param, sizes=WIDER_SIZES[request.param])
    export(checkpoint, folder / "engine", precision="fp16")
    return folder / "engine"


@pytest.fixture(scope="module")
def standard(engine):
    """Return the actions of each request by the standard graphs."""
    with LLMInferenceRuntime(engine) as runtime:
        return [runtime.handle_request(each).actions for each in requests()]


@pytest.fixture(scope="module")
def special(engine, standard):
    further = ["action/modulation"] if (engine / "action/modulation.cuda.onnx").exists() else []
    use_on_cpu(engine, "visual/model", "prefix/model", "action/model", *further)
    with LLMInferenceRuntime(engine) as runtime:
        yield runtime


def requests() -> list[LLMGenerationRequest]:
    guided = ChunkCondition(CHUNK, executed=1, delay=2)
    alone = {"images": (FRAMES["wrist"],), "cameras": ("wrist",)}
    changes = {"action_samples": 3}, {"previous_chunk": guided}, alone
    return [REQUEST, LATER, *(dataclasses.replace(REQUEST, **change) for change in changes)]


def test_actions_are_those_of_the_standard_graphs(special, standard):
    for request, expected in zip(requests(), standard, strict=True):
        found = special.handle_request(request).actions
        np.testing.assert_allclose(found, expected, atol=5e-3 * np.ptp(expected))


def test_recorded_runs_answer_as_those_that_are_not(engine, special):
    device = WatchedDevice()
    with queueing(), LLMInferenceRuntime(engine, device) as recorded:
        for request in requests():
            for seed in range(4):
                one = dataclasses.replace(request, noise_seed=seed)
                expected = special.handle_request(one).actions
                np.testing.assert_array_equal(recorded.handle_request(one).actions, expected)
            device.calls.clear()
            recorded.handle_request(request)
            assert device.calls["capture"] == 0
            assert device.calls["launch"] == 3  # tower, prefix, all Euler steps


def test_more_samples_than_kept_bindings_are_not_recorded(engine, special):
    device, request = WatchedDevice(), dataclasses.replace(REQUEST, action_samples=KEPT_BINDINGS + 1)
    expected = special.handle_request(request).actions
    with queueing(), LLMInferenceRuntime(engine, device) as recorded:
        for _ in range(4):
            np.testing.assert_array_equal(recorded.handle_request(request).actions, expected)
        device.calls.clear()
        recorded.handle_request(request)
        kind = recorded.config.policy.kind
        assert device.calls["launch"] == (2 if kind == "pi05" else 3)  # pi0 takes all samples in one run
