# SPDX-License-Identifier: Apache-2.0
"""Requests to a Diffusion Policy: observations of two times, and steps from noise."""

from __future__ import annotations

import dataclasses
import logging
import threading

import numpy as np
import pytest
from onnxruntime import InferenceSession

from doubles.deferred_runtime import WatchedDevice, queueing
from edgellm_ros.builder import export
from edgellm_ros.diffusion.action_runner import STEPS_PER_GRAPH
from edgellm_ros.diffusion.chunking import ChunkCondition
from edgellm_ros.diffusion.samplers import NoiseSchedule
from edgellm_ros.kernels.random import normal_noise
from edgellm_ros.multimodal.device_image import DeviceImage
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest
from fixtures.diffusion_checkpoint import CAMERAS, EXECUTED, HORIZON, write_diffusion
from fixtures.smolvla_checkpoint import ACTIONS

TOP, WRIST = (
    np.random.default_rng(i).integers(0, 256, (2, *size, 3), dtype=np.uint8)
    for i, size in enumerate(CAMERAS.values())
)
STATES = np.array([[0.5, 1, -2], [0.3, -1, 2]])
REQUEST = LLMGenerationRequest(images=(TOP, WRIST), state=STATES, action_samples=2, noise_seed=7)
CHUNK = ChunkCondition(actions=np.zeros((EXECUTED, ACTIONS)), executed=1, delay=1)
TRAINED = 45  # more steps than those of two graphs


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("diffusion")
    export(write_diffusion(folder / "checkpoint", num_train_timesteps=TRAINED), folder / "engine")
    return folder / "engine"


@pytest.fixture(scope="module")
def policy(engine, device):
    with LLMInferenceRuntime(engine, device) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def expected(policy):
    return policy.handle_request(REQUEST).actions


def changed(**changes) -> LLMGenerationRequest:
    return dataclasses.replace(REQUEST, **changes)


def test_chunks_begin_with_the_newest_observation(policy):
    response = policy.handle_request(REQUEST)
    assert response.actions.shape == (2, EXECUTED, ACTIONS)
    assert (response.text, response.token_ids, response.paths) == ("", [], None)
    assert (response.finish_reason, response.noise_seed) == ("stop", 7)


def test_the_same_request_gives_the_same_bits_alone_and_in_a_batch(policy, expected):
    other = changed(state=np.zeros(3), noise_seed=3)
    batch = policy.handle_request([other, REQUEST, other])
    np.testing.assert_array_equal(batch[1].actions, expected)
    np.testing.assert_array_equal(batch[0].actions, batch[2].actions)
    assert np.abs(batch[0].actions - expected).max() > 0.01


def test_one_sample_is_the_default_and_has_the_first_noise(policy, expected):
    actions = policy.handle_request(changed(action_samples=0)).actions
    np.testing.assert_allclose(actions, expected[:1], atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"noise_seed": 8},
        {"denoise_steps": 5},
        {"state": STATES[::-1]},
        {"state": STATES + np.array([[1, 0, 0], [0, 0, 0]])},
        {"images": (TOP, WRIST[::-1])},
        {"images": (TOP[1], WRIST)},
        {"cameras": ("wrist", "top")},
    ],
)
def test_actions_depend_on_every_input_and_its_time(policy, expected, changes):
    assert np.abs(policy.handle_request(changed(**changes)).actions - expected).max() > 1e-4


def test_the_first_observation_is_repeated(policy):
    """So do the queues of LeRobot when a robot starts."""
    repeated = changed(images=(TOP[[1, 1]], WRIST[[1, 1]]), state=STATES[[1, 1]])
    expected = policy.handle_request(repeated).actions
    for images in ((TOP[1], WRIST[1]), (TOP[1:], WRIST[1:])):
        for state in (STATES[1], STATES[1:], list(STATES[1])):
            found = policy.handle_request(changed(images=images, state=state)).actions
            np.testing.assert_array_equal(found, expected)


def test_a_request_can_be_cancelled_between_steps(policy):
    cancel, seen = threading.Event(), []

    def on_progress(progress):
        seen.append((progress.stage, progress.step))
        if progress.step == 3:
            cancel.set()

    response = policy.handle_request(changed(cancel=cancel, on_progress=on_progress))
    assert (response.finish_reason, response.actions) == ("cancelled", None)
    assert seen == [("vision", 0), *(("action", step) for step in range(4))]


def test_a_task_is_not_used_and_the_log_says_so(policy, expected, caplog):
    with caplog.at_level(logging.WARNING):
        found = policy.handle_request(changed(prompt="pick it up")).actions
    np.testing.assert_array_equal(found, expected)
    assert "diffusion takes no text: the task 'pick it up' is not used" in caplog.text


