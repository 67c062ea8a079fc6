# SPDX-License-Identifier: Apache-2.0
"""Show what the nodes see, say and are about to do, in RViz or in Foxglove.

ros2 launch edgellm_ros view.launch.py view:=rviz
"""

import tempfile
from pathlib import Path

from ament_index_python.packages import PackageNotFoundError, get_package_prefix, get_package_share_directory
from launch import Action, LaunchContext, LaunchDescription
from launch.actions import DeclareLaunchArgument, LogInfo, OpaqueFunction
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import Node

PORT = 8765  # of foxglove_bridge


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments and start the viewer."""
    return LaunchDescription(
        [
            DeclareLaunchArgument(
                "view",
                default_value="rviz",
                choices=["none", "rviz", "foxglove"],
                description="What to start: RViz, or the bridge that Foxglove connects to.",
            ),
            DeclareLaunchArgument("namespace", default_value="", description="Namespace of the nodes."),
            DeclareLaunchArgument(
                "frame_id", default_value="base_link", description="TF frame of the robot's base."
            ),
            DeclareLaunchArgument(
                "use_sim_time",
                default_value="false",
                choices=["true", "false"],
                description="Use the time of /clock, for simulations and bags.",
            ),
            OpaqueFunction(function=_start_view),
        ]
    )


def _start_view(context: LaunchContext) -> list[Action]:
    """Start the viewer; if it is not installed, say so in one line.

    The nodes run without it.
    """

    def value(name: str) -> str:
        return LaunchConfiguration(name).perform(context)

    view = value("view")
    if view == "none":
        return []
    package = {"rviz": "rviz2", "foxglove": "foxglove_bridge"}[view]
    if not _is_installed(package):
        missing = f"the ROS package {package} is not installed, so nothing is shown; the nodes run without it"
        return [LogInfo(msg=f"view:={view}: {missing}")]
    use_sim_time = {"use_sim_time": value("use_sim_time") == "true"}
    if view == "rviz":
        config = _view_file("edgellm.rviz", value("namespace"), value("frame_id"))
        return [
            Node(
                package=package,
                executable="rviz2",
                name="edgellm_rviz",
                arguments=["-d", str(config)],
                parameters=[use_sim_time],
            )
        ]
    layout = _view_file("edgellm.foxglove.json", value("namespace"), value("frame_id"))
    return [
        Node(
            package=package,
            executable="foxglove_bridge",
            name="foxglove_bridge",
            parameters=[{"port": PORT, **use_sim_time}],
        ),
        LogInfo(msg=f"Foxglove: open the connection ws://localhost:{PORT} and import the layout {layout}"),
    ]


def _is_installed(package: str) -> bool:
    try:
        get_package_prefix(package)
    except PackageNotFoundError:
        return False
    return True


def _view_file(name: str, namespace: str, frame_id: str) -> Path:
    """Return a file of views/, with a namespace's topics and the base frame's name."""
    path = Path(get_package_share_directory("edgellm_ros")) / "views" / name
    prefix = namespace.strip("/")
    if not prefix and frame_id == "base_link":
        return path
    text = path.read_text(encoding="utf-8").replace("base_link", frame_id)
    if prefix:
        text = text.replace("/edgellm", f"/{prefix}/edgellm")
    changed = Path(tempfile.mkdtemp(prefix="edgellm_view_")) / name
    changed.write_text(text, encoding="utf-8")
    return changed
