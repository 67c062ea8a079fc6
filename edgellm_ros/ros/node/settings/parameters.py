# SPDX-License-Identifier: Apache-2.0
"""Parameters of the node: their declarations, and a snapshot of their values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import reduce
from typing import Any

from rclpy.node import Node

from edgellm_ros.diffusion.chunking import FORMS
from edgellm_ros.engine_directory.config import GenerationDefaults
from edgellm_ros.multimodal.audio.pcm import ENCODINGS, PcmFormat
from edgellm_ros.multimodal.audio.utterance import UtteranceSettings
from edgellm_ros.multimodal.sound import MAX_SAMPLE_RATE, MIN_SAMPLE_RATE
from edgellm_ros.ros.messaging import SERVICE_DEPTH
from edgellm_ros.ros.node.sensors.image_size import MAX_PIXELS
from edgellm_ros.ros.node.settings.camera import CameraParameters
from edgellm_ros.ros.node.settings.hearing import HearingSettings
from edgellm_ros.ros.node.settings.limits import Limits
from edgellm_ros.ros.node.settings.markers import MarkerSettings
from edgellm_ros.ros.node.settings.serving import ServeParameters
from edgellm_ros.ros.node.settings.speech import SpeechParameters
from edgellm_ros.ros.parameter_table import OFF, SPEC, Spec, declared
from edgellm_ros.runtime.decoding.speculative.drafting_config import DRAFTING
from edgellm_ros.runtime.prompt.tool_calls import TOOL_CALL_FORMATS
from edgellm_ros.runtime.request import MAX_DENOISE_STEPS, MAX_GUIDANCE
from edgellm_ros.runtime.sampling_params import SAMPLED, Sampled
from edgellm_ros.runtime.scheduling.shares import MAX_WEIGHT, MIN_WEIGHT

MAX_INT32, MAX_INT64 = 2**31 - 1, 2**63 - 1
CHECKPOINTS = "the default of the checkpoint's generation_config.json"
GROUPS = {
    "camera": CameraParameters,
    "markers": MarkerSettings,
    "audio_data": PcmFormat,
    "utterance": UtteranceSettings,
    "hearing": HearingSettings,
    "speech": SpeechParameters,
    "limits": Limits,
}


def _sampled(name: str, how: Sampled) -> Spec:
    """Return the parameter with a sampling rule's value for requests without one."""
    kind = type(how.least)
    least = f", at least {how.least:g}" if how.least else ""
    meaning = f"{how.off:g} or negative = {how.without}"
    if name in {each.name for each in fields(GenerationDefaults)}:
        meaning = f"{how.off:g} = {how.without}, negative = {CHECKPOINTS}"
    text = f"{how.title} of requests that set none{least}; {meaning}."
    return Spec(kind(-1), text, kind(-1), how.most)


# A field for each of SAMPLED.
SampledParameters = make_dataclass(
    "SampledParameters",
    [(name, type(how.least), field(metadata={SPEC: _sampled(name, how)})) for name, how in SAMPLED.items()],
    frozen=True,
    kw_only=True,
)


