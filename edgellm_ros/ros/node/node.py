# SPDX-License-Identifier: Apache-2.0
"""The lifecycle node `edgellm`: topics, an action and services around one runtime.

    ~/audio --> Hearing --+
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
from pathlib import Path
from typing import Any

from diagnostic_msgs.msg import DiagnosticArray
from rcl_interfaces.msg import SetParametersResult
from rclpy.clock import Clock, ClockType
from rclpy.impl.implementation_singleton import rclpy_implementation
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.parameter import Parameter

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.multimodal.voice_activity import VoiceActivity
from edgellm_ros.ros.node.command_trigger import CommandTrigger
from edgellm_ros.ros.node.diagnostics import engine_status, input_status, make_array, plan_status
from edgellm_ros.ros.node.inputs import Inputs
from edgellm_ros.ros.node.jobs import JobFactory
from edgellm_ros.ros.node.loras import change_loras, parse_loras
from edgellm_ros.ros.node.metrics import NodeMetrics
from edgellm_ros.ros.node.odometry import OdometryBuffer
from edgellm_ros.ros.node.outputs import Outputs
from edgellm_ros.ros.node.parameters import Parameters, check_parameters, declare_parameters
from edgellm_ros.ros.node.plan_server import PlanServer
from edgellm_ros.ros.node.planner import Planner
from edgellm_ros.ros.node.services import Services
from edgellm_ros.ros.node.speech_input import Hearing, audio_type
from edgellm_ros.ros.node.worker import PREEMPTED, Outcome, PlanWorker
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
    hearing: Hearing
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
        self.add_on_set_parameters_callback(self._before_parameters_set)
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
            audio_type(parameters.audio_transport)  # is it installed?
            runtime = _open_runtime(parameters, self.get_logger().warning)
            voice = VoiceActivity() if runtime.config.audio is not None else None
        except (OSError, ValueError, EngineError) as error:
            self._problem = f"cannot load the engines: {error}"
            self.get_logger().error(self._problem)
            return TransitionCallbackReturn.FAILURE
        self._parts = self._make_parts(runtime, voice, parameters)
        self._problem = ""
        self.get_logger().info(f"engines of {parameters.engine_dir} loaded on {parameters.device}")
        return super().on_configure(state)

    @_logged
    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Open the subscriptions and accept goals."""
        self._parts.inputs.open(self.parameters)
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
            self._close_runtime(self._parts.runtime)
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

    def _make_parts(
        self, runtime: LLMInferenceRuntime, voice: VoiceActivity | None, parameters: Parameters
    ) -> Parts:
        log = self.get_logger()
        metrics, odometry, trigger = NodeMetrics(), OdometryBuffer(), CommandTrigger(parameters.plan_on)
        planner = Planner(runtime, odometry, parameters, self.get_clock(), lambda: trigger.frame, log.error)
        worker = PlanWorker(planner.plan, parameters.queue_size)
        outputs = Outputs(self, metrics)
        services = Services(self, runtime, metrics, worker, lambda: self.parameters.plan_timeout)
        jobs = JobFactory(worker, outputs, metrics, parameters, log)
        hearing = Hearing(voice, parameters, metrics, self.get_clock(), outputs.hear, log)
        inputs = Inputs(self, worker, odometry, trigger, metrics, hearing, jobs.from_command)
        metrics.gauges = {
            "utterances_dropped": lambda: hearing.dropped,
            "jobs_pending": lambda: worker.pending,
            "inputs_connected": lambda: inputs.connected,
            "outputs_connected": lambda: outputs.connected,
            "clock": lambda: self.get_clock().now().nanoseconds * 1e-9,
        }
        server = PlanServer(self, worker, lambda: self._active, jobs.from_goal, self._on_goal_refused)
        return Parts(
            runtime,
            metrics,
            odometry,
            trigger,
            planner,
            worker,
            outputs,
            services,
            jobs,
            hearing,
            inputs,
            server,
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
        self._close_runtime(parts.runtime)

    def _close_runtime(self, runtime: LLMInferenceRuntime) -> None:
        path = self.parameters.prefix_cache_file
        try:
            if path and not runtime.closed:
                runtime.save_prefix_cache(path)
        except (OSError, EngineError) as error:
            self.get_logger().error(f"the prompts are not kept (parameter prefix_cache_file): {error}")
        finally:
            runtime.close()

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

    def _on_goal_refused(self, refusal: Outcome) -> None:
        self._parts.metrics.plan_done(refusal)
        self.get_logger().warning(f"goal refused: {refusal.message}")

    def _before_parameters_set(self, changes: list[Parameter]) -> SetParametersResult:
        result = check_parameters(changes, self._parts is None)
        loras = [change.value for change in changes if change.name == "loras"]
        if result.successful and loras and self._parts is not None:
            try:
                runtime, before = self._parts.runtime, self.parameters.loras
                change_loras(runtime, parse_loras(before), parse_loras(loras[-1]))
            except (OSError, ValueError, EngineError) as error:
                return SetParametersResult(successful=False, reason=str(error))
        return result

    def _on_parameters_set(self, changed: list[Parameter]) -> None:
        self.parameters = Parameters.read(self)
        if self._parts is not None:
            parts = self._parts
            parts.planner.parameters = parts.jobs.parameters = parts.hearing.parameters = self.parameters
            parts.trigger.plan_on = self.parameters.plan_on

    def _every_second(self) -> None:
        parts, parameters = self._parts, self.parameters
        statuses = [engine_status(self.state, self._problem, parameters)]
        if parts is not None:
            parts.worker.expire()
            values = parts.metrics.values()
            has_actions = parts.runtime.config.action is not None
            sensors = (parts.metrics, values, parts.odometry, parts.hearing)
            statuses.append(input_status(*sensors, parameters, self._active, has_actions))
            statuses.append(plan_status(parts.metrics, values, parts.worker.waiting))
        for status in statuses:
            status.name = f"{self.get_fully_qualified_name()}: {status.name}"
        self._diagnostics.publish(make_array(self.get_clock().now().to_msg(), statuses))


def _open_runtime(parameters: Parameters, warn: Callable[[str], Any]) -> LLMInferenceRuntime:
    """The engines and adapters that the parameters name. OSError, ValueError or EngineError.

    Prompts from an earlier run that cannot be used are no error: they are computed anew.
    """
    size = parameters.prefix_cache_mb
    runtime = LLMInferenceRuntime(
        parameters.engine_dir, parameters.device, prefix_cache_bytes=None if size < 0 else size * 1_000_000
    )
    path = parameters.prefix_cache_file
    try:
        if path and Path(path).is_file():
            runtime.load_prefix_cache(path)
    except (OSError, ValueError) as error:
        warn(f"prompts of an earlier run are not used (parameter prefix_cache_file): {error}")
    try:
        for name, directory in parse_loras(parameters.loras).items():
            runtime.add_lora(name, directory)
        runtime.switch_lora_weights(parameters.lora)
        runtime.set_action_noise_seed(parameters.noise_seed)
        runtime.capture_decoding_cuda_graph()
    except BaseException:
        runtime.close()
        raise
    return runtime
