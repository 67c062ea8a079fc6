# SPDX-License-Identifier: Apache-2.0
"""Runs a node per namespace until a signal comes, each on a thread of its own.

So a robot whose transition takes long, such as configure with a speech engine, holds up none of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from edgellm_ros.echo import quoted
from edgellm_ros.ros.fleet.engine import FleetEngine
from edgellm_ros.ros.fleet.node import FleetNode
from edgellm_ros.ros.lifecycle import run_nodes
from edgellm_ros.ros.node.process import run_node
from edgellm_ros.ros.processes import split_ros_arguments


def run(args: Sequence[str]) -> int:
    """Run the nodes until a signal comes, and return the exit code.

    args: the namespaces, and ROS arguments, as on the command line.
    """
    namespaces, ros_args = split_ros_arguments(args)
    return run_nodes("edgellm_fleet", partial(_make_nodes, namespaces), run_node, ros_args)


def _make_nodes(namespaces: Sequence[str]) -> list[FleetNode]:
    """Make a node for each namespace; ValueError without one, and for two equal ones."""
    if not namespaces:
        raise ValueError("name the robots' namespaces, as in: edgellm_fleet robot1 robot2")
    full = [f"/{namespace.strip('/')}" for namespace in namespaces]
    twice = [name for name in full if full.count(name) > 1]
    if twice:
        raise ValueError(f"two robots have the namespace {quoted(twice[0])}: they must be different")
    engine = FleetEngine(len(namespaces))
    nodes: list[FleetNode] = []
    try:
        for namespace in full:
            nodes.append(FleetNode(engine, namespace=namespace))
            if nodes[-1].get_namespace() != namespace:
                raise ValueError(
                    "the ROS arguments set a namespace (__ns): name it before --ros-args instead"
                )
    except BaseException:
        for node in nodes:
            node.destroy_node()
        raise
    return nodes
