# SPDX-License-Identifier: Apache-2.0
"""The parts of a configured node and their connections."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from rclpy.lifecycle import LifecycleNode

from edgellm_ros.engine_directory.parts import AUDIO, VISUAL
from edgellm_ros.hearing.transcriber import Transcriber
from edgellm_ros.multimodal.audio.voice_activity import VoiceActivity
from edgellm_ros.ros.camera_topic import camera_names
from edgellm_ros.ros.node.camera.camera_source import CameraSource
from edgellm_ros.ros.node.engine_checks import plans_at_once
from edgellm_ros.ros.node.inputs import Inputs
from edgellm_ros.ros.node.listener import Listener
from edgellm_ros.ros.node.metrics import NodeMetrics
from edgellm_ros.ros.node.outputs.outputs import Outputs
from edgellm_ros.ros.node.plan_server import PlanServer
from edgellm_ros.ros.node.planning.chunking import Chunking
from edgellm_ros.ros.node.planning.command_trigger import CommandTrigger
from edgellm_ros.ros.node.planning.jobs import JobFactory
from edgellm_ros.ros.node.planning.lora_changes import LoraChanges
from edgellm_ros.ros.node.planning.plan_inputs import PlanInputs
from edgellm_ros.ros.node.planning.planner import Planner
from edgellm_ros.ros.node.planning.robot_state import robot_state
from edgellm_ros.ros.node.sensors.cameras import Cameras
from edgellm_ros.ros.node.sensors.frame_history import FrameHistory
from edgellm_ros.ros.node.sensors.joint_states import JointStates, state_joints
from edgellm_ros.ros.node.sensors.odometry import OdometryBuffer
from edgellm_ros.ros.node.services import Services
from edgellm_ros.ros.node.settings.live_parameters import LiveParameters
from edgellm_ros.ros.node.speech_input import SpeechInput
from edgellm_ros.ros.node.speech_output import SpeechOutput
from edgellm_ros.ros.node.worker.clients import Clients
from edgellm_ros.ros.node.worker.job import DRIVING, GOALS, PREEMPTED
from edgellm_ros.ros.node.worker.worker import PlanWorker
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.voice.voice import Voice

if TYPE_CHECKING:
    from edgellm_ros.ros.node.openai_endpoint import OpenAIEndpoint


class Parts:
    """Everything that exists from configure to cleanup.

    Each part refers only to parts made before it.
    """

    def __init__(
        self,
        node: LifecycleNode,
        runtime: LLMInferenceRuntime,
        voice: VoiceActivity | None,
        parameters: LiveParameters,
        plan_server: PlanServer,
        *,
        transcriber: Transcriber | None,
        robots_voice: Voice | None,
    ) -> None:
        """Make topics and services, open the action, and start the planning threads.

        `voice` is None if nothing hears: no speech engine, and the audio encoder is missing or left out.
        `robots_voice` is None if the robot is silent. After an exception the threads have ended.
        """
        self.runtime = runtime
        config, start = runtime.config, parameters.current
        # State that callbacks fill and the planning threads read
        self.metrics = NodeMetrics()
        self.odometry = OdometryBuffer()
        self.trigger = CommandTrigger(start.plan_on, needs_frame=not runtime.parts.missing(VISUAL))
        self.frames = FrameHistory(start.frames_per_plan)
        earlier = config.policy.earlier_observations if config.policy is not None else ()
        self.cameras = Cameras(camera_names(start.cameras, config.policy), earlier)
        self.joints = JointStates(state_joints(start.state_joints, config.policy))
        self.robot_state = robot_state(
            node,
            parameters,
            config,
            odometry=self.odometry,
            joints=self.joints,
            metrics=self.metrics,
        )
        # Planning
        self.chunking = Chunking(node, parameters, config.action, self.metrics)
        observed = PlanInputs(
            node,
            parameters,
            parts=runtime.parts,
            trigger=self.trigger,
            history=self.frames,
            cameras=self.cameras,
            robot=self.robot_state,
        )
        self.planner = Planner(node, parameters, runtime, observed, self.chunking)
        with ExitStack() as undo:  # if a part cannot be made: the thread would keep the process alive
            self.worker = self._make_worker(parameters)
            undo.callback(self.worker.close)
            self.camera = CameraSource(node, parameters)
            self.outputs = Outputs(node, parameters, self.camera, self.metrics)
            undo.callback(self.outputs.destroy)
            self._make_speech(node, parameters, transcriber, robots_voice, hears=voice is not None)
            undo.callback(self.close_speech)
            self.jobs = JobFactory(
                node,
                parameters,
                worker=self.worker,
                outputs=self.outputs,
                speech=self.speech_output,
                metrics=self.metrics,
                frames=self.frames,
                cameras=self.cameras,
                chunking=self.chunking,
            )
            self.loras = LoraChanges(node, parameters, runtime, self.worker)
            undo.callback(self.loras.destroy)
            self._make_sources(node, parameters, voice)
            self.endpoint = self._make_endpoint(parameters)
            undo.callback(self.close_endpoint)
            self.services = self._make_services(node, parameters)
            undo.callback(self.services.destroy)
            self.plan_server = plan_server
            self.clients = Clients(node, self.worker)
            plan_server.open(self.worker, self.jobs, self.metrics, self.clients)
            undo.pop_all()
        self.metrics.gauges = self._gauges(node)
        if self.endpoint is not None:
            self.metrics.others = self.endpoint.values

    def _make_worker(self, parameters: LiveParameters) -> PlanWorker:
        start = parameters.current
        return PlanWorker(
            self.planner.plan,
            start.queue_size,
            lambda: parameters.current.driving_plans_per_goal,
            plans_at_once(start.max_concurrent_plans, self.runtime.config, self.runtime.rows),
        )

    def _make_speech(
        self,
        node: LifecycleNode,
        parameters: LiveParameters,
        transcriber: Transcriber | None,
        robots_voice: Voice | None,
        hears: bool,
    ) -> None:
        """Make the robot's voice, and the thread of the speech engine, if there is one."""
        self.speech_output = SpeechOutput(
            node, parameters, robots_voice, outputs=self.outputs, metrics=self.metrics, hears=hears
        )
        self.listener: Listener | None = None
        if transcriber is not None:
            self.listener = Listener(node, parameters, transcriber, self.outputs, self.metrics)

    def close_speech(self) -> None:
        """End the threads of the robot's voice and of the speech engine.

        May be called twice.
        """
        if self.listener is not None:
            self.listener.close()
        self.speech_output.close()

    def _make_services(self, node: LifecycleNode, parameters: LiveParameters) -> Services:
        endpoint = self.endpoint
        return Services(
            node,
            parameters,
            self.runtime,
            self.worker,
            self.loras,
            self.metrics,
            api_is_busy=lambda: endpoint is not None and endpoint.is_busy,
        )

    def close_endpoint(self) -> None:
        """End the threads of OpenAI's endpoint, if there is one.

        May be called twice.
        """
        if self.endpoint is not None:
            self.endpoint.destroy()

    def _make_endpoint(self, parameters: LiveParameters) -> OpenAIEndpoint | None:
        if not parameters.current.serve_port:
            return None
        from edgellm_ros.ros.node.openai_endpoint import OpenAIEndpoint  # needs packages of its own

        return OpenAIEndpoint(self.runtime, parameters)

    def _make_sources(
        self, node: LifecycleNode, parameters: LiveParameters, voice: VoiceActivity | None
    ) -> None:
        """Make the sources of requests: speech, and the subscriptions."""
        missing = self.runtime.parts.missing
        self.speech = SpeechInput(
            node,
            parameters,
            voice,
            self.outputs,
            self.metrics,
            missing=missing(AUDIO),
            listener=self.listener,
            robot=self.speech_output,
        )
        self.inputs = Inputs(
            node,
            parameters,
            worker=self.worker,
            jobs=self.jobs,
            odometry=self.odometry,
            trigger=self.trigger,
            frames=self.frames,
            cameras=self.cameras,
            joints=self.joints,
            speech=self.speech,
            metrics=self.metrics,
            blind=missing(VISUAL),
            listener=self.listener,
        )

    def _gauges(self, node: LifecycleNode) -> dict[str, Callable[[], float]]:
        """Return what the metrics read when they are published."""
        return {
            "utterances_dropped": lambda: self.speech.dropped,
            # A job that ends hands its plan to the outputs first, so none is missed in this order:
            "jobs_pending": lambda: self.worker.pending + self.outputs.pending,
            "goals_waiting": lambda: self.worker.waiting,
            "goals_orphaned": lambda: self.worker.orphaned,
            "goals_running": lambda: self.worker.running(GOALS),
            "driving_running": lambda: self.worker.running(DRIVING),
            "driving_started": lambda: self.worker.started(DRIVING),
            "goals_started": lambda: self.worker.started(GOALS),
            "speaking": lambda: self.speech_output.speaking,
            "echo_gain": lambda: self.speech_output.echo_gain,
            "chunk_delay": lambda: self.chunking.delay,
            "inputs_connected": lambda: self.inputs.connected,
            "outputs_connected": lambda: self.outputs.connected,
            "clock": lambda: node.get_clock().now().nanoseconds * 1e-9,
        }

    @property
    def active(self) -> bool:
        """Whether topics and goals are planned."""
        return self.plan_server.accepts

    def activate(self) -> None:
        """Open OpenAI's endpoint, then the subscriptions, and accept goals.

        OSError if the endpoint's port cannot be used: then nothing is open.
        """
        if self.endpoint is not None:
            self.endpoint.open()
        self.chunking.clear()
        self.camera.open()
        self.inputs.open()
        self.plan_server.accepts = True

    def stop(self, message: str, timeout_s: float) -> bool:
        """End running and waiting plans as preempted, and accept no more.

        False if a running plan did not end within `timeout_s`; it still ends at its next token.
        """
        self.plan_server.accepts = False
        self.inputs.close()
        ended = self.worker.stop_all(PREEMPTED, message, timeout_s)
        if self.endpoint is not None:
            self.endpoint.close()
        self.speech_output.stop()
        self.outputs.flush()
        self.camera.close()
        self.outputs.clear_markers()
        return ended

    def destroy(self) -> None:
        """End the planning threads and remove topics and services.

        The runtime remains open, and so does the action for those who want a result.
        """
        self.worker.close()
        self.close_endpoint()
        self.loras.destroy()
        self.plan_server.close()
        self.services.destroy()
        self.close_speech()
        self.outputs.destroy()
