# SPDX-License-Identifier: Apache-2.0
"""Start what one of two computers runs: the robot, or the one with the GPU.

Arguments that are not declared here are those of the included launch file (docs/remote.md).

ros2 launch edgellm_ros remote.launch.py machine:=robot peers:=192.168.1.20 contract:=$PWD/arm.yaml
ros2 launch edgellm_ros remote.launch.py machine:=gpu peers:=192.168.1.10 engine_dir:=/path/to/engine
"""

from launch import LaunchContext, LaunchDescription
from launch.actions import (
    DeclareLaunchArgument,
    IncludeLaunchDescription,
    OpaqueFunction,
    SetEnvironmentVariable,
)
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.substitutions import FindPackageShare

STATE_TOPIC = "edgellm_arm/state"  # joint states in the policy's names and units


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments, set the environment, and start one node."""
    return LaunchDescription(
        [
            DeclareLaunchArgument(
                "machine",
                choices=["robot", "gpu"],
                description="This computer: robot = the node that drives, gpu = the node edgellm.",
            ),
            DeclareLaunchArgument(
                "drive",
                default_value="arm",
                choices=["arm", "follower"],
                description="What drives the robot: edgellm_arm or edgellm_follower; equal on both.",
            ),
            DeclareLaunchArgument(
                "peers",
                default_value="",
                description="Addresses of the other computer, separated by ;, in place of discovery by "
                "multicast; empty = multicast in the subnet.",
            ),
            DeclareLaunchArgument(
                "domain_id",
                default_value="",
                description="ROS_DOMAIN_ID, equal on both; empty = as in the environment.",
            ),
            OpaqueFunction(function=_start),
        ]
    )


def _start(context: LaunchContext) -> list[SetEnvironmentVariable | IncludeLaunchDescription]:
    """Set the environment of discovery, and include the launch file of the node."""

    def value(name: str) -> str:
        return LaunchConfiguration(name).perform(context)

    given = context.launch_configurations  # of this file's arguments and all others
    environment = {}
    if value("peers"):
        # with this range, the peers alone are asked, without multicast
        environment = {"ROS_STATIC_PEERS": value("peers"), "ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST"}
    if value("domain_id"):
        environment["ROS_DOMAIN_ID"] = value("domain_id")
    name, arguments = value("drive"), {}
    if value("machine") == "gpu":
        if name == "arm":
            arguments["joint_states_topic"] = given.get("joint_states_topic", STATE_TOPIC)
        name = "edgellm"
    elif name == "arm":
        if not given.get("contract"):
            raise ValueError("contract is missing: machine:=robot drive:=arm needs the file of docs/arm.md")
        arguments["contract"] = given["contract"]
    file = PathJoinSubstitution([FindPackageShare("edgellm_ros"), "launch", f"{name}.launch.py"])
    return [
        *(SetEnvironmentVariable(key, text) for key, text in environment.items()),
        IncludeLaunchDescription(PythonLaunchDescriptionSource(file), launch_arguments=arguments.items()),
    ]