@dataclass(frozen=True, kw_only=True)
class Parameters(SampledParameters, ServeParameters):
    """Values of all parameters by name, each with its declaration.

    A group (`camera.*` and so on) is one object, whose parameters `SPECS` declares.
    """

    engine_dir: str = declared("", "Engine directory made by `edgellm export`.", fixed=True)
    speech_engine_dir: str = declared(
        "",
        "Engine directory of a model for speech, such as Qwen3-ASR: it transcribes the utterances on "
        "~/audio, and their words become commands; '' = the model itself hears, if it has an audio encoder.",
        fixed=True,
    )
    device: str = declared(
        "cpu", "Device that runs the engines.", choices=("cpu", "cuda", "tensorrt"), fixed=True
    )
    allow_plan_code: bool = declared(
        False,
        "With device = tensorrt: load version-compatible plans too. They contain code that runs in the "
        "node's process: set this only for plans whose origin you trust.",
        fixed=True,
    )
    without: list[str] = declared(
        [""],
        "Engines that are not loaded, to save memory: visual (frames are refused then), audio (sound is "
        "refused), action (no trajectories); [''] = all engines are loaded.",
        fixed=True,
    )
    autostart: bool = declared(
        False,
        "Configure and activate the node at start; false = wait for a lifecycle manager.",
        read_only=True,
    )
    loras: list[str] = declared(
        [""],
        "LoRA adapters to load besides those in engine_dir/lora, as NAME=DIR or NAME=FILE. When the list "
        "changes, adapters are loaded and removed after the plans that already wait; if one cannot be "
        "loaded, the parameter gets its old value again.",
    )
    lora: str = declared(
        "",
        "LoRA adapter that is active at start (~/switch_lora changes it later); empty or base = base model.",
        fixed=True,
    )
    frame_id: str = declared(
        "base_link", "TF frame of published action chunks and paths: the base frame of the robot."
    )
    image_transport: str = declared(
        "raw",
        "Message type of ~/image; raw = sensor_msgs/Image, compressed = sensor_msgs/CompressedImage.",
        choices=("raw", "compressed"),
        fixed=True,
    )
    audio_transport: str = declared(
        "chunk",
        "Message type of ~/audio; chunk = edgellm_ros/AudioChunk, audio_data = audio_common_msgs/AudioData, "
        "audio_data_stamped = audio_common_msgs/AudioDataStamped. The parameters audio_data.* set the audio "
        "format of the last two types.",
        choices=("chunk", "audio_data", "audio_data_stamped"),
        fixed=True,
    )
    input_reliability: str = declared(
        "best_effort",
        "QoS reliability of the input topics. best_effort receives from every publisher but may lose "
        "messages; reliable loses none but receives from reliable publishers only.",
        choices=("best_effort", "reliable"),
        fixed=True,
    )
    plan_on: str = declared(
        "command",
        "What triggers a plan. command: each message on ~/command, with the newest camera frame. image: "
        "each camera frame, with the last command, until an empty command is received.",
        choices=("command", "image"),
    )
    frames_per_plan: int = declared(
        1,
        "Number of camera frames that the model gets for a plan. 1 = the newest frame as an image; more = "
        "the newest and earlier frames, frame_interval apart, as a video (for engines that take videos).",
        1,
        256,
        fixed=True,
    )
    cameras: list[str] = declared(
        [""],
        "For policies: cameras of the robot, by the names that the policy has for them. The first publishes "
        "on ~/image, each other one on ~/NAME/image; [''] = all cameras of the policy, in its order.",
        fixed=True,
    )
    camera_tolerance: float = declared(
        0.2,
        "For policies: maximum time difference in seconds between a frame on ~/image and the frames of the "
        "other cameras.",
        0.0,
        3600.0,
    )
    state_joints: list[str] = declared(
        [""],
        "For policies: names of the joints on ~/joint_states whose positions form the robot's state, in the "
        "order of the policy's state vector; [''] = the names that the policy has.",
        fixed=True,
    )
    frame_interval: float = declared(
        0.5, "Time in seconds between two frames of a plan, if frames_per_plan is more than 1.", 0.01, 3600.0
    )
    queue_size: int = declared(
        4, "Maximum number of goals that wait; a further goal is aborted with an error.", 0, 1000, fixed=True
    )
    driving_plans_per_goal: int = declared(
        1,
        "With plan_on = image: number of plans for camera frames with the first claim for each goal that "
        "ends, where frames leave goals no time. 1 = frames and goals take turns. A plan for a command does "
        "not wait for its turn.",
        1,
        1000,
    )
    max_concurrent_plans: int = declared(
        0,
        "Maximum number of plans that run at once, plans of driving included: their tokens are computed "
        "together. 1 = one after another; 0 = max_batch_size of the engine (in a fleet divided by robots, "
        "but at least 2), at most 4, and 1 for a policy.",
        0,
        64,
        fixed=True,
    )
    share_weight: float = declared(
        1.0,
        "In a fleet on one engine (edgellm_fleet): weight of this robot, to which its part of the tokens is "
        "proportional while others plan too.",
        MIN_WEIGHT,
        MAX_WEIGHT,
        fixed=True,
    )
    client_priorities: list[str] = declared(
        [""],
        "Priorities of clients' goals as NAME=PRIORITY, from -10 to 10, by the field client of the goal; "
        "goals of other clients have 0. A goal that waits gains one per second.",
    )
    service_depth: int = declared(
        SERVICE_DEPTH,
        "QoS history depth of the action and of each service. When more requests or answers are unread, the "
        "oldest are lost. Clients need the same depth.",
        1,
        10_000,
        fixed=True,
    )
    result_timeout: float = declared(
        900.0,
        "Time in seconds after the end of a goal during which its result can be requested.",
        1.0,
        86_400.0,
        fixed=True,
    )
    plan_timeout: float = declared(
        10.0, "Time limit of a plan in seconds, from the arrival of its request.", 0.01, 3600.0
    )
    max_input_age: float = declared(
        1.0,
        "Maximum age of camera frames, odometry and joint states in seconds; older input is refused.",
        0.01,
        3600.0,
    )
    future_stamp_tolerance: float = declared(
        0.5,
        "Maximum time in seconds by which the stamp of a frame, of odometry or of joint states may be ahead "
        "of the node's clock; input with a later stamp is refused.",
        0.0,
        3600.0,
    )
    odom_wait: float = declared(
        0.05,
        "Maximum time in seconds that a plan waits for odometry, joint states and frames of further cameras "
        "that are at least as new as its camera frame.",
        0.0,
        10.0,
    )
    odom_tolerance: float = declared(
        0.05,
        "Maximum difference in m/s between the velocity computed from the poses of the odometry and its "
        "twist (means over the trajectory history). Above it, a warning is logged and past poses are "
        "computed from the twist. Above twice this value, and if one velocity is less than half of the "
        "other, no trajectories are planned.",
        0.0,
        1e4,
    )
    prefix_cache_mb: int = declared(
        -1,
        "Size of the prefix cache in MB; 0 = off, -1 = the size of the KV cache.",
        -1,
        1_000_000,
        fixed=True,
    )
    prefix_cache_file: str = declared(
        "", "File in which the prefix cache is saved between runs of the node; empty = not saved.", fixed=True
    )
    drafting: str = declared(
        "auto",
        "Speculative decoding: several tokens per run of the model. The text stays the same; trajectories "
        "differ in their last bits. eagle, mtp, dflash = the engine's draft head of this kind drafts tokens; "
        "lookup = drafted tokens are those that followed the newest tokens earlier in the text; auto = the "
        "draft head if the engine has one, else off.",
        choices=DRAFTING,
        fixed=True,
    )
    draft_top_k: int = declared(
        0,
        "With a draft head: number of candidates for each drafted token; 0 = default of the drafter.",
        0,
        1024,
        fixed=True,
    )
    draft_steps: int = declared(
        0, "Number of levels of a tree of drafted tokens; 0 = default of the drafter.", 0, 1024, fixed=True
    )
    verify_tree_size: int = declared(
        0,
        "Maximum number of tokens that the model verifies in one run: drafted tokens and the newest one; 0 "
        "= default of the drafter.",
        0,
        1024,
        fixed=True,
    )
    decode: str = declared(
        "auto",
        "What executes decode steps and Euler steps. engine = the engine; fused = the fused kernels (device "
        "cuda, fp16 or bf16), whose numbers differ in the last bits; auto = the faster one, measured when "
        "the node is configured.",
        choices=("auto", "engine", "fused"),
        fixed=True,
    )
    cuda_graphs: bool = declared(
        True,
        "On a GPU: record decode steps and other repeated work as CUDA graphs when the node is configured; "
        "false = launch each kernel. The text is the same.",
        fixed=True,
    )
    system_prompt: str = declared("", "System prompt of requests that have none.")
    navigation: bool = declared(
        False,
        "For models that take instructions of navigation, such as Alpamayo 1.5: texts of commands and goals "
        "are such instructions, and the prompt is the model's own; false = they are the prompt.",
    )
    guidance: float = declared(
        -1.0,
        "With navigation = true: weight of the instruction in the trajectories; above 1 they follow it more "
        "than the model would on its own; negative = they are not guided. Needs an engine of max_batch_size "
        "2, and chunking = off.",
        -1.0,
        MAX_GUIDANCE,
    )
    action_samples: int = declared(
        1, "Number of trajectories to sample for each command; 0 = text only.", 0, 1024
    )
    denoise_steps: int = declared(
        0, "Steps from noise of the action head; 0 = the checkpoint's default.", 0, MAX_DENOISE_STEPS
    )
    chunking: str = declared(
        OFF,
        "Real-time chunking: how a plan continues the previous chunk of actions, while instruction and "
        "adapter stay the same. guided: guidance pulls the actions towards those of the previous chunk; "
        "frozen: the actions executed during inference are copied from the previous chunk, later ones are "
        "blended away from it; trained: prefix conditioning, for checkpoints trained with it; off: each "
        "plan is independent of the previous chunk.",
        choices=(OFF, *FORMS),
    )
    chunking_horizon: int = declared(
        0,
        "Number of actions of a plan that the previous chunk influences; 0 = twice the number of actions "
        "executed during inference, with chunking trained 1.25 times that number.",
        0,
        MAX_INT32,
    )
    noise_seed: int = declared(
        0,
        "Seed of the action noise at start (~/set_noise_seed changes it later).",
        0,
        MAX_INT64,
        fixed=True,
    )
    seed: int = declared(0, "Seed of token sampling for requests that have none.", 0, MAX_INT64)
    max_tokens: int = declared(
        96, "Maximum length of an answer in tokens, for requests that set none.", 1, MAX_INT32
    )
    json_schema: str = declared(
        "",
        "JSON schema that answers to commands must match, as text; empty = off. At most one of json_schema, "
        "regex and choices may be set.",
    )
    regex: str = declared(
        "", "Regular expression that the whole answer to a command must match; empty = off."
    )
    choices: list[str] = declared([""], "Allowed answers to commands; empty texts are ignored, [''] = off.")
    tool_call_format: str = declared(
        "auto",
        "Format in which the model writes tool calls, for goals with tools. auto = the format of its chat "
        "template; none = answers are not searched for tool calls.",
        choices=TOOL_CALL_FORMATS,
        fixed=True,
    )
    voice: str = declared(
        "",
        "Voice that speaks answers on ~/speech: path of a Piper voice (MODEL.onnx, with MODEL.onnx.json "
        "beside it), espeak or espeak:LANGUAGE = espeak-ng's own sound; empty = silent.",
        fixed=True,
    )
    camera: CameraParameters
    markers: MarkerSettings
    audio_data: PcmFormat
    utterance: UtteranceSettings
    hearing: HearingSettings
    speech: SpeechParameters
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

    def value(self, name: str) -> Any:
        """Return the value of a parameter by its name."""
        return reduce(getattr, name.split("."), self)

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


