# SPDX-License-Identifier: Apache-2.0
"""The node as its own process, a peer that talks to the node, and a scene.

Every module has its own ROS domain and its own node, so that modules do not hear each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import pytest

from fixtures import on_device

os.environ["ROS_AUTOMATIC_DISCOVERY_RANGE"] = "LOCALHOST"  # before rclpy reads it

MISSING = [name for name in ("rclpy", "edgellm_ros.msg") if find_spec(name) is None]


class ModuleWithoutRos(pytest.Module):
    """A test module that is skipped where ROS is missing."""

    def collect(self):
        try:
            return super().collect()
        except self.CollectError as error:
            if not isinstance(error.__cause__, ImportError):
                raise
            pytest.skip(f"{error.__cause__}; here is no {' and no '.join(MISSING)}", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent) -> pytest.Module | None:
    return ModuleWithoutRos.from_parent(parent, path=module_path) if MISSING else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark tests that talk to a node: their messages must arrive in time."""
    if "domain" in item.fixturenames:
        item.add_marker(pytest.mark.real_time)


@dataclass(frozen=True)
class Scene:
    """A camera frame, and a command that makes the robot drive."""

    pixels: np.ndarray
    command: str


@pytest.fixture(scope="session")
def scene() -> Scene:
    from edgellm_arena.episodes.episode import make_episode
    from edgellm_arena.world.renderer import render

    episode = make_episode(1)
    return Scene(render(episode.scene, episode.start, np.random.default_rng(0)), episode.command.text)


@pytest.fixture(scope="module")
def domain() -> Iterator[int]:
    from edgellm_ros.ros.processes import own_domain

    with own_domain() as domain:
        yield domain


@pytest.fixture(scope="module")
def peer(domain) -> Iterator[object]:
    from fixtures.peer import RobotPeer

    peer = RobotPeer(domain)
    yield peer
    peer.close()


@pytest.fixture(scope="module")
def start_node(domain, tmp_path_factory) -> Iterator[Callable]:
    """`start_node(name=value, ...)` starts a process of the node on the tests' device.

    Nothing is drafted unless a test says so: plans are compared to the last bit.
    """
    from edgellm_ros.ros.processes import Child, ros_environment

    children = []

    def start(**parameters: object) -> Child:
        log = tmp_path_factory.mktemp("node") / "node.log"
        parameters = {"device": on_device.chosen, "drafting": "'off'", **parameters}
        values = [arg for name, value in parameters.items() for arg in ("-p", f"{name}:={value}")]
        arguments = ["-m", "edgellm_ros.ros.node.main", "--ros-args", *values]
        children.append(Child("edgellm node", arguments, log, ros_environment(domain)))
        return children[-1]

    yield start
    for child in children:
        child.stop()


@pytest.fixture(scope="module")
def node(request, start_node, peer, arena_engine):
    """The node, active, with the demo's engines, and limits for a busy computer.

    A module's PARAMETERS are further parameters.
    """
    child = start_node(
        engine_dir=arena_engine, autostart="true", max_input_age=3.0, plan_timeout=30.0,
        input_reliability="reliable", tool_call_format="hermes", **getattr(request.module, "PARAMETERS", {}),
    )  # fmt: skip
    peer.connect()
    return child


@pytest.fixture(scope="session")
def policy_engine(tmp_path_factory):
    """The engine of a policy with two cameras, `top` and `wrist`."""
    from fixtures.policy_robot import export_policy

    return export_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def policy_runtime(policy_engine, runtime_device):
    """The runtime of this engine, in the test's process."""
    from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime

    with LLMInferenceRuntime(policy_engine, runtime_device) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def policy_node(start_node, peer, policy_engine):
    """A robot beside a node with this engine."""
    from fixtures.policy_robot import STATE_JOINTS, PolicyRobot

    start_node(
        engine_dir=policy_engine, autostart="true", state_joints=f"[{', '.join(STATE_JOINTS)}]",
        max_input_age=30.0, plan_timeout=30.0, input_reliability="reliable",
        **{"qos_overrides./edgellm/joint_states.subscription.reliability": "best_effort"},
    )  # fmt: skip
    peer.connect()
    return PolicyRobot(peer)
