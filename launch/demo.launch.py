# SPDX-License-Identifier: Apache-2.0
"""Starts the demo world and the node that drives in it.

ros2 launch edgellm_ros demo.launch.py engine_dir:=/path/to/engines/arena
"""

from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, EmitEvent, IncludeLaunchDescription, RegisterEventHandler
from launch.event_handlers import OnProcessExit
from launch.events import Shutdown
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.actions import Node
from launch_ros.parameter_descriptions import ParameterValue
from launch_ros.substitutions import FindPackageShare


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments and start both nodes; the end of the arena ends the launch."""
    share = FindPackageShare("edgellm_ros")
    arena = Node(
        package="edgellm_ros",
        executable="arena_node",
        name="arena",
        namespace=LaunchConfiguration("namespace"),
        parameters=[
            {
                "episodes": ParameterValue(LaunchConfiguration("episodes"), value_type=int),
                "seed": ParameterValue(LaunchConfiguration("seed"), value_type=int),
                "spoken": ParameterValue(LaunchConfiguration("spoken"), value_type=bool),
                "out": ParameterValue(LaunchConfiguration("out"), value_type=str),
            }
        ],
        arguments=["--ros-args", "--log-level", LaunchConfiguration("log_level")],
        output="screen",
    )
    edgellm = IncludeLaunchDescription(
        PythonLaunchDescriptionSource(PathJoinSubstitution([share, "launch", "edgellm.launch.py"])),
        launch_arguments={
            "params_file": LaunchConfiguration("params_file"),
            "engine_dir": LaunchConfiguration("engine_dir"),
            "lora": LaunchConfiguration("lora"),
            "device": LaunchConfiguration("device"),
            "namespace": LaunchConfiguration("namespace"),
            "autostart": LaunchConfiguration("autostart"),
            "use_sim_time": "true",
            "log_level": LaunchConfiguration("log_level"),
        }.items(),
    )
    return LaunchDescription(
        [
            DeclareLaunchArgument("engine_dir", description="Engine directory of the demo checkpoint."),
            DeclareLaunchArgument("episodes", default_value="1", description="How many episodes to drive."),
            DeclareLaunchArgument("seed", default_value="1", description="Which episodes to drive."),
            DeclareLaunchArgument(
                "spoken",
                default_value="false",
                choices=["true", "false"],
                description="Speak to the robot instead of typing to it.",
            ),
            DeclareLaunchArgument(
                "lora", default_value="", description="The checkpoint's adapter that answers and drives."
            ),
            DeclareLaunchArgument(
                "device",
                default_value="",
                choices=["", "cpu", "cuda", "tensorrt"],
                description="Where the engines run; empty = as in params_file.",
            ),
            DeclareLaunchArgument(
                "out", default_value="out", description="Folder for pictures, and for what was said."
            ),
            DeclareLaunchArgument(
                "params_file",
                default_value=PathJoinSubstitution([share, "config", "demo.yaml"]),
                description="YAML file of the edgellm node's parameters.",
            ),
            DeclareLaunchArgument("namespace", default_value="", description="Namespace of both nodes."),
            DeclareLaunchArgument(
                "autostart",
                default_value="true",
                choices=["true", "false"],
                description="Configure and activate the edgellm node at start.",
            ),
            DeclareLaunchArgument(
                "log_level", default_value="info", description="Least severe messages to log."
            ),
            arena,
            edgellm,
            RegisterEventHandler(OnProcessExit(target_action=arena, on_exit=[EmitEvent(event=Shutdown())])),
        ]
    )
