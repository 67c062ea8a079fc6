# SPDX-License-Identifier: Apache-2.0
"""Play a bag into the node `edgellm`, in the ROS domain of the shell.

ros2 launch edgellm_ros replay.launch.py bag:=/path/to/bag out:=/path/to/new_bag engine_dir:=/path/to/engines
"""

from pathlib import Path

from launch import LaunchContext, LaunchDescription
from launch.actions import (
    DeclareLaunchArgument,
    EmitEvent,
    IncludeLaunchDescription,
    OpaqueFunction,
    RegisterEventHandler,
)
from launch.event_handlers import OnProcessExit
from launch.events import Shutdown
from launch.events.process import ProcessExited
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.actions import LifecycleNode, Node
from launch_ros.substitutions import FindPackageShare

from edgellm_ros.replay.inputs import parse_remappings
from edgellm_ros.ros.replay.replay import Replay, ReplayOptions


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments and start both nodes.

    The launch ends with the replay, and fails if the replay failed or found a difference.
    """
    share = FindPackageShare("edgellm_ros")
    params_file = PathJoinSubstitution([share, "config", "edgellm.yaml"])
    return LaunchDescription(
        [
            DeclareLaunchArgument("bag", description="Bag to play: a folder, or an .mcap or .db3 file."),
            DeclareLaunchArgument("out", description="Bag to write the outputs to; must not exist."),
            DeclareLaunchArgument("engine_dir", description="Engine directory made by `edgellm export`."),
            DeclareLaunchArgument(
                "expect",
                default_value="",
                description="Output bag of an earlier replay to compare with; empty = none.",
            ),
            DeclareLaunchArgument(
                "tolerance",
                default_value="0.001",
                description="Largest allowed difference of numbers in actions and paths, in their units.",
            ),
            DeclareLaunchArgument(
                "remap",
                default_value="",
                description="Topics of the bag to use as inputs, as FROM:=TO separated by spaces.",
            ),
            DeclareLaunchArgument(
                "cameras",
                default_value="",
                description="A policy's cameras that the robot has, separated by commas, the first one on "
                "~/image; empty = as in params_file, or all of the policy.",
            ),
            DeclareLaunchArgument(
                "noise_seed",
                default_value="",
                description="Seed of the action noise; empty = as in params_file.",
            ),
            DeclareLaunchArgument(
                "lora",
                default_value="",
                description="LoRA adapter to use, as NAME or NAME=DIR; empty = as in params_file.",
            ),
            DeclareLaunchArgument(
                "device",
                default_value="cpu",
                choices=["cpu", "cuda", "tensorrt"],
                description="Device that runs the engines.",
            ),
            DeclareLaunchArgument(
                "params_file",
                default_value=params_file,
                description="YAML file with parameters of the edgellm node.",
            ),
            DeclareLaunchArgument("namespace", default_value="", description="Namespace of both nodes."),
            DeclareLaunchArgument(
                "view",
                default_value="none",
                choices=["none", "rviz", "foxglove"],
                description="Show what the node does: in RViz, or by the bridge that Foxglove connects to.",
            ),
            DeclareLaunchArgument(
                "log_level", default_value="info", description="Lowest severity that is logged."
            ),
            OpaqueFunction(function=_start_nodes),
            IncludeLaunchDescription(
                PythonLaunchDescriptionSource(PathJoinSubstitution([share, "launch", "view.launch.py"])),
                launch_arguments={
                    "view": LaunchConfiguration("view"),
                    "namespace": LaunchConfiguration("namespace"),
                    "use_sim_time": "true",
                }.items(),
            ),
        ]
    )


def _start_nodes(context: LaunchContext) -> list:
    """Make both nodes. A bag or an engine that cannot be used ends the launch here."""

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
        params=Path(value("params_file")),
        cameras=tuple(value("cameras").split(",")),
    )
    with Replay(options) as replay:
        parameters, cameras = replay.start_parameters, replay.cameras
    arguments = [value("bag"), "--out", value("out"), "--engine", value("engine_dir")]
    arguments += ["--tolerance", value("tolerance"), "--lora", value("lora")]
    if cameras:
        arguments += ["--cameras", ",".join(cameras)]
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


def _end(event: ProcessExited, context: LaunchContext) -> EmitEvent | None:
    """End the launch with the replay, as a failure if the replay failed.

    After Ctrl-C the launch is ending already: a second Shutdown event would be an error of launch_ros.
    """
    if context.is_shutdown:
        return None
    if event.returncode:
        raise RuntimeError(f"the replay ended with exit code {event.returncode}")
    return EmitEvent(event=Shutdown())
