# SPDX-License-Identifier: Apache-2.0
"""Move an arm by a policy's chunks of actions.

Sends each row at its time to a controller of ros2_control.

    ros2 launch edgellm_ros edgellm.launch.py engine_dir:=... params_file:=... joint_states_topic:=...
    python3 arm_on_a_robot.py --ros-args -r commands:=/arm_controller/commands

The controller is a forward_command_controller. Its joints must be those of the policy's actions, in their
order and units.
"""

from contextlib import suppress

import rclpy
from edgellm_ros.msg import ActionChunk
from rclpy.executors import ExternalShutdownException
from rclpy.node import Node
from rclpy.time import Time
from std_msgs.msg import Float64MultiArray


class Arm(Node):
    """Follows the newest chunk; after its last row the arm stays where it is."""

    def __init__(self) -> None:
        super().__init__("arm_on_a_robot")
        self._chunk: ActionChunk | None = None
        self._commands = self.create_publisher(Float64MultiArray, "commands", 10)
        self.create_subscription(ActionChunk, "/edgellm/action_chunk", self._on_chunk, 10)

    def _on_chunk(self, chunk: ActionChunk) -> None:
        if chunk.sample_index == 0:
            if self._chunk is None:
                self.create_timer(chunk.dt, self._send)
            self._chunk = chunk
            self._send()

    def _send(self) -> None:
        chunk = self._chunk
        age = (self.get_clock().now() - Time.from_msg(chunk.header.stamp)).nanoseconds * 1e-9
        row, columns = int(age / chunk.dt), len(chunk.names)  # its first rows passed while the model computed
        if 0 <= row < chunk.horizon:
            values = chunk.values[row * columns : (row + 1) * columns]
            self._commands.publish(Float64MultiArray(data=values.tolist()))


rclpy.init()
with suppress(KeyboardInterrupt, ExternalShutdownException):
    rclpy.spin(Arm())
