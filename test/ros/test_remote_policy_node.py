# SPDX-License-Identifier: Apache-2.0
"""A node whose policy is behind openpi's protocol: chunks, stamps, a lost server."""

from __future__ import annotations

import numpy as np
import pytest
from edgellm_ros.action import Plan

from edgellm_ros.cli import main
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.serving.policy_service import PolicyService
from fixtures.act_checkpoint import write_act
from fixtures.peer import image_message
from fixtures.policy_robot import NAMES, STATE, TASK, TOP, WRIST, answer, export_policy, values
from fixtures.served_policy import default_keys, served


@pytest.fixture(scope="module")
def act_engine(tmp_path_factory):
    return export_policy(tmp_path_factory.mktemp("act"), write_act)


@pytest.fixture(scope="module")
def runtime(act_engine):
    """The runtime of the computer with the policy, which the tests ask too."""
    with LLMInferenceRuntime(act_engine) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def service(runtime):
    return PolicyService(runtime, default_keys(runtime.config))


@pytest.fixture(scope="module")
def policy_engine(service, tmp_path_factory):
    """The engine directory of the robot, made while the server runs."""
    folder = tmp_path_factory.mktemp("remote")
    with served(service) as url:
        assert main(["connect-policy", url, str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def port(policy_engine):
    from edgellm_ros.engine_directory.config import EngineConfig

    return int(EngineConfig.load(policy_engine).policy.url.rpartition(":")[2])


@pytest.fixture(autouse=True)
def robot(policy_node):
    """The robot, whose node has no input of earlier tests."""
    policy_node.restart()
    return policy_node


def test_chunks_are_those_of_the_other_computer_with_the_stamps_of_the_frames(
    robot, peer, runtime, service, port
):
    with served(service, port):
        stamp = robot.all_inputs()
        np.testing.assert_array_equal(robot.actions(), answer(runtime))
        (chunk,) = peer.received["action_chunk"]
        assert (list(chunk.names), chunk.header.stamp) == (NAMES, stamp)


def test_goals_fail_while_the_server_is_lost_and_succeed_when_it_is_back(robot, peer, runtime, service, port):
    goal = {"images": [image_message(TOP), image_message(WRIST)], "state": STATE.tolist()}
    for _ in range(2):
        with served(service, port):
            result = peer.plan(Plan.Goal(prompt=TASK, **goal))
            np.testing.assert_array_equal(values(result.action_chunks[0]), answer(runtime))
        reason, message = robot.refusal(**goal)
        assert reason == Plan.Result.ERROR
        assert message.startswith(f"no connection from ws://127.0.0.1:{port}: ")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("chunking", "guided", "chunking must be off: the actions of this engine (openpi) come from no flow"),
        ("action_samples", 2, "action_samples must be from 0 to 1, max_action_samples of the engine, got 2"),
    ],
)
def test_parameters_of_a_flow_are_refused(peer, name, value, message):
    reply = peer.set_parameter(name, value)
    assert not reply.successful
    assert message in reply.reason
