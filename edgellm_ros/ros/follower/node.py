# SPDX-License-Identifier: Apache-2.0
"""The lifecycle node `edgellm_follower` around a TrajectoryFollower.

    ~/action_chunk, ~/odom --> TrajectoryFollower -- timer --> ~/cmd_vel, ~/path
    ~/stop, ~/resume ------------^

Everything runs on one thread, and no callback waits, except that the robot is braked to a standstill within
the transitions that end its motion.
"""

from __future__ import annotations

import math
import time
from typing import Any

from geometry_msgs.msg import Twist, TwistStamped, Vector3
from nav_msgs.msg import Odometry, Path
from rclpy.duration import Duration
from rclpy.lifecycle import LifecycleState, TransitionCallbackReturn
from rclpy.parameter import Parameter
from rclpy.qos import QoSProfile, ReliabilityPolicy
from std_msgs.msg import Header
from std_srvs.srv import Trigger

from edgellm_ros.msg import ActionChunk
from edgellm_ros.ros.chunk_checks import RefusedChunkError
from edgellm_ros.ros.diagnostic_status import WARN
from edgellm_ros.ros.driving_node import ACKNOWLEDGED_S, CHUNKS, COMMANDS, LOG_EVERY_S, DrivingNode
from edgellm_ros.ros.follower.course import read_chunk
from edgellm_ros.ros.follower.parameters import SPECS, read_settings
from edgellm_ros.ros.follower.trajectory_follower import REASONS, Mode, Motion, TrajectoryFollower
from edgellm_ros.ros.lifecycle import logged
from edgellm_ros.ros.messaging import overridable, to_nanoseconds, to_time
from edgellm_ros.ros.path_message import to_path

ODOMETRY = QoSProfile(depth=50, reliability=ReliabilityPolicy.BEST_EFFORT)