class OnGpu:
    """What an image on a GPU looks like to a machine without one."""

    shape = (48, 64, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"denoise_steps": 46},
            "denoise_steps must be at most 45, the steps of the policy's training, got 46",
        ),
        ({"previous_chunk": CHUNK}, "previous_chunk: this engine's actions come from no flow"),
        (
            {"images": (TOP,), "cameras": ("top",)},
            "the request has 1 images; diffusion needs one of each camera: top, wrist",
        ),
        (
            {"images": (TOP[:, :40], WRIST)},
            r"camera top: the image has 40x64 pixels, the policy was trained with 48x64 \(height x width\)",
        ),
        ({"images": (TOP[[0, 0, 1]], WRIST)}, "camera top: the policy takes 1 to 2 images, got 3"),
        ({"images": (TOP[:0], WRIST)}, "camera top: the policy takes 1 to 2 images, got 0"),
        ({"images": (TOP[None], WRIST)}, r"camera top: an image must be .* got uint8 \[1, 2, 48, 64, 3\]"),
        ({"images": (DeviceImage(OnGpu()), WRIST)}, "camera top: images of a policy are resized on the host"),
        ({"state": None}, r"a policy needs the state \[3\]"),
        ({"state": np.zeros((3, 3))}, "the policy takes 1 to 2 states, got 3"),
        ({"state": np.zeros((2, 4))}, r"state must have shape \[3\] .*, got \[4\]"),
        ({"state": np.array([[1, 2, np.inf], [1, 2, 3]])}, "state has a value that is not finite: state_2"),
    ],
)
def test_requests_that_do_not_fit_are_refused(policy, changes, message):
    with pytest.raises(ValueError, match=message):
        policy.handle_request(changed(**changes))


def test_actions_are_those_of_the_graphs_and_the_schedule(engine, policy):
    """Noise is that of the start, then that of the steps; past rows are left out."""
    steps, config = STEPS_PER_GRAPH + 5, policy.config.policy
    encoder, unet = (InferenceSession(engine / part / "model.onnx") for part in ("prefix", "action"))
    state = (STATES - config.state.offset) / config.state.scale
    images = {"camera_image_0": TOP, "camera_image_1": WRIST}
    (condition,) = encoder.run(None, {**images, "state": state.astype(np.float32)})
    x, *added = (
        normal_noise(7, 2, steps * HORIZON * ACTIONS).reshape(2, steps, HORIZON, ACTIONS).swapaxes(0, 1)
    )
    schedule = NoiseSchedule(config.schedule)
    for number, time in enumerate(schedule.times(steps)):
        inputs = {"trajectory": x.astype(np.float32), "time": np.float32([time]), "condition": condition}
        (output,) = unet.run(None, inputs)
        f = schedule.factors(number, steps)
        clean = np.clip((f.of_x * x + f.of_output * output) / f.divisor, -f.limit, f.limit)
        x = f.clean_share * clean + f.x_share * x + f.output_share * output
        if number < len(added):
            x = x + f.noise_share * added[number]
    expected = x[:, 1 : 1 + EXECUTED] * config.action_space.scale + config.action_space.offset
    found = policy.handle_request(changed(denoise_steps=steps)).actions
    np.testing.assert_allclose(found, expected, atol=1e-3)


@pytest.mark.only_on("cpu", reason="these tests bring their own device")
class TestGraphs:
    """All steps from noise are graphs, which read their noise from the device."""

    @pytest.fixture
    def watched(self):
        return WatchedDevice()

    @pytest.fixture
    def deferred(self, engine, watched):
        with queueing(), LLMInferenceRuntime(engine, watched) as runtime:
            yield runtime

    @staticmethod
    def used(runtime, watched, one: LLMGenerationRequest) -> tuple[int, int, int]:
        """Answer a request; return how many graphs ran and were recorded, and the uploads."""
        watched.calls.clear()
        runtime.handle_request(one)
        return watched.calls["launch"], watched.calls["capture"], watched.calls["upload"]

    @pytest.mark.parametrize("steps", [6, STEPS_PER_GRAPH, 2 * STEPS_PER_GRAPH + 3])
    def test_recorded_steps_answer_as_on_the_cpu(self, policy, deferred, watched, steps):
        for seed in range(4):
            one = changed(denoise_steps=steps, noise_seed=seed)
            found, expected = (runtime.handle_request(one).actions for runtime in (deferred, policy))
            np.testing.assert_array_equal(found, expected)
        graphs = -(-steps // STEPS_PER_GRAPH)
        one = changed(denoise_steps=steps, noise_seed=99)
        assert self.used(deferred, watched, one)[:2] == (1 + graphs, 0)

    def test_samples_and_steps_have_graphs_of_their_own(self, deferred, watched):
        deferred.handle_request(REQUEST)
        deferred.handle_request(REQUEST)  # the encoders have a graph from here on
        for changes in ({"denoise_steps": 9}, {"action_samples": 5}):
            one = changed(**changes)
            assert self.used(deferred, watched, one)[:2] == (1, 1)
            assert self.used(deferred, watched, one)[:2] == (2, 0)

    def test_the_noise_of_all_steps_of_a_graph_is_one_upload(self, deferred, watched):
        sent = []
        for steps in (2, STEPS_PER_GRAPH, STEPS_PER_GRAPH + 2):
            deferred.handle_request(changed(denoise_steps=steps))
            sent.append(self.used(deferred, watched, changed(denoise_steps=steps))[2])
        assert sent == [sent[0], sent[0], sent[0] + 1]
