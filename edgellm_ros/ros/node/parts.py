# SPDX-License-Identifier: Apache-2.0
"""The parts of a configured node and their connections."""

from __future__ import annotations

from contextlib import ExitStack

from rclpy.lifecycle import LifecycleNode

from edgellm_ros.multimodal.voice_activity import VoiceActivity
from edgellm_ros.ros.camera_topic import camera_names
from edgellm_ros.ros.node.camera_source import CameraSource
from edgellm_ros.ros.node.cameras import Cameras
from edgellm_ros.ros.node.chunking import Chunking
from edgellm_ros.ros.node.command_trigger import CommandTrigger
from edgellm_ros.ros.node.frame_history import FrameHistory
from edgellm_ros.ros.node.inputs import Inputs
from edgellm_ros.ros.node.jobs import JobFactory
from edgellm_ros.ros.node.joint_states import JointStates, state_joints
from edgellm_ros.ros.node.live_parameters import LiveParameters
from edgellm_ros.ros.node.lora_changes import LoraChanges
from edgellm_ros.ros.node.metrics import NodeMetrics
from edgellm_ros.ros.node.odometry import OdometryBuffer
from edgellm_ros.ros.node.outputs import Outputs
from edgellm_ros.ros.node.plan_inputs import PlanInputs
from edgellm_ros.ros.node.plan_server import PlanServer
from edgellm_ros.ros.node.planner import Planner
from edgellm_ros.ros.node.services import Services
from edgellm_ros.ros.node.speech_input import SpeechInput
from edgellm_ros.ros.node.worker import PREEMPTED, PlanWorker
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime


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
    ) -> None:
        """Make topics, services and the action, and start the planning thread.

        `voice` is None for an engine without audio encoder. After an exception the thread has ended.
        """
        self.runtime = runtime
        config, start = runtime.config, parameters.current
        # State that callbacks fill and the planning thread reads
        self.metrics = NodeMetrics()
        self.odometry = OdometryBuffer()
        self.trigger = CommandTrigger(start.plan_on)
        self.frames = FrameHistory(start.frames_per_plan)
        self.cameras = Cameras(camera_names(start.cameras, config.policy))
        self.joints = JointStates(state_joints(start.state_joints, config.policy))
        # Planning
        self.chunking = Chunking(node, parameters, config.action, self.metrics)
        observed = PlanInputs(
            node,
            parameters,
            config,
            self.trigger,
            self.frames,
            self.cameras,
            self.odometry,
            self.joints,
        )
        self.planner = Planner(node, parameters, runtime, observed, self.chunking)
        with ExitStack() as undo:  # if a part cannot be made: the thread would keep the process alive
            self.worker = PlanWorker(self.planner.plan, start.queue_size)
            undo.callback(self.worker.close)
            self.camera = CameraSource(node, parameters)
            self.outputs = Outputs(node, parameters, self.camera, self.metrics)
            undo.callback(self.outputs.destroy)
            self.jobs = JobFactory(
                node,
                parameters,
                self.worker,
                self.outputs,
                self.metrics,
                self.frames,
                self.cameras,
                self.chunking,
            )
            self.loras = LoraChanges(node, parameters, runtime, self.worker)
            undo.callback(self.loras.destroy)
            # Sources of requests
            self.speech = SpeechInput(node, parameters, voice, self.outputs, self.metrics)
            self.inputs = Inputs(
                node,
                parameters,
                self.worker,
                self.jobs,
                self.odometry,
                self.trigger,
                self.frames,
                self.cameras,
                self.joints,
                self.speech,
                self.metrics,
            )
            self.services = Services(node, parameters, runtime, self.worker, self.loras, self.metrics)
            undo.callback(self.services.destroy)
            self.plan_server = PlanServer(node, parameters, self.worker, self.jobs, self.metrics)
            undo.pop_all()
        self.metrics.gauges = {
            "utterances_dropped": lambda: self.speech.dropped,
            "jobs_pending": lambda: self.worker.pending,
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
        """Open the subscriptions and accept goals."""
        self.chunking.clear()
        self.camera.open()
        self.inputs.open()
        self.plan_server.accepts = True

    def stop(self, message: str, timeout_s: float) -> bool:
        """End running and waiting plans as preempted, and accept no more.

        False if the running plan did not end within `timeout_s`; it still ends at its next token.
        """
        self.plan_server.accepts = False
        self.inputs.close()
        ended = self.worker.stop_all(PREEMPTED, message, timeout_s)
        self.camera.close()
        self.outputs.clear_markers()
        return ended

    def destroy(self) -> None:
        """End the planning thread and remove topics, services and the action.

        The runtime remains open.
        """
        self.worker.close()
        self.loras.destroy()
        self.plan_server.destroy()
        self.services.destroy()
        self.outputs.destroy()
