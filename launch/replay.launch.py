# SPDX-License-Identifier: Apache-2.0
"""Plays a bag into the node `edgellm`, one message at a time, where other nodes of the ROS domain can watch.

ros2 launch edgellm_ros replay.launch.py bag:=/path/to/bag out:=/path/to/new_bag engine_dir:=/path/to/engines
"""

from pathlib import Path

from launch import LaunchContext, LaunchDescription
from launch.actions import DeclareLaunchArgument, EmitEvent, OpaqueFunction, RegisterEventHandler
from launch.event_handlers import OnProcessExit
from launch.events import Shutdown
from launch.events.process import ProcessExited
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.actions import LifecycleNode, Node
from launch_ros.substitutions import FindPackageShare

from edgellm_ros.replay.inputs import parse_remappings
from edgellm_ros.ros.replay.replay import Replay, ReplayOptions


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments and start both nodes; the end of the replay ends the launch, as a failure if it
    found a difference.
    """
    params_file = PathJoinSubstitution([FindPackageShare("edgellm_ros"), "config", "edgellm.yaml"])
    return LaunchDescription(
        [
            DeclareLaunchArgument("bag", description="Bag to play: a folder, or a .mcap or .db3 file."),
            DeclareLaunchArgument("out", description="Bag to write with the outputs; must not exist."),
            DeclareLaunchArgument("engine_dir", description="Engine directory made by `edgellm export`."),
            DeclareLaunchArgument(
                "expect", default_value="", description="Earlier output bag to compare with; empty = none."
            ),
            DeclareLaunchArgument(
                "tolerance",
                default_value="0.001",
                description="How much numbers of actions and paths may differ, in their units.",
            ),
            DeclareLaunchArgument(
                "remap",
                default_value="",
                description="FROM:=TO, several with spaces between: topics of the bag that are inputs.",
            ),
            DeclareLaunchArgument(
                "noise_seed", default_value="", description="Action noise; empty = as in params_file."
            ),
            DeclareLaunchArgument(
                "lora",
                default_value="",
                description="Adapter that answers, NAME or NAME=DIR; empty = as in params_file.",
            ),
            DeclareLaunchArgument(
                "device",
                default_value="cpu",
                choices=["cpu", "cuda", "tensorrt"],
                description="Where the engines run.",
            ),
            DeclareLaunchArgument(
                "params_file",
                default_value=params_file,
                description="YAML file of the edgellm node's parameters.",
            ),
            DeclareLaunchArgument("namespace", default_value="", description="Namespace of both nodes."),
            DeclareLaunchArgument(
                "log_level", default_value="info", description="Least severe messages to log."
            ),
            OpaqueFunction(function=_start_nodes),
        ]
    )


def _start_nodes(context: LaunchContext) -> list:
    """Both nodes. What is wrong with the bag or the engine ends the launch here."""

    def value(name: str) -> str:
        return LaunchConfiguration(name).perform(context)

    options = ReplayOptions(
        bag=Path(value("bag")),
        out=Path(value("out")),
        engine_dir=Path(value("engine_dir")),
        device=value("device"),
        remappings=parse_remappings(value("remap").split()),
        expect=Path(value("expect")) if value("expect") else None,
        noise_seed=int(value("noise_seed")) if value("noise_seed") else None,
        lora=value("lora"),
    )
    with Replay(options) as replay:
        parameters = replay.node_parameters
    arguments = [value("bag"), "--out", value("out"), "--engine", value("engine_dir")]
    arguments += ["--tolerance", value("tolerance"), "--lora", value("lora")]
    for name in ("expect", "noise_seed"):
        if value(name):
            arguments += [f"--{name.replace('_', '-')}", value(name)]
    for remapping in value("remap").split():
        arguments += ["--remap", remapping]
    level = ["--ros-args", "--log-level", value("log_level")]
    edgellm = LifecycleNode(
        package="edgellm_ros",
        executable="edgellm_node",
        name="edgellm",
        namespace=value("namespace"),
        parameters=[value("params_file"), parameters],
        arguments=level,
        output="screen",
    )
    player = Node(
        package="edgellm_ros",
        executable="replay_node",
        name="replay",
        namespace=value("namespace"),
        arguments=[*arguments, *level],
        output="screen",
    )
    end = RegisterEventHandler(OnProcessExit(target_action=player, on_exit=_end))
    return [edgellm, player, end]


def _end(event: ProcessExited, context: LaunchContext) -> EmitEvent:
    """The end of the launch, which fails if the replay did."""
    if event.returncode:
        raise RuntimeError(f"the replay ended with exit code {event.returncode}")
    return EmitEvent(event=Shutdown())
