# SPDX-License-Identifier: Apache-2.0
"""Start the nodes `edgellm` of several robots in one process, on one engine.

ros2 launch edgellm_ros fleet.launch.py namespaces:="robot1 robot2" engine_dir:=/path/to/engines
"""

from launch import LaunchContext, LaunchDescription
from launch.actions import DeclareLaunchArgument, OpaqueFunction
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.actions import Node
from launch_ros.parameter_descriptions import ParameterValue
from launch_ros.substitutions import FindPackageShare

TOPICS = {
    "image": "Topic of the camera frames",
    "camera_info": "Topic of the camera's calibration, for the overlay",
    "odom": "Topic of the odometry",
    "joint_states": "Topic of the joint states, for a policy",
    "command": "Topic of the text commands",
    "audio": "Topic of the microphone's audio",
}


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments and start the process."""
    params_file = PathJoinSubstitution([FindPackageShare("edgellm_ros"), "config", "edgellm.yaml"])
    return LaunchDescription(
        [
            DeclareLaunchArgument(
                "namespaces", description="Namespaces of the robots, separated by spaces: a node for each."
            ),
            DeclareLaunchArgument(
                "params_file",
                default_value=params_file,
                description="YAML file with parameters: /** for all robots, /robot1/edgellm for one.",
            ),
            DeclareLaunchArgument(
                "engine_dir",
                default_value="",
                description="Engine directory made by `edgellm export`; empty = as in params_file.",
            ),
            DeclareLaunchArgument(
                "device",
                default_value="",
                choices=["", "cpu", "cuda", "tensorrt"],
                description="Device that runs the engines; empty = as in params_file.",
            ),
            *(
                DeclareLaunchArgument(
                    f"{name}_topic",
                    default_value=f"~/{name}",
                    description=f"{description}; without a leading / in the namespace of each robot.",
                )
                for name, description in TOPICS.items()
            ),
            DeclareLaunchArgument(
                "autostart",
                default_value="true",
                choices=["true", "false"],
                description="Configure and activate the nodes at start; false = a lifecycle manager does it.",
            ),
            DeclareLaunchArgument(
                "use_sim_time",
                default_value="false",
                choices=["true", "false"],
                description="Use the time of /clock, for simulations and bags.",
            ),
            DeclareLaunchArgument(
                "log_level",
                default_value="info",
                choices=["debug", "info", "warn", "error", "fatal"],
                description="Lowest severity that is logged.",
            ),
            OpaqueFunction(function=_start_nodes),
        ]
    )


def _start_nodes(context: LaunchContext) -> list[Node]:
    """Make the process.

    Launch arguments override what the parameters file has for all robots.
    """

    def value(name: str) -> str:
        return LaunchConfiguration(name).perform(context)

    overrides = {"autostart": value("autostart") == "true", "use_sim_time": value("use_sim_time") == "true"}
    for name in ("engine_dir", "device"):
        if value(name):
            overrides[name] = ParameterValue(value(name), value_type=str)  # a name may look like a number
    return [
        Node(
            package="edgellm_ros",
            executable="edgellm_fleet",
            parameters=[value("params_file"), overrides],
            remappings=[(f"~/{name}", value(f"{name}_topic")) for name in TOPICS],
            arguments=[*value("namespaces").split(), "--ros-args", "--log-level", value("log_level")],
            output="screen",
        )
    ]
