# SPDX-License-Identifier: Apache-2.0
"""Parameters of the node: table of declarations, snapshot of their values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from rclpy.node import Node

from edgellm_ros.diffusion.chunking import FORMS
from edgellm_ros.multimodal.pcm import ENCODINGS, PcmFormat
from edgellm_ros.multimodal.sound import MAX_SAMPLE_RATE, MIN_SAMPLE_RATE
from edgellm_ros.multimodal.utterance import UtteranceSettings
from edgellm_ros.ros.messaging import SERVICE_DEPTH
from edgellm_ros.ros.node.camera import CameraParameters
from edgellm_ros.ros.node.image_size import MAX_PIXELS
from edgellm_ros.ros.node.limits import Limits
from edgellm_ros.ros.node.markers import MarkerSettings
from edgellm_ros.ros.parameter_table import Spec
from edgellm_ros.runtime.prompt.tool_calls import TOOL_CALL_FORMATS
from edgellm_ros.runtime.request import (
    MAX_DENOISE_STEPS,
    MAX_PENALTY,
    MAX_TEMPERATURE,
    MIN_PENALTY,
    MIN_TEMPERATURE,
    MIN_TOP_P,
)

MAX_INT32, MAX_INT64 = 2**31 - 1, 2**63 - 1
OFF = "off"  # value of `chunking`
GROUPS = {
    "camera": CameraParameters,
    "markers": MarkerSettings,
    "audio_data": PcmFormat,
    "utterance": UtteranceSettings,
    "limits": Limits,
}


SPECS: dict[str, Spec] = {
    "engine_dir": Spec("", "Engine directory made by `edgellm export`.", fixed=True),
    "device": Spec("cpu", "Device that runs the engines.", choices=("cpu", "cuda", "tensorrt"), fixed=True),
    "allow_plan_code": Spec(
        False,
        "With device = tensorrt: load version-compatible plans too, which contain code that runs in the "
        "node's process; for plans whose origin you trust.",
        fixed=True,
    ),
    "autostart": Spec(
        False,
        "Configure and activate the node at start; false = a lifecycle manager does it.",
        read_only=True,
    ),
    "loras": Spec(
        [""],
        "LoRA adapters to load besides those in engine_dir/lora, as NAME=DIR. A new list loads and removes "
        "adapters after the plans that already wait; if one cannot be loaded, the parameter is set back.",
    ),
    "lora": Spec(
        "",
        "LoRA adapter that is active at start (~/switch_lora changes it later); empty or base = base model.",
        fixed=True,
    ),
    "frame_id": Spec("base_link", "TF frame of action chunks and paths: the base of the robot."),
    "image_transport": Spec(
        "raw",
        "Message type of ~/image; raw = sensor_msgs/Image, compressed = sensor_msgs/CompressedImage.",
        choices=("raw", "compressed"),
        fixed=True,
    ),
    "audio_transport": Spec(
        "chunk",
        "Message type of ~/audio; chunk = edgellm_ros/AudioChunk, audio_data = audio_common_msgs/AudioData, "
        "audio_data_stamped = audio_common_msgs/AudioDataStamped. The parameters audio_data.* set the "
        "audio format of the last two types.",
        choices=("chunk", "audio_data", "audio_data_stamped"),
        fixed=True,
    ),
    "audio_data.encoding": Spec(
        "S16LE", "Sample format of audio_common_msgs audio.", choices=tuple(ENCODINGS)
    ),
    "audio_data.sample_rate": Spec(
        16000, "Sample rate of audio_common_msgs audio in Hz.", MIN_SAMPLE_RATE, MAX_SAMPLE_RATE
    ),
    "audio_data.channels": Spec(1, "Channels of audio_common_msgs audio; 1 = mono, 2 = stereo.", 1, 2),
    "input_reliability": Spec(
        "best_effort",
        "QoS reliability of the input topics. best_effort receives from every publisher but may lose "
        "messages; reliable loses none but receives from reliable publishers only.",
        choices=("best_effort", "reliable"),
        fixed=True,
    ),
    "plan_on": Spec(
        "command",
        "What starts a plan. command: each message on ~/command, with the newest camera frame. image: each "
        "camera frame, with the last command, until an empty command is sent.",
        choices=("command", "image"),
    ),
    "frames_per_plan": Spec(
        1,
        "Camera frames of a plan: the newest and earlier ones, frame_interval apart, sent as a video with "
        "their times; for engines that take videos. 1 = the newest frame as an image.",
        1,
        256,
        fixed=True,
    ),
    "cameras": Spec(
        [""],
        "For policies: the robot's cameras, by the policy's names for them. Frames of the first are on "
        "~/image, those of another on ~/NAME/image; [''] = all cameras of the policy, in its order.",
        fixed=True,
    ),
    "camera_tolerance": Spec(
        0.2,
        "For policies: maximum time in seconds from a frame on ~/image to the frames of the other cameras.",
        0.0,
        3600.0,
    ),
    "state_joints": Spec(
        [""],
        "For policies: names on ~/joint_states of the joints whose positions are the robot's state, in the "
        "order of the policy's state; [''] = the policy's own names.",
        fixed=True,
    ),
    "frame_interval": Spec(
        0.5, "Time in seconds between the frames of a plan with several frames.", 0.01, 3600.0
    ),
    "queue_size": Spec(
        4, "Maximum number of waiting goals; further goals end with an error.", 0, 1000, fixed=True
    ),
    "service_depth": Spec(
        SERVICE_DEPTH,
        "QoS history depth of the action and of each service. If more requests or answers are unread, the "
        "oldest are lost. Clients need the same depth.",
        1,
        10_000,
        fixed=True,
    ),
    "result_timeout": Spec(
        900.0,
        "Time in seconds for which a goal's result can be requested after its end.",
        1.0,
        86_400.0,
        fixed=True,
    ),
    "plan_timeout": Spec(
        10.0, "Time limit of a plan in seconds, from the arrival of its request.", 0.01, 3600.0
    ),
    "max_input_age": Spec(
        1.0,
        "Maximum age of camera frames, odometry and joint states in seconds; older input is refused.",
        0.01,
        3600.0,
    ),
    "future_stamp_tolerance": Spec(
        0.5,
        "Maximum time in seconds that a frame, odometry or a joint state may be stamped ahead of the node's "
        "clock; input stamped further in the future is refused.",
        0.0,
        3600.0,
    ),
    "odom_wait": Spec(
        0.05,
        "Maximum time in seconds that a plan waits for odometry, joint states and frames of further cameras "
        "as new as its camera frame.",
        0.0,
        10.0,
    ),
    "prefix_cache_mb": Spec(
        -1,
        "Prefix cache size in MB; 0 = off, -1 = same as the KV cache.",
        -1,
        1_000_000,
        fixed=True,
    ),
    "prefix_cache_file": Spec(
        "", "File that stores the prefix cache between runs; empty = none.", fixed=True
    ),
    "drafting": Spec(
        "off",
        "Speculative decoding: several tokens per run of the model, with the same words; trajectories differ "
        "in their last bits. eagle = drafts of the engine's draft head, lookup = what followed the newest "
        "tokens earlier in the text, auto = eagle if the engine has a draft head, off = none.",
        choices=("auto", "off", "eagle", "lookup"),
        fixed=True,
    ),
    "draft_top_k": Spec(
        0,
        "Candidates of each token of a draft, with drafting = eagle; 0 = the drafter's default.",
        0,
        1024,
        fixed=True,
    ),
    "draft_steps": Spec(0, "Levels of a draft; 0 = the drafter's default.", 0, 1024, fixed=True),
    "verify_tree_size": Spec(
        0,
        "Tokens that the model verifies in one run, the newest one included; 0 = the drafter's default.",
        0,
        1024,
        fixed=True,
    ),
    "decode": Spec(
        "auto",
        "What executes decode steps and Euler steps: the engine, or the fused kernels (device cuda, fp16 or "
        "bf16), which differ in last bits. auto = the faster one, measured when the node is configured.",
        choices=("auto", "engine", "fused"),
        fixed=True,
    ),
    "system_prompt": Spec("", "System prompt of requests without their own."),
    "action_samples": Spec(1, "Trajectories sampled per command; 0 = text only.", 0, 1024),
    "denoise_steps": Spec(
        0, "Euler steps of the action head; 0 = the checkpoint's default.", 0, MAX_DENOISE_STEPS
    ),
    "chunking": Spec(
        "off",
        "How a plan continues the last published chunk of actions, while instruction and adapter stay the "
        "same (real-time chunking). guided = its actions are pulled towards the last ones; frozen = those "
        "that are executed until it arrives stay, the others leave the last ones slowly; trained = those "
        "stay, for checkpoints trained for it; off = no plan does.",
        choices=(OFF, *FORMS),
    ),
    "chunking_horizon": Spec(
        0,
        "Actions of a plan that the last chunk has influence on; 0 = those that are executed until the plan "
        "arrives, and as many again, or a quarter of them with chunking trained.",
        0,
        MAX_INT32,
    ),
    "noise_seed": Spec(
        0,
        "Seed of the action noise at start (~/set_noise_seed changes it later).",
        0,
        MAX_INT64,
        fixed=True,
    ),
    "seed": Spec(0, "Seed of token sampling for requests without their own seed.", 0, MAX_INT64),
    "max_tokens": Spec(
        96, "Maximum answer length in tokens for requests without their own limit.", 1, MAX_INT32
    ),
    "temperature": Spec(
        0.0,
        f"Sampling temperature of answers to commands, at least {MIN_TEMPERATURE:g}; 0 = greedy.",
        0.0,
        MAX_TEMPERATURE,
    ),
    "top_p": Spec(1.0, "Top-p (nucleus) sampling of answers to commands; 1 = off.", MIN_TOP_P, 1.0),
    "top_k": Spec(0, "Top-k sampling of answers to commands; 0 = off.", 0, MAX_INT32),
    "min_p": Spec(0.0, "Min-p sampling of answers to commands; 0 = off.", 0.0, 1.0),
    "repetition_penalty": Spec(
        1.0, "Repetition penalty of answers to commands; 1 = off.", MIN_PENALTY, MAX_PENALTY
    ),
    "json_schema": Spec(
        "",
        "JSON schema of answers to commands, as text; empty = off. At most one of json_schema, regex and "
        "choices is set.",
    ),
    "regex": Spec("", "Regular expression that the whole answer to a command matches; empty = off."),
    "choices": Spec(
        [""], "Texts of which the answer to a command is one; empty texts do not count, [''] = off."
    ),
    "tool_call_format": Spec(
        "auto",
        "How the model writes tool calls, for goals with tools. auto = as its chat template writes those of "
        "earlier messages, none = answers are not searched for them.",
        choices=TOOL_CALL_FORMATS,
        fixed=True,
    ),
    "utterance.threshold": Spec(
        0.35,
        "Voice activity threshold (probability); lower values detect quieter speech and more noise.",
        0.05,
        0.95,
    ),
    "utterance.pre_roll": Spec(
        0.3, "Audio included before and after the speech of an utterance, in seconds.", 0.0, 0.5
    ),
    "utterance.hang_over": Spec(0.8, "Silence that ends an utterance, in seconds.", 0.1, 5.0),
    "utterance.min_speech": Spec(
        0.16, "Minimum speech in an utterance, in seconds; shorter ones are dropped as noise.", 0.0, 2.0
    ),
    "utterance.max_length": Spec(
        10.0,
        "Maximum length of an utterance in seconds. A longer utterance is cut here and used; the sound after "
        "the cut is ignored until the next silence.",
        1.0,
        60.0,
    ),
    "camera.source": Spec(
        "auto",
        "Where the camera of ~/overlay comes from. auto: ~/camera_info and /tf_static, and the parameters "
        "camera.* in place of the one that is missing; parameters: the parameters only.",
        choices=("auto", "parameters"),
    ),
    "camera.rectified": Spec(
        False, "Whether the frames on ~/image are rectified: then p of ~/camera_info describes them, not k."
    ),
    "limits.message_bytes": Spec(
        2**28,
        "Most bytes of images, sound, trajectories and state in a message: goal, camera frame, audio chunk.",
        1,
        2**31 - 1,
    ),
    "limits.image_pixels": Spec(
        MAX_PIXELS, "Most pixels of an image; a larger one is not decoded.", 1, 2**30
    ),
    "limits.images": Spec(256, "Most images of a goal, with those of its earlier messages.", 0, 100_000),
    "limits.messages": Spec(1000, "Most earlier messages of a goal.", 0, 1_000_000),
    "limits.text_length": Spec(
        1_000_000,
        "Most characters of text for the model in one message: prompt, system prompt and earlier messages of "
        "a goal, a command, a system prompt to save.",
        1,
        100_000_000,
    ),
    "limits.grammar_length": Spec(
        200_000,
        "Most characters of a goal's JSON schema, of its regular expression, of all its choices, of all its "
        "stop strings, and of all its tools.",
        1,
        100_000_000,
    ),
    "limits.choices": Spec(10_000, "Most choices of a goal, stop strings, and tools.", 1, 1_000_000),
    "limits.goals": Spec(
        10_000,
        "Most goals that the node stores: waiting, running, and ended ones until result_timeout. A further "
        "goal is rejected.",
        1,
        1_000_000,
    ),
    "camera.fx": Spec(160.0, "Horizontal focal length of the camera in pixels, for ~/overlay.", 1.0, 1e6),
    "camera.fy": Spec(160.0, "Vertical focal length of the camera in pixels, for ~/overlay.", 1.0, 1e6),
    "camera.cx": Spec(160.0, "Principal point in pixels from the left, for ~/overlay.", -1e6, 1e6),
    "camera.cy": Spec(112.0, "Principal point in pixels from the top, for ~/overlay.", -1e6, 1e6),
    "camera.height": Spec(0.5, "Height of the camera above the floor in metres, for ~/overlay.", 0.0, 1e3),
    "camera.x": Spec(
        -0.1, "Distance of the camera ahead of the base frame in metres, for ~/overlay.", -1e3, 1e3
    ),
    "camera.pitch": Spec(
        0.349, "Downward tilt of the camera in radians, for ~/overlay.", -math.pi / 2, math.pi / 2
    ),
    "markers.lifetime": Spec(
        10.0,
        "Time in seconds after which a viewer removes the markers of a plan; 0 = with the next plan.",
        0.0,
        86_400.0,
    ),
    "markers.sample_index": Spec(
        0, "Sample whose path is drawn strongest in ~/markers: the one that is followed.", 0, 65_535
    ),
}


@dataclass(frozen=True)
class Parameters:
    """Values of all parameters by name; a group (`camera.*` and so on) is one object."""

    engine_dir: str
    device: str
    allow_plan_code: bool
    autostart: bool
    loras: list[str]
    lora: str
    frame_id: str
    image_transport: str
    audio_transport: str
    input_reliability: str
    plan_on: str
    frames_per_plan: int
    cameras: list[str]
    camera_tolerance: float
    state_joints: list[str]
    frame_interval: float
    queue_size: int
    service_depth: int
    result_timeout: float
    plan_timeout: float
    max_input_age: float
    future_stamp_tolerance: float
    odom_wait: float
    prefix_cache_mb: int
    prefix_cache_file: str
    drafting: str
    draft_top_k: int
    draft_steps: int
    verify_tree_size: int
    decode: str
    system_prompt: str
    action_samples: int
    denoise_steps: int
    chunking: str
    chunking_horizon: int
    noise_seed: int
    seed: int
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    json_schema: str
    regex: str
    choices: list[str]
    tool_call_format: str
    camera: CameraParameters
    markers: MarkerSettings
    audio_data: PcmFormat
    utterance: UtteranceSettings
    limits: Limits

    @classmethod
    def read(cls, node: Node) -> Parameters:
        """Read the present values of the node's parameters."""
        values = {name: node.get_parameter(name).value for name in SPECS}
        groups = {
            group: kind(**{field.name: values[f"{group}.{field.name}"] for field in fields(kind)})
            for group, kind in GROUPS.items()
        }
        return cls(**groups, **{name: value for name, value in values.items() if "." not in name})

    def changed(self, values: Mapping[str, Any]) -> Parameters:
        """Return a copy with other values for some names.

        ValueError for a combination of values that a group does not allow.
        """
        names: dict[str, Any] = {name: value for name, value in values.items() if "." not in name}
        for group in GROUPS:
            members = {
                name.removeprefix(f"{group}."): value
                for name, value in values.items()
                if name.startswith(f"{group}.")
            }
            names[group] = replace(getattr(self, group), **members)
        return replace(self, **names)
