# SPDX-License-Identifier: Apache-2.0
"""The policy gives each node the rights for what it makes: no fewer and no more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import rclpy
from edgellm_ros.action import Plan
from rclpy.action import ActionClient

from edgellm_arena.ros.arena_link import ArenaLink
from edgellm_arena.ros.follower_link import FollowerLink
from edgellm_arena.ros.microphone import Microphone
from edgellm_ros.client import PlanClient
from edgellm_ros.ros.arm.node import ArmNode
from edgellm_ros.ros.follower.node import FollowerNode
from edgellm_ros.ros.node.node import EdgeLLMNode
from edgellm_ros.ros.play.node import PlayNode
from edgellm_ros.ros.processes import own_domain
from edgellm_ros.ros.security.access import ARENA_REMAPPINGS
from edgellm_ros.ros.security.policy import CALL, EXECUTE, PUBLISH, REPLY, REQUEST, SUBSCRIBE, make_enclaves
from fixtures.smolvla_checkpoint import CAMERAS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.only_on("cpu", reason="names do not depend on the device"),
]
NAMESPACE = "/robot"
NODES = ("edgellm", "edgellm_follower", "edgellm_arm", "edgellm_play", "arena", "plan_client")
FURTHER = list(CAMERAS)[1:]  # of the policy's cameras; the first one is on ~/image
ACTION_SERVICES = ("send_goal", "get_result", "cancel_goal")
ACTION_TOPICS = ("feedback", "status")


@pytest.fixture(scope="module")
def rights(policy_engine, tmp_path_factory) -> Iterator[dict[str, dict[str, set[str]]]]:
    """What each node publishes, subscribes, serves and calls, by names of the graph.

    The node has a policy, with which it opens every topic that it has.
    """
    arguments = ["--ros-args", "-r", f"__ns:={NAMESPACE}", "-p", "use_sim_time:=true"]
    for (node, name), new in ARENA_REMAPPINGS.items():
        arguments += ["-r", f"{node}:{name}:={new}"]
    overrides = [rclpy.Parameter("engine_dir", value=str(policy_engine))]
    stamped = [rclpy.Parameter("stamped", value=True)]  # as the arena expects
    wav = tmp_path_factory.mktemp("play") / "speech.wav"
    recorder = [rclpy.Parameter("device", value="none"), rclpy.Parameter("file", value=str(wav))]
    contract = tmp_path_factory.mktemp("arm") / "arm.yaml"
    contract.write_text(
        "{rate: 50, controller: {kind: forward_command, topic: ~/commands}, state_topic: ~/joint_states, "
        "cameras: [], joints: [{policy: a, ros: a, unit: radians, "
        "limits: {position: [-1, 1], speed: 1, acceleration: 10, jerk: 1000, deviation: 1}}]}"
    )
    moving = [rclpy.Parameter("contract", value=str(contract)), rclpy.Parameter("dry_run", value=False)]
    with ExitStack() as stack:
        domain = stack.enter_context(own_domain())
        rclpy.init(args=arguments, domain_id=domain)
        stack.callback(rclpy.shutdown)
        nodes = (
            EdgeLLMNode(parameter_overrides=overrides),
            FollowerNode(parameter_overrides=stamped),
            ArmNode(parameter_overrides=moving),
            ArenaLink(),
            PlayNode(parameter_overrides=recorder),
        )
        user = rclpy.create_node("plan_client")
        for node in (*nodes, user):
            stack.callback(node.destroy_node)
        for node in nodes[:3]:
            node.trigger_configure()
            node.trigger_activate()
        parts = FollowerLink(nodes[3]), Microphone(nodes[3])  # of the arena
        stack.enter_context(PlanClient(user, name="edgellm"))
        plain = ActionClient(user, Plan, "edgellm/plan")  # reads the statuses too
        stack.callback(plain.destroy)
        yield {name: seen(user, name) for name in NODES}
        del parts


def seen(observer: rclpy.node.Node, name: str) -> dict[tuple[str, str], set[str]]:
    """Return the names of a node in the graph, hidden ones too.

    Names of a client include the names of its hidden node.
    """
    names = [(name, NAMESPACE)]
    if name == "plan_client":
        everyone = observer.get_node_names_and_namespaces()
        names += [each for each in everyone if each[0].startswith("_plan_client")]
    found = {}
    for right, ask in (
        (PUBLISH, observer.get_publisher_names_and_types_by_node),
        (SUBSCRIBE, observer.get_subscriber_names_and_types_by_node),
        (REPLY, observer.get_service_names_and_types_by_node),
        (REQUEST, observer.get_client_names_and_types_by_node),
    ):
        found[right] = {each for of in names for each, _ in ask(*of)}
    return found


def granted(enclave) -> dict[tuple[str, str], set[str]]:
    """Return the rights of an enclave.

    Actions are returned as the topics and services that they are made of.
    """
    rights = {right: set(enclave.allowed[right]) for right in (PUBLISH, SUBSCRIBE, REPLY, REQUEST)}
    for action_right, services, topics in ((EXECUTE, REPLY, PUBLISH), (CALL, REQUEST, SUBSCRIBE)):
        for action in enclave.allowed[action_right]:
            rights[services] |= {f"{action}/_action/{name}" for name in ACTION_SERVICES}
            rights[topics] |= {f"{action}/_action/{name}" for name in ACTION_TOPICS}
    return rights


@pytest.mark.parametrize("name", NODES)
@pytest.mark.parametrize("right", [PUBLISH, SUBSCRIBE, REPLY, REQUEST], ids=lambda right: right[1])
def test_a_node_may_do_exactly_what_it_does(name, right, rights):
    enclaves = {each.node: each for each in make_enclaves(NAMESPACE, {}, arena=True, cameras=FURTHER)}
    assert granted(enclaves[name])[right] == rights[name][right]
