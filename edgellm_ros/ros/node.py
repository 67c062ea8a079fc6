# SPDX-License-Identifier: Apache-2.0
"""The lifecycle node `edgellm`: topics, an action and services around one runtime.

    ~/image ~/odom ~/command --> Inputs ----+
                                            +--> PlanWorker (own thread) --> Planner --> Outputs, results
    ~/plan (action) --> PlanServer ---------+

Configure loads the engines, activate opens the subscriptions, deactivate ends what runs, cleanup frees.
Callbacks only move messages; the planning thread does the work.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from diagnostic_msgs.msg import DiagnosticArray
from rclpy.clock import Clock, ClockType
from rclpy.impl.implementation_singleton import rclpy_implementation
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.parameter import Parameter

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.ros.diagnostics import engine_status, input_status, make_array, plan_status
from edgellm_ros.ros.inputs import Inputs
from edgellm_ros.ros.jobs import JobFactory
from edgellm_ros.ros.metrics import NodeMetrics
from edgellm_ros.ros.odometry import OdometryBuffer
from edgellm_ros.ros.outputs import Outputs
from edgellm_ros.ros.parameters import Parameters, check_parameters, declare_parameters
from edgellm_ros.ros.plan_server import PlanServer
from edgellm_ros.ros.planner import Planner
from edgellm_ros.ros.services import Services
from edgellm_ros.ros.trigger import CommandTrigger
from edgellm_ros.ros.worker import PREEMPTED, PlanWorker
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime

STOP_TIMEOUT_S = 5.0  # deactivation waits so long for the next token; a slower plan ends by itself later
NOT_CONFIGURED = "not configured"


@dataclass(frozen=True, eq=False)
class Parts:
    """What exists from configure to cleanup."""

    runtime: LLMInferenceRuntime
    metrics: NodeMetrics
    odometry: OdometryBuffer
    trigger: CommandTrigger
    planner: Planner
    worker: PlanWorker
    outputs: Outputs
    services: Services
    jobs: JobFactory
    inputs: Inputs
    plan_server: PlanServer


def _logged(transition: Callable) -> Callable:
    """Log what a transition raises, because rclpy keeps it to itself."""

    @functools.wraps(transition)
    def wrapper(self: EdgeLLMNode, state: LifecycleState) -> TransitionCallbackReturn:
        try:
            return transition(self, state)
        except Exception:
            self.get_logger().error(traceback.format_exc())
            raise

    return wrapper


class EdgeLLMNode(LifecycleNode):
    """Topics, services, the action and parameters are listed in docs/ros_interfaces.md."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__("edgellm", **kwargs)
        self._parts: Parts | None = None
        self._active = False
        self._problem = NOT_CONFIGURED
        declare_parameters(self)
        self.parameters = Parameters.read(self)
        self.add_on_set_parameters_callback(lambda values: check_parameters(values, self._parts is None))
        self.add_post_set_parameters_callback(self._on_parameters_set)
        self._answer_impossible_transitions()
        self._diagnostics = self.create_publisher(DiagnosticArray, "/diagnostics", 10)
        # Not the node's clock: simulated time may stand still, and then it is most wanted to know why.
        self.create_timer(1.0, self._every_second, clock=Clock(clock_type=ClockType.STEADY_TIME))

    @property
    def state(self) -> str:
        """The lifecycle state's name."""
        return self._state_machine.current_state[1]

    @property
    def goals_in_progress(self) -> int:
        """Goals that have not got their result yet."""
        return self._parts.plan_server.in_progress if self._parts is not None else 0

    @_logged
    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Load the engines and make topics, services and the action."""
        parameters = self.parameters
        try:
            if not parameters.engine_dir:
                raise ValueError("parameter engine_dir is empty: name a directory made by `edgellm export`")
            runtime = LLMInferenceRuntime(parameters.engine_dir, parameters.device)
        except (OSError, ValueError, EngineError) as error:
            self._problem = f"cannot load the engines: {error}"
            self.get_logger().error(self._problem)
            return TransitionCallbackReturn.FAILURE
        runtime.set_action_noise_seed(parameters.noise_seed)
        self._parts = self._make_parts(runtime, parameters)
        self._problem = ""
        self.get_logger().info(f"engines of {parameters.engine_dir} loaded on {parameters.device}")
        return super().on_configure(state)

    @_logged
    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Open the subscriptions and accept goals."""
        self._parts.inputs.open(self.parameters.image_transport)
        self._active = True
        return super().on_activate(state)

    @_logged
    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Stop planning: goals end as preempted, commands and old input are forgotten."""
        self.stop_planning("the node was deactivated")
        return super().on_deactivate(state)

    @_logged
    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Free the engines and take topics, services and the action down."""
        self._release()
        return super().on_cleanup(state)

    @_logged
    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        """From any state to the end. The action stays, so that the goals that ran still get their results."""
        self.stop_planning("the node shuts down")
        if self._parts is not None:
            self._parts.worker.close()
            self._parts.runtime.close()
        return super().on_shutdown(state)

    @_logged
    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        """After a transition that raised: back to unconfigured, with nothing left over."""
        self.stop_planning("the node failed")
        self._release()
        return super().on_error(state)

    def destroy_node(self) -> None:
        """The end of the node."""
        self._release()
        super().destroy_node()

    def stop_planning(self, message: str) -> None:
        """End what runs and waits as preempted, and accept nothing more."""
        self._active = False
        parts = self._parts
        if parts is None:
            return
        parts.inputs.close()
        if not parts.worker.stop_all(PREEMPTED, message, STOP_TIMEOUT_S):
            self.get_logger().warning(f"the running plan did not end within {STOP_TIMEOUT_S:g} s")

    def _make_parts(self, runtime: LLMInferenceRuntime, parameters: Parameters) -> Parts:
        log = self.get_logger()
        metrics, odometry, trigger = NodeMetrics(), OdometryBuffer(), CommandTrigger(parameters.plan_on)
        planner = Planner(runtime, odometry, parameters, self.get_clock(), lambda: trigger.frame, log.error)
        worker = PlanWorker(planner.plan, parameters.queue_size)
        outputs = Outputs(self)
        services = Services(self, runtime, metrics)
        jobs = JobFactory(worker, outputs, metrics, parameters, lambda: services.active_lora, log)
        inputs = Inputs(self, worker, odometry, trigger, metrics, jobs.from_command)
        server = PlanServer(self, worker, lambda: self._active, jobs.from_goal, self._on_goal_rejected)
        return Parts(
            runtime, metrics, odometry, trigger, planner, worker, outputs, services, jobs, inputs, server
        )

    def _release(self) -> None:
        parts, self._parts = self._parts, None
        self._problem = NOT_CONFIGURED
        if parts is None:
            return
        parts.worker.close()
        parts.plan_server.destroy()
        parts.services.destroy()
        parts.outputs.destroy()
        parts.runtime.close()

    def _answer_impossible_transitions(self) -> None:
        """Answer a transition that the state does not have with success = False.

        rclpy lets the state machine's exception out of the service callback, which would end the node.
        """
        change_state = self._service_change_state.callback

        def guarded(request: Any, response: Any) -> Any:
            try:
                return change_state(request, response)
            except rclpy_implementation.RCLError as error:
                self.get_logger().warning(f"transition refused: {error}")
                response.success = False
                return response

        self._service_change_state.callback = guarded

    def _on_goal_rejected(self, reason: str) -> None:
        self._parts.metrics.count("goals_rejected")
        self._parts.metrics.last_rejection = reason
        self.get_logger().warning(f"goal rejected: {reason}")

    def _on_parameters_set(self, changed: list[Parameter]) -> None:
        self.parameters = Parameters.read(self)
        if self._parts is not None:
            self._parts.planner.parameters = self._parts.jobs.parameters = self.parameters
            self._parts.trigger.plan_on = self.parameters.plan_on

    def _every_second(self) -> None:
        parts, parameters = self._parts, self.parameters
        statuses = [engine_status(self.state, self._problem, parameters)]
        if parts is not None:
            parts.worker.expire()
            values = parts.metrics.values()
            has_actions = parts.runtime.config.action is not None
            statuses.append(
                input_status(parts.metrics, values, parts.odometry, parameters, self._active, has_actions)
            )
            statuses.append(plan_status(parts.metrics, values, parts.worker.waiting))
        for status in statuses:
            status.name = f"{self.get_fully_qualified_name()}: {status.name}"
        self._diagnostics.publish(make_array(self.get_clock().now().to_msg(), statuses))
