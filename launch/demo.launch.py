# SPDX-License-Identifier: Apache-2.0
"""Start the arena (simulated demo world) and the node `edgellm` that drives in it.

With `follower:=true`, `edgellm_follower` drives along the action chunks of `edgellm`.

ros2 launch edgellm_ros demo.launch.py engine_dir:=/path/to/engines/arena
"""

from launch import LaunchContext, LaunchDescription
from launch.actions import DeclareLaunchArgument, EmitEvent, IncludeLaunchDescription, RegisterEventHandler
from launch.conditions import IfCondition
from launch.event_handlers import OnProcessExit
from launch.events import Shutdown
from launch.events.process import ProcessExited
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.actions import Node
from launch_ros.parameter_descriptions import ParameterValue
from launch_ros.substitutions import FindPackageShare

# The arena publishes on the node's own topics. Without these values, an `image_topic:=...` given to the demo
# would reach the included launch file and disconnect the node.
FOLLOWER_TOPICS = {
    "action_chunk_topic": "edgellm/action_chunk",
    "odom_topic": "edgellm/odom",
    "cmd_vel_topic": "~/cmd_vel",
    "path_topic": "~/path",
}
INPUTS = ("image", "camera_info", "odom", "joint_states", "command", "audio")
TOPICS = {"camera_topics": "", **{f"{name}_topic": f"~/{name}" for name in INPUTS}}


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments and start the nodes.

    The launch ends with the arena, and fails if the arena failed.
    """
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
                "follower": ParameterValue(LaunchConfiguration("follower"), value_type=bool),
                "execution": ParameterValue(LaunchConfiguration("execution"), value_type=str),
                "inference_delay": ParameterValue(LaunchConfiguration("inference_delay"), value_type=float),
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
            "chunking": LaunchConfiguration("chunking"),
            "speech_engine_dir": LaunchConfiguration("speech_engine_dir"),
            "voice": LaunchConfiguration("voice"),
            "serve_port": LaunchConfiguration("serve_port"),
            "namespace": LaunchConfiguration("namespace"),
            "enclave": "",
            "autostart": LaunchConfiguration("autostart"),
            "use_sim_time": "true",
            "view": LaunchConfiguration("view"),
            "log_level": LaunchConfiguration("log_level"),
            **TOPICS,
        }.items(),
    )
    follower = IncludeLaunchDescription(
        PythonLaunchDescriptionSource(PathJoinSubstitution([share, "launch", "follower.launch.py"])),
        launch_arguments={
            "params_file": PathJoinSubstitution([share, "config", "follower.yaml"]),
            "rate": "10",  # a command for each step of the arena
            "stamped": "true",
            "namespace": LaunchConfiguration("namespace"),
            "enclave": "",
            "autostart": LaunchConfiguration("autostart"),
            "use_sim_time": "true",
            "view": "none",  # that of edgellm shows both nodes
            "log_level": LaunchConfiguration("log_level"),
            **FOLLOWER_TOPICS,
        }.items(),
        condition=IfCondition(LaunchConfiguration("follower")),
    )
    return LaunchDescription(
        [
            DeclareLaunchArgument(
                "engine_dir",
                description="Engine directory of the demo's checkpoint, made by `edgellm export`.",
            ),
            DeclareLaunchArgument(
                "episodes", default_value="1", description="Number of episodes; 0 = until interrupted."
            ),
            DeclareLaunchArgument(
                "seed",
                default_value="1",
                description="Seed of the episodes; equal seeds give equal episodes.",
            ),
            DeclareLaunchArgument(
                "spoken",
                default_value="false",
                choices=["true", "false"],
                description="Give commands as speech on ~/audio instead of text on ~/command.",
            ),
            DeclareLaunchArgument(
                "follower",
                default_value="false",
                choices=["true", "false"],
                description="Drive by the commands of edgellm_follower instead of the action chunks.",
            ),
            DeclareLaunchArgument(
                "execution",
                default_value="auto",
                choices=["auto", "lock_step", "async", "wait"],
                description="What the robot does while a plan is computed: async = follow the last plan, "
                "wait = stand, lock_step = the node sees no latency, auto = async with an inference_delay, "
                "else lock_step.",
            ),
            DeclareLaunchArgument(
                "inference_delay",
                default_value="0.0",
                description="Simulated time in seconds from a camera frame to its plan, below 4.",
            ),
            DeclareLaunchArgument(
                "lora",
                default_value="",
                description="LoRA adapter of the checkpoint to use; empty = base model.",
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
                description="Engine directory of a model for speech, which transcribes commands; empty = the "
                "demo's model hears.",
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
            DeclareLaunchArgument(
                "out",
                default_value="out",
                description="Folder for a picture of each episode, and its spoken command as a WAV file.",
            ),
            DeclareLaunchArgument(
                "params_file",
                default_value=PathJoinSubstitution([share, "config", "demo.yaml"]),
                description="YAML file with parameters of the edgellm node.",
            ),
            DeclareLaunchArgument("namespace", default_value="", description="Namespace of all nodes."),
            DeclareLaunchArgument(
                "autostart",
                default_value="true",
                choices=["true", "false"],
                description="Configure and activate the nodes at start; false = a lifecycle manager does it.",
            ),
            DeclareLaunchArgument(
                "view",
                default_value="none",
                choices=["none", "rviz", "foxglove"],
                description="Show what the robot does: in RViz, or by the bridge that Foxglove connects to.",
            ),
            DeclareLaunchArgument(
                "log_level", default_value="info", description="Lowest severity that is logged."
            ),
            arena,
            edgellm,
            follower,
            RegisterEventHandler(OnProcessExit(target_action=arena, on_exit=_end)),
        ]
    )


def _end(event: ProcessExited, context: LaunchContext) -> EmitEvent | None:
    """End the launch with the arena, as a failure if the arena failed.

    After Ctrl-C the launch is ending already: a second Shutdown event would be an error of launch_ros.
    """
    if context.is_shutdown:
        return None
    if event.returncode:
        raise RuntimeError(f"the arena ended with exit code {event.returncode}")
    return EmitEvent(event=Shutdown())
