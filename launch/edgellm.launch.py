# SPDX-License-Identifier: Apache-2.0
"""Start the lifecycle node `edgellm`.

ros2 launch edgellm_ros edgellm.launch.py engine_dir:=/path/to/engines
"""

from launch import LaunchContext, LaunchDescription
from launch.actions import DeclareLaunchArgument, IncludeLaunchDescription, OpaqueFunction
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.actions import LifecycleNode
from launch_ros.parameter_descriptions import ParameterValue
from launch_ros.substitutions import FindPackageShare

from edgellm_ros.ros.camera_topic import camera_topic

TOPICS = {
    "image": "Topic of the camera frames.",
    "camera_info": "Topic of the camera's calibration, for the overlay.",
    "odom": "Topic of the odometry.",
    "joint_states": "Topic of the joint states, for a policy.",
    "command": "Topic of the text commands.",
    "audio": "Topic of the microphone's audio.",
}


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments and start the node."""
    share = FindPackageShare("edgellm_ros")
    params_file = PathJoinSubstitution([share, "config", "edgellm.yaml"])
    return LaunchDescription(
        [
            DeclareLaunchArgument(
                "params_file", default_value=params_file, description="YAML file with parameters of the node."
            ),
            DeclareLaunchArgument(
                "engine_dir",
                default_value="",
                description="Engine directory made by `edgellm export`; empty = as in params_file.",
            ),
            DeclareLaunchArgument(
                "lora",
                default_value="",
                description="LoRA adapter to use; base = base model, empty = as in params_file.",
            ),
            DeclareLaunchArgument(
                "device",
                default_value="",
                choices=["", "cpu", "cuda", "tensorrt"],
                description="Device that runs the engines; empty = as in params_file.",
            ),
            DeclareLaunchArgument(
                "chunking",
                default_value="",
                choices=["", "off", "guided", "frozen", "trained"],
                description="How a plan continues the last chunk of actions; empty = as in params_file.",
            ),
            DeclareLaunchArgument(
                "speech_engine_dir",
                default_value="",
                description="Engine directory of a model for speech, which transcribes commands; empty = as "
                "in params_file.",
            ),
            DeclareLaunchArgument(
                "voice",
                default_value="",
                description="Voice that speaks answers: a Piper voice's MODEL.onnx, or espeak; empty = as in "
                "params_file.",
            ),
            DeclareLaunchArgument(
                "serve_port",
                default_value="",
                description="Port for programs that talk to the model by OpenAI's HTTP API; 0 = none, "
                "empty = as in params_file.",
            ),
            DeclareLaunchArgument("namespace", default_value="", description="Namespace of the node."),
            DeclareLaunchArgument(
                "enclave",
                default_value="",
                description="Security enclave of the node, made by `edgellm security`; empty = ROS's own.",
            ),
            *(
                DeclareLaunchArgument(f"{name}_topic", default_value=f"~/{name}", description=description)
                for name, description in TOPICS.items()
            ),
            DeclareLaunchArgument(
                "camera_topics",
                default_value="",
                description="Topics of a policy's cameras besides the one on image_topic, as NAME:=TOPIC "
                "separated by spaces.",
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

    overrides = {"autostart": value("autostart") == "true", "use_sim_time": value("use_sim_time") == "true"}
    for name in ("engine_dir", "lora", "device", "chunking", "speech_engine_dir", "voice"):
        if value(name):
            overrides[name] = ParameterValue(value(name), value_type=str)  # a name may look like a number
    if value("serve_port"):
        overrides["serve_port"] = ParameterValue(value("serve_port"), value_type=int)
    remappings = [(f"~/{name}", value(f"{name}_topic")) for name in TOPICS]
    for given in value("camera_topics").split():
        name, separator, topic = given.partition(":=")
        if not (name and separator and topic):
            raise ValueError(f"camera_topics must be NAME:=TOPIC separated by spaces, got {given!r}")
        remappings.append((camera_topic(name), topic))
    enclave = ["--enclave", value("enclave")] if value("enclave") else []
    return [
        LifecycleNode(
            package="edgellm_ros",
            executable="edgellm_node",
            name="edgellm",
            namespace=value("namespace"),
            parameters=[value("params_file"), overrides],
            remappings=remappings,
            arguments=["--ros-args", "--log-level", value("log_level"), *enclave],
            output="screen",
        )
    ]
