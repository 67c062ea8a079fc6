# SPDX-License-Identifier: Apache-2.0
"""DrivingNode: what nodes have in common that move a robot by chunks of actions."""

from __future__ import annotations

import math
import time
from typing import Any

from diagnostic_msgs.msg import DiagnosticArray
from rcl_interfaces.msg import SetParametersResult
from rclpy.clock import Clock, ClockType
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.parameter import Parameter
from rclpy.qos import QoSProfile
from std_srvs.srv import Trigger

from edgellm_ros.msg import ActionChunk
from edgellm_ros.ros.chunk_checks import RefusedChunkError
from edgellm_ros.ros.diagnostic_status import WARN, Problem, make_array, make_status
from edgellm_ros.ros.lifecycle import logged, refuse_impossible_transitions, state_name
from edgellm_ros.ros.messaging import check_qos_overrides, overridable, services_qos
from edgellm_ros.ros.parameter_table import Specs, check_set, declare, value_problem

CHUNKS = QoSProfile(depth=100)  # the samples of several plans
COMMANDS = QoSProfile(depth=1)  # an old command is of no use
LOG_EVERY_S = 5.0
ACKNOWLEDGED_S = 1.0  # longest wait for the acknowledgement of the last command
RECENT_S = 5.0  # refused chunks are a problem on /diagnostics for this long


class DrivingNode(LifecycleNode):
    """A lifecycle node with ~/stop, ~/resume, and transitions that end a motion.

    Everything runs on one thread. A subclass makes `_inputs` and `_outputs` when it is configured, and
    `_timer` when it is activated.
    """

    def __init__(self, name: str, specs: Specs, **kwargs: Any) -> None:
        """Declare the parameters, offer the services; `kwargs` are for LifecycleNode."""
        super().__init__(name, **kwargs)
        declare(self, specs, value_problem)
        check_qos_overrides(self)
        self._specs = specs
        self._steady = Clock(clock_type=ClockType.STEADY_TIME)
        self._timer: Any = None  # exists while the node is active
        self._inputs: list[Any] = []  # exist while the node is configured, as the outputs do
        self._outputs: dict[str, Any] = {}
        self._refused: tuple[float, str] = (-math.inf, "")  # when, by the steady clock, and why
        refuse_impossible_transitions(self)
        self.create_service(Trigger, "~/stop", self._on_stop, qos_profile=services_qos())
        self.create_service(Trigger, "~/resume", self._on_resume, qos_profile=services_qos())
        self._diagnostics = self.create_publisher(
            DiagnosticArray, "/diagnostics", **overridable(QoSProfile(depth=10))
        )
        # Not the node's clock: diagnostics are published while simulated time is paused, too.
        self.create_timer(1.0, self._every_second, clock=self._steady)
        # Last: making a publisher declares parameters, and a subclass is not complete before.
        self.add_on_set_parameters_callback(self._before_parameters_set)
        self.add_post_set_parameters_callback(self._on_parameters_set)

    @property
    def state(self) -> str:
        """The name of the lifecycle state."""
        return state_name(self)

    # Lifecycle

    @logged
    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Brake to a standstill, then publish no more."""
        self._end_motion()
        return super().on_deactivate(state)

    @logged
    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Remove the topics."""
        self._release()
        return super().on_cleanup(state)

    @logged
    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Brake to a standstill from any state."""
        self._end_motion()
        return super().on_shutdown(state)

    @logged
    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Brake and remove the topics after a failed transition.

        The next state is unconfigured.
        """
        self._end_motion()
        self._release()
        return super().on_error(state)

    def _end_motion(self) -> None:
        """Brake until the robot stands, if the node is active."""
        if self._timer is None:
            return
        self.destroy_timer(self._timer)
        self._timer = None
        self._brake()

    def _release(self) -> None:
        for subscription in self._inputs:
            self.destroy_subscription(subscription)
        for publisher in self._outputs.values():
            self.destroy_lifecycle_publisher(publisher)
        self._inputs, self._outputs = [], {}

    # What the nodes do in their own way

    def _brake(self) -> None:
        """Publish commands until the robot stands, and wait until they have arrived."""
        raise NotImplementedError

    def _on_stop(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        raise NotImplementedError

    def _on_resume(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        raise NotImplementedError

    def _on_parameters_set(self, changed: list[Parameter]) -> None:
        raise NotImplementedError

    def _every_second(self) -> None:
        """Publish the diagnostics."""
        raise NotImplementedError

    # Inputs

    def _chunk_fields(self, message: ActionChunk) -> dict[str, Any]:
        """Return the arguments of `read_chunk` that a message has."""
        names = ("request_id", "dt", "horizon", "names", "units", "values")
        fields = {name: getattr(message, name) for name in names}
        return {**fields, "max_rows": self._value("max_chunk_rows")}

    def _report_refused(self, error: RefusedChunkError) -> None:
        text = f"chunk refused ({error.reason}): {error}"
        self._refused = (time.monotonic(), text)
        self.get_logger().warning(text, throttle_duration_sec=LOG_EVERY_S)

    # Parameters, clocks and diagnostics

    def _value(self, name: str) -> Any:
        return self.get_parameter(name).value

    def _motion_clock(self) -> Clock:
        """Return the clock of motions.

        A jump of the system's clock must not move or stall the robot. Simulated time may pause, and motions
        with it.
        """
        return self.get_clock() if self._value("use_sim_time") else self._steady

    def _before_parameters_set(self, changes: list[Parameter]) -> SetParametersResult:
        return check_set(self, self._specs, changes, bool(self._inputs))

    def _recently_refused(self) -> list[Problem]:
        when, text = self._refused
        return [(WARN, text)] if time.monotonic() - when < RECENT_S else []

    def _publish_status(self, what: str, problems: list[Problem], values: dict[str, object]) -> None:
        status = make_status(f"{self.get_fully_qualified_name()}: {what}", problems, values)
        self._diagnostics.publish(make_array(self.get_clock().now().to_msg(), [status]))
