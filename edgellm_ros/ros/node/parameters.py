# SPDX-License-Identifier: Apache-2.0
"""The node's parameters: a table that declares and bounds them, and a snapshot that the code reads."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor, SetParametersResult
from rclpy.node import Node
from rclpy.parameter import Parameter

from edgellm_ros.multimodal.pcm import ENCODINGS, PcmFormat
from edgellm_ros.multimodal.sound import MAX_SAMPLE_RATE, MIN_SAMPLE_RATE
from edgellm_ros.multimodal.utterance import UtteranceSettings
from edgellm_ros.ros.node.loras import parse_loras
from edgellm_ros.ros.node.overlay import OverlayCamera

MAX_INT = 2**63 - 1
GROUPS = {"camera": OverlayCamera, "audio_data": PcmFormat, "utterance": UtteranceSettings}


@dataclass(frozen=True)
class Spec:
    """One parameter. `fixed`: can be set while the node is unconfigured; `read_only`: only at start."""

    default: bool | int | float | str | list[str]
    description: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    fixed: bool = False
    read_only: bool = False


SPECS: dict[str, Spec] = {
    "engine_dir": Spec("", "Engine directory made by `edgellm export`.", fixed=True),
    "device": Spec("cpu", "Where the engines run.", choices=("cpu", "cuda", "tensorrt"), fixed=True),
    "autostart": Spec(False, "Configure and activate at start, without a lifecycle manager.", read_only=True),
    "loras": Spec(
        [""],
        "LoRA adapters as NAME=DIR, beside those in engine_dir/lora. What is new in the list is loaded, what "
        "is no longer in it removed.",
    ),
    "lora": Spec(
        "", "Adapter active at start; ~/switch_lora changes it later. Empty or base = base model.", fixed=True
    ),
    "frame_id": Spec("base_link", "Frame of action chunks and paths: the robot's base."),
    "image_transport": Spec(
        "raw",
        "Type of ~/image: sensor_msgs/Image or sensor_msgs/CompressedImage.",
        choices=("raw", "compressed"),
        fixed=True,
    ),
    "audio_transport": Spec(
        "chunk",
        "Type of ~/audio: edgellm_ros/AudioChunk, or audio_common_msgs/AudioData or AudioDataStamped, "
        "which do not say how their bytes are to be read: the parameters audio_data.* do.",
        choices=("chunk", "audio_data", "audio_data_stamped"),
        fixed=True,
    ),
    "audio_data.encoding": Spec("S16LE", "Samples of audio_common_msgs.", choices=tuple(ENCODINGS)),
    "audio_data.sample_rate": Spec(
        16000, "Sample rate of audio_common_msgs, in Hz.", MIN_SAMPLE_RATE, MAX_SAMPLE_RATE
    ),
    "audio_data.channels": Spec(1, "Channels of audio_common_msgs: mono or stereo.", 1, 2),
    "input_reliability": Spec(
        "best_effort",
        "QoS of the input topics. best_effort: as sensors send, a message may be lost. reliable: none is; "
        "needs publishers that are reliable too.",
        choices=("best_effort", "reliable"),
        fixed=True,
    ),
    "plan_on": Spec(
        "command",
        "command: each ~/command is planned once, with the newest frame. image: while a command stands, "
        "every new frame is planned on; an empty command ends that.",
        choices=("command", "image"),
    ),
    "queue_size": Spec(
        4, "Goals that may wait while another runs; further ones end in an error.", 0, 1000, fixed=True
    ),
    "plan_timeout": Spec(
        10.0, "Longest time from the arrival of a request to its result, in seconds.", 0.01, 3600.0
    ),
    "max_input_age": Spec(1.0, "Frames and odometry older than this are refused, in seconds.", 0.01, 3600.0),
    "odom_wait": Spec(
        0.05, "How long a plan waits for odometry that reaches its frame, in seconds.", 0.0, 10.0
    ),
    "prefix_cache_mb": Spec(
        -1,
        "Memory for beginnings of prompts that come again, in MB; 0 = none, -1 = as much as the KV cache.",
        -1,
        1_000_000,
        fixed=True,
    ),
    "prefix_cache_file": Spec(
        "", "Where these are kept from one run to the next, read at configure; empty = nowhere.", fixed=True
    ),
    "system_prompt": Spec("", "System prompt of requests that bring none."),
    "action_samples": Spec(1, "Trajectories per command; 0 = words only.", 0, 1024),
    "denoise_steps": Spec(0, "Euler steps of the action head; 0 = the checkpoint's own number.", 0, 1000),
    "noise_seed": Spec(
        0, "Action noise at start; ~/set_noise_seed changes it later.", 0, MAX_INT, fixed=True
    ),
    "seed": Spec(0, "Token sampling of requests that bring no seed.", 0, MAX_INT),
    "max_tokens": Spec(96, "Longest answer of requests that bring no limit, in tokens.", 1, 2**31 - 1),
    "temperature": Spec(0.0, "Sampling for commands; 0 = greedy.", 0.0, 100.0),
    "top_p": Spec(1.0, "Sampling for commands; 1 = off.", 0.0, 1.0),
    "top_k": Spec(0, "Sampling for commands; 0 = off.", 0, 2**31 - 1),
    "min_p": Spec(0.0, "Sampling for commands; 0 = off.", 0.0, 1.0),
    "repetition_penalty": Spec(1.0, "Sampling for commands; 1 = off.", 0.01, 100.0),
    "utterance.threshold": Spec(
        0.35, "Probability from which 32 ms of sound are speech; lower hears more, noise too.", 0.05, 0.95
    ),
    "utterance.pre_roll": Spec(
        0.3, "Sound kept before the first speech of an utterance and behind the last, in seconds.", 0.0, 0.5
    ),
    "utterance.hang_over": Spec(0.8, "Silence that ends an utterance, in seconds.", 0.1, 5.0),
    "utterance.min_speech": Spec(
        0.16, "With less speech than this, in seconds, it was a noise and no utterance.", 0.0, 2.0
    ),
    "utterance.max_length": Spec(
        10.0,
        "An utterance is ended after so many seconds; what follows is skipped up to the next silence.",
        1.0,
        60.0,
    ),
    "camera.fx": Spec(160.0, "Focal length of the camera on the overlay, in pixels.", 1.0, 1e6),
    "camera.fy": Spec(160.0, "Focal length, vertically, in pixels.", 1.0, 1e6),
    "camera.cx": Spec(160.0, "Principal point, in pixels from the left.", -1e6, 1e6),
    "camera.cy": Spec(112.0, "Principal point, in pixels from the top.", -1e6, 1e6),
    "camera.height": Spec(0.5, "Height of the camera above the floor, in metres.", 0.0, 1e3),
    "camera.x": Spec(-0.1, "Position of the camera ahead of the base frame's origin, in metres.", -1e3, 1e3),
    "camera.pitch": Spec(0.349, "How far the camera looks down, in radians.", -math.pi / 2, math.pi / 2),
}


@dataclass(frozen=True)
class Parameters:
    """The values, under the parameters' names; a group's (`camera.*` and so on) are one object."""

    engine_dir: str
    device: str
    autostart: bool
    loras: list[str]
    lora: str
    frame_id: str
    image_transport: str
    audio_transport: str
    input_reliability: str
    plan_on: str
    queue_size: int
    plan_timeout: float
    max_input_age: float
    odom_wait: float
    prefix_cache_mb: int
    prefix_cache_file: str
    system_prompt: str
    action_samples: int
    denoise_steps: int
    noise_seed: int
    seed: int
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    camera: OverlayCamera
    audio_data: PcmFormat
    utterance: UtteranceSettings

    @classmethod
    def read(cls, node: Node) -> Parameters:
        """What the node's parameters are now."""
        values = {name: node.get_parameter(name).value for name in SPECS}
        groups = {
            group: kind(**{field.name: values[f"{group}.{field.name}"] for field in fields(kind)})
            for group, kind in GROUPS.items()
        }
        return cls(**groups, **{name: value for name, value in values.items() if "." not in name})