class FollowerNode(DrivingNode):
    """The node; docs/ros_interfaces.md lists its interfaces and parameters."""

    def __init__(self, **kwargs: Any) -> None:
        """Declare the parameters, offer the services; `kwargs` are for LifecycleNode."""
        super().__init__("edgellm_follower", SPECS, **kwargs)
        self.follower = TrajectoryFollower(read_settings(self))
        self._last_tick: int | None = None  # ns of the timer's clock
        self._odometry_problem = ""

    # Lifecycle

    @logged
    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        self.follower.settings = read_settings(self)
        twist = TwistStamped if self._value("stamped") else Twist
        self._outputs = {
            "cmd_vel": self.create_lifecycle_publisher(twist, "~/cmd_vel", **overridable(COMMANDS)),
            "path": self.create_lifecycle_publisher(Path, "~/path", **overridable(COMMANDS)),
        }
        self._inputs = [
            self.create_subscription(ActionChunk, "~/action_chunk", self._on_chunk, **overridable(CHUNKS)),
            self.create_subscription(Odometry, "~/odom", self._on_odometry, **overridable(ODOMETRY)),
        ]
        return super().on_configure(state)

    @logged
    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Begin to publish commands, at the measured speed."""
        result = super().on_activate(state)
        self.follower.start(self._now())
        self._last_tick = None
        period = self.follower.settings.period
        self._timer = self.create_timer(period, self._tick, clock=self._motion_clock())
        return result

    def _brake(self) -> None:
        """Publish commands until the robot stands still; takes the stopping time.

        A command that the base has not acknowledged may be lost if the publisher goes.
        """
        self.follower.drop()
        period = self.follower.settings.period
        while True:
            motion = self.follower.step(self._now(), period)
            self._publish(motion)
            if motion.speed == 0:
                break
            time.sleep(period)
        self._outputs["cmd_vel"].wait_for_all_acked(Duration(seconds=ACKNOWLEDGED_S))

    # Inputs

    def _on_chunk(self, message: ActionChunk) -> None:
        if self._timer is None:
            return
        follower = self.follower
        if message.sample_index != self._value("sample_index"):
            follower.counts["other_samples"] += 1
            return
        try:
            chunk = read_chunk(to_nanoseconds(message.header.stamp), **self._chunk_fields(message))
        except RefusedChunkError as error:
            follower.counts[error.reason] += 1
            self._report_refused(error)
            return
        try:
            follower.add(chunk, self._now())
        except RefusedChunkError as error:
            self._report_refused(error)

    def _on_odometry(self, message: Odometry) -> None:
        now = self._now()
        stamp, speed = to_nanoseconds(message.header.stamp) or now, message.twist.twist.linear.x
        self._odometry_problem = ""
        if not math.isfinite(speed):
            self._odometry_problem = f"odometry with a speed of {speed}"
        elif (stamp - now) * 1e-9 > self.follower.settings.future_tolerance:
            self._odometry_problem = f"odometry from {(stamp - now) * 1e-9:.2f} s in the future"
        if self._odometry_problem:
            self.follower.counts["odometry_refused"] += 1
            self.get_logger().warning(self._odometry_problem, throttle_duration_sec=LOG_EVERY_S)
        else:
            self.follower.observe_speed(stamp, speed)

    def _on_stop(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        self.follower.stop()
        self.get_logger().warning("stopped until ~/resume")
        response.success, response.message = True, "the robot stops until ~/resume"
        return response

    def _on_resume(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        response.success = self.follower.stopped
        response.message = "the next chunk is followed" if response.success else "it was not stopped"
        self.follower.resume(self._now())
        return response

    # Outputs

    def _tick(self) -> None:
        now, tick = self._now(), self._timer.clock.now().nanoseconds
        elapsed = 0.0 if self._last_tick is None else (tick - self._last_tick) * 1e-9
        self._last_tick = tick
        motion = self.follower.step(now, elapsed if elapsed > 0 else self.follower.settings.period)
        self._publish(motion)
        if self._outputs["path"].get_subscription_count() > 0:
            header = Header(stamp=to_time(now), frame_id=self._value("frame_id"))
            path = to_path(self.follower.predict(now), self.follower.prediction_dt, header)
            self._outputs["path"].publish(path)

    def _publish(self, motion: Motion) -> None:
        twist = Twist(linear=Vector3(x=motion.speed), angular=Vector3(z=motion.yaw_rate))
        if self._value("stamped"):
            header = Header(stamp=to_time(self._now()), frame_id=self._value("frame_id"))
            self._outputs["cmd_vel"].publish(TwistStamped(header=header, twist=twist))
        else:
            self._outputs["cmd_vel"].publish(twist)

    # Parameters and diagnostics

    def _now(self) -> int:
        return self.get_clock().now().nanoseconds

    def _on_parameters_set(self, changed: list[Parameter]) -> None:
        self.follower.settings = read_settings(self)

    def _every_second(self) -> None:
        follower, counts = self.follower, self.follower.counts
        problems = self._recently_refused()
        if follower.stopped:
            problems.append((WARN, "stopped until ~/resume"))
        if self._odometry_problem:
            problems.append((WARN, self._odometry_problem))
        if counts["other_samples"] and not counts["accepted"]:
            problems.append((WARN, f"no chunk with sample_index {self._value('sample_index')}, only others"))
        if self._timer is not None and follower.mode is Mode.BRAKING:
            problems.append((WARN, "no chunk to follow: braking"))
        age = math.inf if follower.stamp is None else (self._now() - follower.stamp) * 1e-9
        values: dict[str, object] = {
            "state": self.state,
            "mode": follower.mode.value,
            "speed": follower.motion.speed,
            "yaw_rate": follower.motion.yaw_rate,
            "chunk_age": age,
            "chunks_accepted": counts["accepted"],
            "chunks_of_other_samples": counts["other_samples"],
            **{f"chunks_{reason}": counts[reason] for reason in REASONS},
            "watchdog_stops": counts["watchdog_stops"],
            "clock_jumps": counts["clock_jumps"],
            "odometry_refused": counts["odometry_refused"],
        }
        self._publish_status("follower", problems, values)
