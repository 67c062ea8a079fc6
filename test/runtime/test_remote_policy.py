# SPDX-License-Identifier: Apache-2.0
"""A policy on another computer in the runtime: observations, refusals, closing."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from edgellm_ros.builder.remote_policy import physical_actions, physical_state, write_remote_policy
from edgellm_ros.diffusion.openpi_config import OpenPiConfig
from edgellm_ros.diffusion.policy_config import CameraConfig
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest
from fixtures.openpi_server import ACTIONS, Server, running
from fixtures.plain_msgpack import encoded

POLICY = OpenPiConfig(
    cameras=CameraConfig(("top", "wrist")),
    state=physical_state(("x", "y", "grip")),
    action_space=physical_actions(("dx", "dy"), ("", ""), dt=0.1, horizon=len(ACTIONS)),
    url="ws://127.0.0.1:1",
    token_file="",
    image_keys=("observation/top", "observation/wrist"),
    image_size=(24, 32),
    state_keys=("joints", "grip"),
    state_sizes=(2, 1),
    prompt_key="prompt",
    timeout_s=1.0,
)
IMAGES = (np.full((48, 64, 3), 90, np.uint8), np.full((40, 40, 3), 200, np.uint8))
REQUEST = LLMGenerationRequest("go", images=IMAGES, state=np.array([0.5, -2.0, 30.0]))


@pytest.fixture
def server():
    return Server()


@pytest.fixture
def runtime(server, tmp_path):
    with running(server) as url:
        write_remote_policy(replace(POLICY, url=url), tmp_path)
        with LLMInferenceRuntime(tmp_path) as runtime:
            yield runtime


def test_an_observation_has_the_policys_keys_and_physical_values(runtime, server):
    response = runtime.handle_request(REQUEST)
    np.testing.assert_array_equal(response.actions, ACTIONS[None])
    (received,) = server.received
    assert list(received) == ["observation/top", "observation/wrist", "joints", "grip", "prompt"]
    assert (received["observation/top"] == 90).all()
    assert received["observation/top"].shape == received["observation/wrist"].shape == (24, 32, 3)
    assert (received["observation/wrist"][0, :4] == 0).all()  # a border: the frame is a square
    assert (received["joints"].tolist(), received["grip"].tolist()) == ([0.5, -2.0], [30.0])
    assert received["prompt"] == "go"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": IMAGES[:1], "cameras": ("top",)}, "has 1 images, expected one of each camera"),
        ({"state": np.zeros(2)}, "state"),
        ({"denoise_steps": 3}, "denoise_steps is 3, but the server chooses them"),
        ({"action_samples": 2}, "action_samples is 2; this engine takes at most 1"),
    ],
)
def test_requests_that_do_not_fit_are_refused_and_not_sent(runtime, server, changes, message):
    with pytest.raises(ValueError, match=message):
        runtime.handle_request(replace(REQUEST, **changes))
    assert not server.received


def test_a_chunk_of_another_shape_is_an_error(runtime, server):
    server.answers = [encoded({"actions": ACTIONS[:2]})]
    with pytest.raises(EngineError, match=r"answers with \[2, 2\] actions, expected \[3, 2\]"):
        runtime.handle_request(REQUEST)
    assert runtime.handle_request(REQUEST).actions is not None


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"action_names": ["dx", "dz"]}, r"its action_names is \['dx', 'dz'\], expected"),
        ({"dt": 0.05}, r"its dt is 0\.05, expected 0\.1: repeat `edgellm connect-policy`"),
    ],
)
def test_a_server_with_other_actions_than_the_directory_is_refused(runtime, server, told, message):
    server.metadata = encoded({"server": "edgellm", **told})
    with pytest.raises(EngineError, match=rf"no connection from .*: {message}"):
        runtime.handle_request(REQUEST)
    assert not server.received


def test_a_server_with_actions_in_other_units_is_refused(server, tmp_path):
    space = physical_actions(("dx", "dy"), ("degrees", "percent"), dt=0.1, horizon=len(ACTIONS))
    server.metadata = encoded({"action_units": ["radians", "percent"]})
    with running(server) as url:
        write_remote_policy(replace(POLICY, url=url, action_space=space), tmp_path)
        refused = pytest.raises(EngineError, match="its action_units is")
        with LLMInferenceRuntime(tmp_path) as runtime, refused:
            runtime.handle_request(REQUEST)


def test_a_cancelled_request_ends_before_the_answer(runtime, server):
    server.answers = [0.5]
    cancel = threading.Event()
    timer = threading.Timer(0.1, cancel.set)
    timer.start()
    response = runtime.handle_request(replace(REQUEST, cancel=cancel))
    timer.join()
    assert (response.finish_reason, response.actions) == ("cancelled", None)


def test_a_closed_runtime_leaves_its_place_on_the_server(runtime, server):
    runtime.handle_request(REQUEST)
    runtime.close()
    assert server.left.wait(5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"url": "http://gpu:8000"}, "url must begin with ws:// or wss://, got 'http://gpu:8000'"),
        ({"image_keys": ("a",)}, "image_keys must have 2 keys"),
        ({"image_size": (24,)}, "image_size must be height and width"),
        ({"state_sizes": (2, 2)}, "state_sizes must make up 3 values"),
        ({"state": None}, "state_sizes must make up 0 values"),
        ({"timeout_s": 0.0}, "timeout_s must be above 0"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(POLICY, **changes)
