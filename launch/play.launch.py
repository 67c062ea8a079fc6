# SPDX-License-Identifier: Apache-2.0
"""Start the node `edgellm_play`, which plays the speech of `edgellm`.

ros2 launch edgellm_ros play.launch.py
"""

from launch import LaunchContext, LaunchDescription
from launch.actions import DeclareLaunchArgument, OpaqueFunction
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import Node
from launch_ros.parameter_descriptions import ParameterValue

# name: (default, description)
TOPICS = {"speech": ("edgellm/speech", "Topic of the sound.")}
PARAMETERS = {
    "device": ("default", "Sound card, by a part of its name; default = the system's, none = use the file."),
    "file": ("", "WAV file to write where there is no sound card, or with device:=none."),
}


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments and start the node."""
    return LaunchDescription(
        [
            *(
                DeclareLaunchArgument(name, default_value=default, description=description)
                for name, (default, description) in PARAMETERS.items()
            ),
            *(
                DeclareLaunchArgument(f"{name}_topic", default_value=default, description=description)
                for name, (default, description) in TOPICS.items()
            ),
            DeclareLaunchArgument("namespace", default_value="", description="Namespace of the node."),
            DeclareLaunchArgument(
                "enclave",
                default_value="",
                description="Security enclave of the node, made by `edgellm security`; empty = ROS's own.",
            ),
            OpaqueFunction(function=_start_node),
        ]
    )


def _start_node(context: LaunchContext) -> list[Node]:
    def value(name: str) -> str:
        return LaunchConfiguration(name).perform(context)

    enclave = ["--ros-args", "--enclave", value("enclave")] if value("enclave") else []
    return [
        Node(
            package="edgellm_ros",
            executable="play_node",
            name="edgellm_play",
            namespace=value("namespace"),
            parameters=[{name: ParameterValue(value(name), value_type=str) for name in PARAMETERS}],
            remappings=[(f"~/{name}", value(f"{name}_topic")) for name in TOPICS],
            arguments=enclave,
            output="screen",
        )
    ]
