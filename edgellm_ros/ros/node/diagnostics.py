# SPDX-License-Identifier: Apache-2.0
"""/diagnostics: the state of the node, in the form that rqt and aggregators read."""

from __future__ import annotations

from collections.abc import Mapping

from diagnostic_msgs.msg import DiagnosticStatus
from sensor_msgs.msg import Image

from edgellm_ros.engine_directory.parts import VISUAL
from edgellm_ros.ros.diagnostic_status import FAULT, WARN, Problem, make_status, since
from edgellm_ros.ros.node.metrics import NodeMetrics, resident_memory
from edgellm_ros.ros.node.parts import Parts
from edgellm_ros.ros.node.sensors.input_time import Frame
from edgellm_ros.ros.node.settings.parameters import Parameters

INPUT_VALUES = (
    "image_rate",
    "odometry_rate",
    "joint_state_rate",
    "audio_rate",
    "frames_received",
    "frames_refused",
    "frames_dropped",
    "further_frames_received",
    "further_frames_refused",
    "odometry_refused",
    "joint_states_refused",
    "joint_states_incomplete",
    "audio_refused",
    "audio_gated",
    "barge_ins",
    "commands_refused",
    "utterances",
    "utterances_cut",
    "utterances_stale",
    "utterances_dropped",
    "utterances_skipped",
    "transcripts_obeyed",
    "transcripts_refused",
    "transcripts_failed",
)


def engine_status(state: str, problem: str, parameters: Parameters) -> DiagnosticStatus:
    """Report the lifecycle state, the engines and memory.

    `problem`: why the engines, or new adapters, are not loaded; empty if nothing is wrong.
    """
    values = {
        "state": state,
        "engine_dir": parameters.engine_dir,
        "device": parameters.device,
        "memory_resident": resident_memory(),
    }
    return make_status("engine", [(WARN, problem)] if problem else [], values)


def input_status(parts: Parts, values: Mapping[str, float], parameters: Parameters) -> DiagnosticStatus:
    """Report rates, ages and losses of the input topics.

    `values` are `parts.metrics.values()`.
    """
    metrics, odometry = parts.metrics, parts.odometry
    frame = parts.trigger.frame
    camera = parts.camera.find("" if frame is None else frame.message.header.frame_id, _size(frame))
    problems: list[Problem] = []
    if parts.active:
        if camera.problem:
            problems.append((WARN, camera.problem))
        if odometry.problem:
            problems.append((FAULT, odometry.problem))
        if parts.inputs.image_problem:
            problems.append((WARN, parts.inputs.image_problem))
        sees = not parts.runtime.parts.missing(VISUAL)
        if sees and metrics.frames.age > parameters.max_input_age:
            problems.append((WARN, f"no camera frame {since(metrics.frames.age)}"))
        problems += [
            (WARN, f"no frame of the camera {name} {since(seconds)}")
            for name, seconds in parts.cameras.ages().items()
            if seconds > parameters.max_input_age
        ]
        problems += parts.robot_state.problems()
        if parts.speech.problem:
            problems.append((WARN, f"~/audio: {parts.speech.problem}"))
        if parts.listener is not None and parts.listener.problem:
            problems.append((WARN, f"~/audio: {parts.listener.problem}"))
    shown: dict[str, object] = {name: values[name] for name in INPUT_VALUES if name in values}
    shown["image_age"], shown["odometry_age"] = metrics.frames.age, metrics.odometry.age
    shown["joint_state_age"], shown["audio_age"] = metrics.joint_states.age, metrics.sound.age
    shown["camera_intrinsics"], shown["camera_pose"] = camera.intrinsics_from, camera.pose_from
    return make_status("inputs", problems, shown)


def plan_status(metrics: NodeMetrics, values: Mapping[str, float]) -> DiagnosticStatus:
    """Report how plans ended, how long they took, and the latest error.

    `values` are `metrics.values()`.
    """
    problems = [(WARN, metrics.problem)] if metrics.problem else []
    shown: dict[str, object] = {name: value for name, value in values.items() if name not in INPUT_VALUES}
    return make_status("plans", problems, shown)


def _size(frame: Frame | None) -> tuple[int, int] | None:
    """Return width and height of a frame; None for a compressed one.

    A compressed frame is not decoded for this.
    """
    message = None if frame is None else frame.message
    return (message.width, message.height) if isinstance(message, Image) else None