def declare_parameters(node: Node) -> None:
    """Declare every parameter of the table. ValueError for a value given at start which is not allowed."""
    for name, spec in SPECS.items():
        node.declare_parameter(name, spec.default, _descriptor(name, spec))
        problem = _problem(name, node.get_parameter(name).value)
        if problem:
            raise ValueError(problem)


def check_parameters(parameters: list[Parameter], unconfigured: bool) -> SetParametersResult:
    """Whether the node may take these values now; for `add_on_set_parameters_callback`."""
    for parameter in parameters:
        spec = SPECS.get(parameter.name)
        if spec is None:
            continue
        problem = _problem(parameter.name, parameter.value)
        if spec.fixed and not unconfigured:
            problem = f"{parameter.name} can only be set while the node is unconfigured: clean it up first"
        if problem:
            return SetParametersResult(successful=False, reason=problem)
    return SetParametersResult(successful=True)


def _problem(name: str, value: Any) -> str:
    choices = SPECS[name].choices
    if choices and value not in choices:
        return f"{name} must be one of {', '.join(choices)}, got {value!r}"
    if name == "loras":
        try:
            parse_loras(value)
        except ValueError as error:
            return str(error)
    return ""


def _descriptor(name: str, spec: Spec) -> ParameterDescriptor:
    descriptor = ParameterDescriptor(name=name, description=spec.description, read_only=spec.read_only)
    if spec.choices:
        descriptor.additional_constraints = f"One of: {', '.join(spec.choices)}."
    if spec.fixed:
        descriptor.additional_constraints += " Can only be set while the node is unconfigured."
    if spec.low is not None and spec.high is not None:
        if isinstance(spec.default, float):
            bounds = FloatingPointRange(from_value=float(spec.low), to_value=float(spec.high))
            descriptor.floating_point_range.append(bounds)
        else:
            descriptor.integer_range.append(
                IntegerRange(from_value=int(spec.low), to_value=int(spec.high), step=1)
            )
    return descriptor
