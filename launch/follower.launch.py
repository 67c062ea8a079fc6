# SPDX-License-Identifier: Apache-2.0
"""Start the lifecycle node `edgellm_follower`.

The node drives the robot along the action chunks of `edgellm`.

ros2 launch edgellm_ros follower.launch.py cmd_vel_topic:=/cmd_vel odom_topic:=/odom
"""

from launch import LaunchContext, LaunchDescription
from launch.actions import DeclareLaunchArgument, IncludeLaunchDescription, OpaqueFunction
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.actions import LifecycleNode
from launch_ros.substitutions import FindPackageShare

# name: (default, description)
TOPICS = {
    "action_chunk": ("edgellm/action_chunk", "Topic of the action chunks."),
    "odom": ("odom", "Topic of the odometry."),
    "cmd_vel": ("cmd_vel", "Topic of the velocity commands."),
    "path": ("~/path", "Topic of the path that the robot is about to drive."),
}


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments and start the node."""
    share = FindPackageShare("edgellm_ros")
    params_file = PathJoinSubstitution([share, "config", "follower.yaml"])
    return LaunchDescription(
        [
            DeclareLaunchArgument(
                "params_file", default_value=params_file, description="YAML file with parameters of the node."
            ),
            DeclareLaunchArgument(
                "rate", default_value="", description="Commands per second; empty = as in the file."
            ),
            DeclareLaunchArgument(
                "stamped",
                default_value="",
                choices=["", "true", "false"],
                description="Send TwistStamped instead of Twist; empty = as in the file.",
            ),
            DeclareLaunchArgument("namespace", default_value="", description="Namespace of the node."),
            DeclareLaunchArgument(
                "enclave",
                default_value="",
                description="Security enclave of the node, made by `edgellm security`; empty = ROS's own.",
            ),
            *(
                DeclareLaunchArgument(f"{name}_topic", default_value=default, description=description)
                for name, (default, description) in TOPICS.items()
            ),
            DeclareLaunchArgument(
                "autostart",
                default_value="true",
                choices=["true", "false"],
                description="Configure and activate the node at start; false = a lifecycle manager does it.",
            ),
            DeclareLaunchArgument(
                "use_sim_time",
                default_value="false",
                choices=["true", "false"],
                description="Use the time of /clock, for simulations and bags.",
            ),
            DeclareLaunchArgument(
                "view",
                default_value="none",
                choices=["none", "rviz", "foxglove"],
                description="Show what the node does: in RViz, or by the bridge that Foxglove connects to.",
            ),
            DeclareLaunchArgument(
                "log_level",
                default_value="info",
                choices=["debug", "info", "warn", "error", "fatal"],
                description="Lowest severity that is logged.",
            ),
            OpaqueFunction(function=_start_node),
            IncludeLaunchDescription(
                PythonLaunchDescriptionSource(PathJoinSubstitution([share, "launch", "view.launch.py"])),
                launch_arguments={
                    name: LaunchConfiguration(name) for name in ("view", "namespace", "use_sim_time")
                }.items(),
            ),
        ]
    )


def _start_node(context: LaunchContext) -> list[LifecycleNode]:
    """Make the node; launch arguments override the parameters file."""

    def value(name: str) -> str:
        return LaunchConfiguration(name).perform(context)

    overrides: dict[str, bool | float] = {
        name: value(name) == "true" for name in ("autostart", "use_sim_time", "stamped") if value(name)
    }
    if value("rate"):
        overrides["rate"] = float(value("rate"))
    enclave = ["--enclave", value("enclave")] if value("enclave") else []
    return [
        LifecycleNode(
            package="edgellm_ros",
            executable="follower_node",
            name="edgellm_follower",
            namespace=value("namespace"),
            parameters=[value("params_file"), overrides],
            remappings=[(f"~/{name}", value(f"{name}_topic")) for name in TOPICS],
            arguments=["--ros-args", "--log-level", value("log_level"), *enclave],
            output="screen",
        )
    ]
