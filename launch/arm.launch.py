# SPDX-License-Identifier: Apache-2.0
"""Start the lifecycle node `edgellm_arm`.

The node drives an arm along the action chunks of a policy in `edgellm`, by a contract file. Nothing moves
before `dry_run:=false`.

ros2 launch edgellm_ros arm.launch.py contract:=$PWD/so101_arm.yaml
"""

from launch import LaunchContext, LaunchDescription
from launch.actions import DeclareLaunchArgument, OpaqueFunction
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.actions import LifecycleNode
from launch_ros.substitutions import FindPackageShare

# name: (default, description)
TOPICS = {"action_chunk": ("edgellm/action_chunk", "Topic of the action chunks.")}


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments and start the node."""
    params_file = PathJoinSubstitution([FindPackageShare("edgellm_ros"), "config", "arm.yaml"])
    return LaunchDescription(
        [
            DeclareLaunchArgument(
                "contract", description="YAML file with joints, units, limits and topics, as in docs/arm.md."
            ),
            DeclareLaunchArgument(
                "engine_dir",
                default_value="",
                description="Engine directory of the policy, to compare names; empty = at a chunk.",
            ),
            DeclareLaunchArgument(
                "dry_run",
                default_value="",
                choices=["", "true", "false"],
                description="Show what would be sent, and move nothing; empty = as in the file.",
            ),
            DeclareLaunchArgument(
                "params_file", default_value=params_file, description="YAML file with parameters of the node."
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
                "log_level",
                default_value="info",
                choices=["debug", "info", "warn", "error", "fatal"],
                description="Lowest severity that is logged.",
            ),
            OpaqueFunction(function=_start_node),
        ]
    )


def _start_node(context: LaunchContext) -> list[LifecycleNode]:
    """Make the node; launch arguments override the parameters file."""

    def value(name: str) -> str:
        return LaunchConfiguration(name).perform(context)

    overrides: dict[str, bool | str] = {
        name: value(name) == "true" for name in ("autostart", "use_sim_time", "dry_run") if value(name)
    }
    overrides |= {name: value(name) for name in ("contract", "engine_dir") if value(name)}
    enclave = ["--enclave", value("enclave")] if value("enclave") else []
    return [
        LifecycleNode(
            package="edgellm_ros",
            executable="arm_node",
            name="edgellm_arm",
            namespace=value("namespace"),
            parameters=[value("params_file"), overrides],
            remappings=[(f"~/{name}", value(f"{name}_topic")) for name in TOPICS],
            arguments=["--ros-args", "--log-level", value("log_level"), *enclave],
            output="screen",
        )
    ]
