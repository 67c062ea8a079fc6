# SPDX-License-Identifier: Apache-2.0
"""The table of all topics, services and actions, with those who may use them.

A new topic of a node is one row of INTERFACES. test/ros/test_access.py compares the rows with what the nodes
really make. Further cameras of a policy have the rows of `camera_interfaces`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from edgellm_ros.ros.camera_topic import camera_topic

EDGELLM, FOLLOWER, ARM, PLAY, ARENA = (
    "edgellm",
    "edgellm_follower",
    "edgellm_arm",
    "edgellm_play",
    "arena",
)  # nodes of this package
PLAN_CLIENT = "plan_client"  # a node that sends goals
OPERATOR = "operator"  # commands, lifecycle, adapters, parameters, stop
MONITOR = "monitor"  # sees everything, changes nothing
READERS = (MONITOR, OPERATOR)
ROS2_COMMANDS = "/_ros2cli*"
SETTERS = (OPERATOR,)


class Kind(Enum):
    """What a node does with a name."""

    OUT = "publishes"
    IN = "subscribes"
    SERVICE = "serves"
    ACTION = "executes"


@dataclass(frozen=True)
class Interface:
    """One topic, service or action of a node."""

    node: str
    kind: Kind
    name: str  # "~/..." = below the node's name
    users: tuple[str, ...] = ()  # who else may use it: subscribe to OUT, publish to IN, call the others


def _of_every_node(
    node: str, readers: tuple[str, ...] = (), setters: tuple[str, ...] = ()
) -> list[Interface]:
    """Return what rclpy makes for each node."""
    return [
        Interface(node, Kind.OUT, "/rosout", READERS),
        Interface(node, Kind.OUT, "/parameter_events", READERS),
        Interface(node, Kind.IN, "/clock"),  # with use_sim_time
        Interface(node, Kind.SERVICE, "~/get_type_description", readers),
        Interface(node, Kind.SERVICE, "~/describe_parameters", readers),
        Interface(node, Kind.SERVICE, "~/get_parameters", readers),
        Interface(node, Kind.SERVICE, "~/get_parameter_types", readers),
        Interface(node, Kind.SERVICE, "~/list_parameters", readers),
        Interface(node, Kind.SERVICE, "~/set_parameters", setters),
        Interface(node, Kind.SERVICE, "~/set_parameters_atomically", setters),
    ]


def _of_lifecycle_nodes(node: str, watchers: tuple[str, ...] = ()) -> list[Interface]:
    return [
        *_of_every_node(node, READERS, SETTERS),
        Interface(node, Kind.OUT, "/diagnostics", READERS),
        Interface(node, Kind.OUT, "~/transition_event", READERS),
        Interface(node, Kind.SERVICE, "~/get_state", (*READERS, *watchers)),
        Interface(node, Kind.SERVICE, "~/get_available_states", READERS),
        Interface(node, Kind.SERVICE, "~/get_available_transitions", READERS),
        Interface(node, Kind.SERVICE, "~/get_transition_graph", READERS),
        Interface(node, Kind.SERVICE, "~/change_state", SETTERS),
    ]


INTERFACES = (
    *_of_lifecycle_nodes(EDGELLM, (ARENA,)),
    Interface(EDGELLM, Kind.IN, "~/image", (ARENA,)),
    Interface(EDGELLM, Kind.IN, "~/joint_states"),  # of a policy
    Interface(EDGELLM, Kind.IN, "~/odom", (ARENA,)),
    Interface(EDGELLM, Kind.IN, "~/audio", (ARENA,)),
    Interface(EDGELLM, Kind.IN, "~/command", (ARENA, OPERATOR)),
    Interface(EDGELLM, Kind.IN, "~/camera_info", (ARENA,)),
    Interface(EDGELLM, Kind.IN, "/tf_static", (ARENA,)),
    Interface(EDGELLM, Kind.OUT, "~/utterance", READERS),
    Interface(EDGELLM, Kind.OUT, "~/transcript", READERS),
    Interface(EDGELLM, Kind.OUT, "~/generation", (*READERS, ARENA)),
    Interface(EDGELLM, Kind.OUT, "~/text", READERS),
    Interface(EDGELLM, Kind.OUT, "~/text_stream", (*READERS, ARENA)),
    Interface(EDGELLM, Kind.OUT, "~/speech", READERS),
    Interface(EDGELLM, Kind.OUT, "~/action_chunk", (*READERS, ARENA)),
    Interface(EDGELLM, Kind.OUT, "~/path", READERS),
    Interface(EDGELLM, Kind.OUT, "~/overlay", READERS),
    Interface(EDGELLM, Kind.OUT, "~/markers", READERS),
    Interface(EDGELLM, Kind.ACTION, "~/plan", (PLAN_CLIENT, OPERATOR)),
    Interface(EDGELLM, Kind.SERVICE, "~/get_metrics", (*READERS, ARENA)),
    Interface(EDGELLM, Kind.SERVICE, "~/list_loras", READERS),
    Interface(EDGELLM, Kind.SERVICE, "~/switch_lora", SETTERS),
    Interface(EDGELLM, Kind.SERVICE, "~/set_noise_seed", (*SETTERS, ARENA)),
    Interface(EDGELLM, Kind.SERVICE, "~/save_system_prompt", SETTERS),
    *_of_lifecycle_nodes(FOLLOWER, (ARENA,)),
    Interface(FOLLOWER, Kind.IN, "~/action_chunk"),
    Interface(FOLLOWER, Kind.IN, "~/odom"),
    Interface(FOLLOWER, Kind.OUT, "~/cmd_vel", (*READERS, ARENA)),
    Interface(FOLLOWER, Kind.OUT, "~/path", READERS),
    Interface(FOLLOWER, Kind.SERVICE, "~/stop", (*SETTERS, ARENA)),
    Interface(FOLLOWER, Kind.SERVICE, "~/resume", (*SETTERS, ARENA)),
    *_of_lifecycle_nodes(ARM),
    Interface(ARM, Kind.IN, "~/action_chunk"),
    Interface(ARM, Kind.IN, "~/joint_states"),
    Interface(ARM, Kind.OUT, "~/commands", READERS),
    Interface(ARM, Kind.OUT, "~/preview", READERS),
    Interface(ARM, Kind.OUT, "~/state", READERS),
    Interface(ARM, Kind.SERVICE, "~/stop", SETTERS),
    Interface(ARM, Kind.SERVICE, "~/resume", SETTERS),
    *_of_every_node(PLAY),
    Interface(PLAY, Kind.IN, "~/speech"),
    *_of_every_node(ARENA),
    Interface(ARENA, Kind.OUT, "/clock"),
    Interface(ARENA, Kind.OUT, "/tf", READERS),
    Interface(ARENA, Kind.OUT, "/tf_static", READERS),
    *_of_every_node(PLAN_CLIENT),
    *_of_every_node(OPERATOR),
    *_of_every_node(MONITOR),
    *(Interface(role, Kind.IN, name) for role in READERS for name in ("/tf", "/tf_static")),  # for views
    # The commands `ros2 ...` make a node with a random number in its name.
    *(Interface(role, Kind.SERVICE, f"{ROS2_COMMANDS}/get_type_description") for role in READERS),
)


def camera_interfaces(cameras: Sequence[str]) -> tuple[Interface, ...]:
    """Return the rows of a policy's cameras besides the one on ~/image."""
    return tuple(Interface(EDGELLM, Kind.IN, camera_topic(name)) for name in cameras)


# As in follower.launch.py, arm.launch.py, play.launch.py and, with the arena, in demo.launch.py.
REMAPPINGS = {
    (FOLLOWER, "~/action_chunk"): "edgellm/action_chunk",
    (FOLLOWER, "~/odom"): "odom",
    (FOLLOWER, "~/cmd_vel"): "cmd_vel",
    (ARM, "~/action_chunk"): "edgellm/action_chunk",
    (PLAY, "~/speech"): "edgellm/speech",
}
ARENA_REMAPPINGS = {
    (FOLLOWER, "~/action_chunk"): "edgellm/action_chunk",
    (FOLLOWER, "~/odom"): "edgellm/odom",
}
