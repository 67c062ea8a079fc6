# SPDX-License-Identifier: Apache-2.0
"""The arena's side of the node edgellm_follower: its commands and its stop.

A TwistStamped on edgellm_follower/cmd_vel answers each step of /clock; edgellm_follower/stop and
edgellm_follower/resume separate episodes. ArenaLink publishes clock and odometry.
"""

from __future__ import annotations

from geometry_msgs.msg import TwistStamped
from lifecycle_msgs.srv import GetState
from std_srvs.srv import Trigger

from edgellm_arena.ros.arena_link import ArenaLink
from edgellm_arena.world.unicycle import DT, State
from edgellm_ros.ros.messaging import to_nanoseconds
from edgellm_ros.ros.world_link import RELIABLE, LinkError

ATTEMPTS, ATTEMPT_S = 10, 0.5  # to get the command for a step; the clock's message may be lost
STANDING = 1e-6  # m/s


class FollowerLink:
    """Topics and services of edgellm_follower on the arena's node."""

    def __init__(self, arena: ArenaLink) -> None:
        self._arena = arena
        self._stamp = 0
        self._command: TwistStamped | None = None
        self._commands = arena.create_subscription(
            TwistStamped, "edgellm_follower/cmd_vel", self._on_command, RELIABLE
        )
        self._state = arena.create_client(GetState, "edgellm_follower/get_state")
        self._stop = arena.create_client(Trigger, "edgellm_follower/stop")
        self._resume = arena.create_client(Trigger, "edgellm_follower/resume")

    def wait_until_active(self, timeout_s: float) -> None:
        """Wait until the follower is active and hears the arena; LinkError if it is not."""

        def connected() -> bool:  # its odometry beside that of the edgellm node
            return self._arena.count_subscribers("edgellm/odom") > 1

        self._arena.wait_for_state(self._state, "the follower", connected, timeout_s)

    def stop(self) -> None:
        """Have the follower brake and refuse chunks."""
        self._arena.call(self._stop, Trigger.Request())

    def resume(self) -> None:
        """Have the follower take chunks of frames from this time on."""
        self._arena.call(self._resume, Trigger.Request())

    def action(self, stamp: int, state: State) -> tuple[float, float]:
        """Return the action of the step that begins at `stamp` (ns).

        The action leads to the follower's command for this step. The clock must be at `stamp`. Raises
        LinkError without a command.
        """
        for _ in range(ATTEMPTS):
            if self._arena.spin_until(lambda: self._stamp >= stamp, ATTEMPT_S):
                twist = self._command.twist
                speed = twist.linear.x
                curvature = twist.angular.z / speed if speed > STANDING else 0.0
                return (speed - state.speed) / DT, curvature
            self._arena.publish_clock(stamp)
        raise LinkError(f"no command of the follower for t = {stamp * 1e-9:.1f} s")

    def _on_command(self, message: TwistStamped) -> None:
        self._stamp, self._command = to_nanoseconds(message.header.stamp), message
