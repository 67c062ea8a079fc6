# SPDX-License-Identifier: Apache-2.0
"""The lifecycle node `edgellm`: topics, an action and services around one runtime.

    ~/audio --> SpeechInput --+
    ~/image ~/odom ~/command -+-> Inputs --+
                                           +--> PlanWorker (own threads) -> Planner --> Outputs, results
    ~/plan (action) --> PlanServer --------+

Configure loads the engines, activate opens the subscriptions, deactivate stops planning, cleanup frees the
engines. Callbacks only move messages; the planning threads ask the runtime. parts.py connects the parts.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from diagnostic_msgs.msg import DiagnosticArray
from rcl_interfaces.msg import SetParametersResult
from rclpy.clock import Clock, ClockType
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.parameter import Parameter
from rclpy.qos import QoSProfile

from edgellm_ros.echo import printable
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine_directory.parts import AUDIO
from edgellm_ros.hearing.transcriber import Transcriber
from edgellm_ros.multimodal.audio.voice_activity import VoiceActivity
from edgellm_ros.ros.diagnostic_status import make_array
from edgellm_ros.ros.lifecycle import logged, refuse_impossible_transitions, state_name
from edgellm_ros.ros.messaging import check_qos_overrides, overridable
from edgellm_ros.ros.node.diagnostics import engine_status, input_status, plan_status
from edgellm_ros.ros.node.engine_checks import engine_problem
from edgellm_ros.ros.node.parameter_checks import check_parameters, declare_parameters
from edgellm_ros.ros.node.parts import Parts
from edgellm_ros.ros.node.plan_server import PlanServer
from edgellm_ros.ros.node.runtime_opening import close_runtime, open_runtime, open_transcriber
from edgellm_ros.ros.node.settings.live_parameters import LiveParameters
from edgellm_ros.ros.node.settings.parameters import Parameters
from edgellm_ros.ros.node.speech_input import audio_type
from edgellm_ros.ros.node.speech_output import open_robots_voice
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime

STOP_TIMEOUT_S = 5.0  # for running plans to end at their next tokens
NOT_CONFIGURED = "not configured"


class EdgeLLMNode(LifecycleNode):
    """The node; docs/ros_interfaces.md lists its interfaces and parameters."""

    def __init__(self, **kwargs: Any) -> None:
        """Declare the parameters and start /diagnostics; `kwargs` are for LifecycleNode."""
        super().__init__("edgellm", **kwargs)
        self._parts: Parts | None = None
        self._transcriber: Transcriber | None = None
        self._problem = NOT_CONFIGURED
        self._live_parameters = LiveParameters(declare_parameters(self))
        self._plan_server = PlanServer(self, self._live_parameters)
        check_qos_overrides(self)
        self.add_on_set_parameters_callback(self._before_parameters_set)
        self.add_post_set_parameters_callback(self._on_parameters_set)
        refuse_impossible_transitions(self)
        self._diagnostics = self.create_publisher(
            DiagnosticArray, "/diagnostics", **overridable(QoSProfile(depth=10))
        )
        # Not the node's clock: diagnostics are published while simulated time is paused, too.
        self.create_timer(1.0, self._every_second, clock=Clock(clock_type=ClockType.STEADY_TIME))

    @property
    def parameters(self) -> Parameters:
        return self._live_parameters.current

    @property
    def state(self) -> str:
        """The name of the lifecycle state."""
        return state_name(self)

    @property
    def goals_in_progress(self) -> int:
        """Number of goals without a result."""
        return self._plan_server.in_progress

    @property
    def since_last_goal(self) -> float:
        """Seconds since a goal ended; infinite if none has."""
        return self._plan_server.since_last_end

    # Lifecycle

    @logged
    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Load the engines and make topics, services and the action."""
        parameters = self.parameters
        try:
            parameters.check_serving()
        except (ImportError, OSError, ValueError) as error:
            return self._refuse(f"cannot serve OpenAI's API: {error}")
        try:
            audio_type(parameters.audio_transport)  # ValueError if its package is not installed
            robots_voice = open_robots_voice(parameters)
            with ExitStack() as undo:
                runtime = self.open_runtime()
                undo.callback(runtime.close)
                self._transcriber = self.open_transcriber()
                if self._transcriber is not None:
                    undo.callback(self._transcriber.close)
                hears = self._transcriber is not None or not runtime.parts.missing(AUDIO)
                voice = VoiceActivity() if hears else None
                undo.pop_all()
        except (OSError, ValueError, EngineError) as error:
            return self._refuse(f"cannot load the engines: {error}")
        try:
            self._parts = Parts(
                self,
                runtime,
                voice,
                self._live_parameters,
                self._plan_server,
                transcriber=self._transcriber,
                robots_voice=robots_voice,
            )
        except BaseException:
            runtime.close()
            self._close_transcriber()
            raise
        self._problem = ""
        self.get_logger().info(f"engines of {printable(parameters.engine_dir)} loaded on {parameters.device}")
        return super().on_configure(state)

    @logged
    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Open the subscriptions and accept goals, and OpenAI's API if it is wanted."""
        try:
            self._parts.activate()
        except OSError as error:
            return self._refuse(f"cannot serve OpenAI's API: parameter serve_port: {error.strerror or error}")
        self._problem = ""
        if self._parts.endpoint is not None:
            self.get_logger().info(f"OpenAI's API: {self._parts.endpoint.url}")
        return super().on_activate(state)

    @logged
    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Stop planning; end goals as preempted, drop commands and old input."""
        self.stop_planning("the node was deactivated")
        return super().on_deactivate(state)

    @logged
    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Free the engines and remove topics and services.

        The action remains, so that clients can still get results.
        """
        self._release()
        return super().on_cleanup(state)

    @logged
    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Free the engines from any state.

        The action remains, so that clients can still get results.
        """
        self.stop_planning("the node shuts down")
        if self._parts is not None:
            self._parts.worker.close()
            self._parts.close_endpoint()
            self._parts.close_speech()
            self._parts.outputs.end()
            self.close_runtime(self._parts.runtime)
            self._close_transcriber()
        return super().on_shutdown(state)

    @logged
    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Free everything after a failed transition; the next state is unconfigured."""
        self.stop_planning("the node failed")
        self._release()
        return super().on_error(state)

    def destroy_node(self) -> None:
        """Free everything and leave ROS."""
        self._release()
        self._plan_server.destroy()
        super().destroy_node()

    def _refuse(self, problem: str) -> TransitionCallbackReturn:
        """Stay in the present state of the lifecycle, and report why."""
        self._problem = problem
        self.get_logger().error(problem)
        return TransitionCallbackReturn.FAILURE

    def stop_planning(self, message: str) -> None:
        """End running and waiting plans as preempted, and accept no more."""
        if self._parts is not None and not self._parts.stop(message, STOP_TIMEOUT_S):
            self.get_logger().warning(f"a running plan did not end within {STOP_TIMEOUT_S:g} s")

    def _release(self) -> None:
        parts, self._parts = self._parts, None
        self._problem = NOT_CONFIGURED
        if parts is not None:
            parts.destroy()
            self.close_runtime(parts.runtime)
            self._close_transcriber()

    def open_runtime(self) -> LLMInferenceRuntime:
        """Open the runtime according to the parameters."""
        return open_runtime(self.parameters, self.get_logger())

    def close_runtime(self, runtime: LLMInferenceRuntime) -> None:
        """Close the runtime that `open_runtime` has opened; may be called twice."""
        close_runtime(runtime, self.parameters, self.get_logger())

    def open_transcriber(self) -> Transcriber | None:
        """Open the speech engine according to the parameters; None without one."""
        return open_transcriber(self.parameters)

    def _close_transcriber(self) -> None:
        transcriber, self._transcriber = self._transcriber, None
        if transcriber is not None:
            transcriber.close()

    # Parameters

    def _before_parameters_set(self, changes: list[Parameter]) -> SetParametersResult:
        result = check_parameters(changes, self.parameters, configured=self._parts is not None)
        loras = [change.value for change in changes if change.name == "loras"]
        if result.successful and self._parts is not None:
            try:
                if loras:
                    self._parts.loras.check(loras[-1])
            except (ValueError, EngineError) as error:
                return SetParametersResult(successful=False, reason=str(error))
            for change in changes:
                problem = engine_problem(change.name, change.value, self._parts.runtime)
                if problem:
                    return SetParametersResult(successful=False, reason=problem)
        return result

    def _on_parameters_set(self, changed: list[Parameter]) -> None:
        self._live_parameters.update(Parameters.read(self))
        if self._parts is not None and any(parameter.name == "loras" for parameter in changed):
            self._parts.loras.submit(self.parameters.loras)

    # Diagnostics

    def _every_second(self) -> None:
        parts, parameters = self._parts, self.parameters
        problem = self._problem or ("" if parts is None else parts.loras.problem)
        statuses = [engine_status(self.state, problem, parameters)]
        if parts is not None:
            parts.worker.expire()
            parts.clients.look()
            values = parts.metrics.values()
            statuses.append(input_status(parts, values, parameters))
            statuses.append(plan_status(parts.metrics, values))
        for status in statuses:
            status.name = f"{self.get_fully_qualified_name()}: {status.name}"
        self._diagnostics.publish(make_array(self.get_clock().now().to_msg(), statuses))