SPECS: dict[str, Spec] = {
    **{each.name: each.metadata[SPEC] for each in fields(Parameters) if each.name not in GROUPS},
    "audio_data.encoding": Spec(
        "S16LE", "Sample format of audio_common_msgs audio.", choices=tuple(ENCODINGS)
    ),
    "audio_data.sample_rate": Spec(
        16000, "Sample rate of audio_common_msgs audio in Hz.", MIN_SAMPLE_RATE, MAX_SAMPLE_RATE
    ),
    "audio_data.channels": Spec(1, "Channels of audio_common_msgs audio; 1 = mono, 2 = stereo.", 1, 2),
    "utterance.threshold": Spec(
        0.35,
        "Speech probability from which sound counts as speech; lower values detect quieter speech and more "
        "noise.",
        0.05,
        0.95,
    ),
    "utterance.pre_roll": Spec(
        0.3,
        "Duration in seconds of the sound before and after the speech that an utterance includes.",
        0.0,
        0.5,
    ),
    "utterance.hang_over": Spec(0.8, "Duration in seconds of the silence that ends an utterance.", 0.1, 5.0),
    "utterance.min_speech": Spec(
        0.16,
        "Minimum duration in seconds of the speech of an utterance; a shorter one is dropped as noise.",
        0.0,
        2.0,
    ),
    "utterance.max_length": Spec(
        10.0,
        "Maximum duration of an utterance in seconds. A longer one is cut and used; the sound after the cut "
        "is ignored until the next silence.",
        1.0,
        60.0,
    ),
    "hearing.language": Spec(
        "", "Language of the speech, as its English name or code, such as German or de; '' = as heard."
    ),
    "hearing.context": Spec(
        "",
        "Words that may be said, such as names of places and objects, which the speech engine then prefers.",
    ),
    "hearing.min_confidence": Spec(
        -0.3,
        "Lowest confidence of a transcript that is obeyed: the mean natural log-probability of its tokens.",
        -100.0,
        0.0,
    ),
    "hearing.max_letters_per_second": Spec(
        30.0,
        "Most letters of a transcript per second of its utterance; with more it is not obeyed.",
        1.0,
        1000.0,
    ),
    "hearing.wake_word": Spec(
        "",
        "Name of the robot, one word or several: only speech that begins with it is obeyed, and up to two "
        "words such as hey may come before it. '' = all speech is obeyed.",
    ),
    "hearing.partial_interval": Spec(
        0.0,
        "Time in seconds between two transcripts of an utterance in progress, on ~/transcript with final = "
        "false; 0 = none.",
        0.0,
        60.0,
    ),
    "speech.barge_in": Spec(
        6.0,
        "Level in dB by which a person must be louder than the robot's own echo, as the node measures it, "
        "and than the noise of the room, to interrupt the robot (barge-in); -1 = no barge-in.",
        -1.0,
        60.0,
    ),
    "speech.tail": Spec(
        0.3,
        "Time in seconds after the robot's speech during which ~/audio is not listened to: the delay of "
        "playback and the reverberation of the room.",
        0.0,
        5.0,
    ),
    "speech.noise_scale": Spec(
        -1.0,
        "Noise of a Piper voice in waveform and durations; 0 = the same text gives the same sound, -1 = as "
        "the voice's file says.",
        -1.0,
        10.0,
        fixed=True,
    ),
    "camera.source": Spec(
        "auto",
        "Source of the camera model for ~/overlay. auto: ~/camera_info and /tf_static; where one is "
        "missing, the parameters camera.*. parameters: always the parameters camera.*.",
        choices=("auto", "parameters"),
    ),
    "camera.rectified": Spec(
        False, "Whether the frames on ~/image are rectified; then p of ~/camera_info is used, not k and d."
    ),
    "limits.message_bytes": Spec(
        2**28,
        "Maximum size in bytes of the images, sound, trajectories and state of one message (goal, camera "
        "frame or audio chunk).",
        1,
        2**31 - 1,
    ),
    "limits.image_pixels": Spec(
        MAX_PIXELS, "Maximum number of pixels of an image; a larger image is not decoded.", 1, 2**30
    ),
    "limits.images": Spec(
        256, "Maximum number of images of a goal, including its earlier messages.", 0, 100_000
    ),
    "limits.messages": Spec(1000, "Maximum number of earlier messages of a goal.", 0, 1_000_000),
    "limits.text_length": Spec(
        1_000_000,
        "Maximum number of characters of text for the model: in a goal (prompt, system prompt and earlier "
        "messages together), in a command, in a system prompt to save.",
        1,
        100_000_000,
    ),
    "limits.grammar_length": Spec(
        200_000,
        "Maximum number of characters of a goal's JSON schema, of its regular expression, of all its "
        "choices, of all its stop strings, and of all its tools, each.",
        1,
        100_000_000,
    ),
    "limits.choices": Spec(
        10_000,
        "Maximum number of choices of a goal, of its stop strings, and of its tools, each.",
        1,
        1_000_000,
    ),
    "limits.goals": Spec(
        10_000,
        "Maximum number of goals that the node stores: waiting, running, and ended ones until "
        "result_timeout. A further goal is rejected.",
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
        "Time in seconds after which a viewer removes the markers of a plan; 0 = when the next plan arrives.",
        0.0,
        86_400.0,
    ),
    "markers.sample_index": Spec(
        0, "Index of the highlighted sample in ~/markers: the one that the robot follows.", 0, 65_535
    ),
}
