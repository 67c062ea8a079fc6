# SPDX-License-Identifier: Apache-2.0
"""Requests to the runtime, responses, and progress reports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgellm_ros.diffusion.chunking import ChunkCondition
from edgellm_ros.echo import quoted
from edgellm_ros.kernels.random import MAX_SEED
from edgellm_ros.multimodal.device_image import Image, as_image
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.multimodal.video import Video
from edgellm_ros.number_checks import check_number
from edgellm_ros.runtime.conversation import Message, check_messages, images_of, sounds_of, videos_of
from edgellm_ros.runtime.sampling_params import SamplingParams
from edgellm_ros.sequence_checks import check_sequence, check_texts

MAX_LOGPROBS = 50
MAX_DENOISE_STEPS = 1000
MAX_GUIDANCE = 100.0
MAX_SPEED = 1000.0  # m/s; speeds become float32 positions
# Variables of a chat template that a request sets by fields of its own.
TEMPLATE_FIELDS = ("messages", "tools", "enable_thinking", "add_generation_prompt", "continue_final_message")
SHORT_FORM = ("prompt", "system_prompt", "images", "videos", "audio")  # fields of it
# Arguments of transformers' processors of Qwen-Omni, which put a video's sound between its rows.
AUDIO_IN_VIDEO = ("use_audio_in_video", "load_audio_from_video")


def check_speed(name: str, speed: float) -> None:
    """Check a speed in m/s: ValueError outside of 0 to MAX_SPEED."""
    check_number(name, speed, 0.0, MAX_SPEED)


@dataclass(frozen=True)
class Progress:
    """Progress of a request."""

    stage: (
        str  # "grammar" (while a large one is compiled), "vision", "audio", "prefill", "decode" or "action"
    )
    text: str  # the answer so far: complete characters only, without a possible start of a stop string
    tokens: int  # number of tokens of the answer so far
    step: int  # number of the step within the stage, from 0


@dataclass(frozen=True, eq=False)
class LLMGenerationRequest:
    """One question to the model, or a conversation that it answers or continues.

    The model answers or continues the last message of a conversation. The short form is `prompt` with
    `system_prompt`, `images`, `videos` and `audio`; `messages` are the long form. The KV rows of answers to
    the long form are stored for the next turn. `prompt_ids` are a text that the model continues. ValueError
    names a field that is out of range or of another type, and refuses several forms at once.
    """

    prompt: str = ""  # the user's text; may be empty
    system_prompt: str = ""  # "" = none
    # uint8 [H, W, 3], RGB: of NumPy, or of another library with DLPack or an array interface, on the host or
    # on the runtime's GPU; then they are not copied through the host (multimodal/device_image.py). Of a
    # policy that takes several observations also [O, H, W, 3]: those of a camera, oldest first
    images: tuple[Image, ...] = ()
    audio: tuple[Sound, ...] = ()  # placed before the text in the prompt
    # past poses (x, y[, heading[, z]]) in metres and radians in the robot's current frame, oldest first;
    # None = the robot drove straight on at `speed`, and without a speed it stood still
    history: np.ndarray | None = None
    speed: float | None = None  # current speed in m/s, from 0 to 1000; None = computed from the history
    lora: str = ""  # name of the adapter; "" = the active adapter, "base" = the base model
    sampling: SamplingParams = SamplingParams()
    logprobs: int = 0  # number of most likely tokens to report per token, up to 50; 0 = off
    action_samples: int = 0  # number of trajectories to sample
    noise_seed: int | None = None  # of the trajectories; None = the runtime's seed
    denoise_steps: int | None = None  # steps from noise, from 1 to 1000; None = the checkpoint's number
    # called on the thread of `handle_request`, or on the scheduler's
    on_progress: Callable[[Progress], None] | None = None
    cancel: threading.Event | None = None  # when set, the request ends at the next token or step from noise
    messages: tuple[Message, ...] | None = None  # the conversation, oldest first; None = the short form
    tools: tuple[Mapping[str, Any], ...] | None = None  # JSON schemas of functions for the chat template
    enable_thinking: bool | None = None  # for the chat template; None = the template's default
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # its further variables
    continue_final_message: bool = False  # the model continues the last message, which is an answer
    videos: tuple[Video, ...] = ()  # of the short form; placed after the images in the prompt
    disable_spec_decode: bool = False  # no drafted tokens: one token per step
    previous_chunk: ChunkCondition | None = None  # actions that the trajectories continue; None = none
    # of a policy: the robot's state [D] in physical units; its values in the order of the policy's names. Of
    # a policy that takes several observations also [O, D], oldest first
    state: np.ndarray | None = None
    cameras: tuple[str, ...] = ()  # of a policy: the cameras of `images`; empty = all cameras in their order
    lm_head: str = ""  # name of the LM head; "" = the active one, "base" = that of the engine directory
    navigation: str = ""  # an instruction of navigation, such as "Turn left in 40 m"; "" = none
    # weight of `navigation` in the trajectories: above 1 they follow it more than the model would on its own;
    # None = 1, without a second context
    guidance: float | None = None
    output_hidden_states: bool = False  # report the states of the engine's hidden_state_layers for each token
    # token ids of the prompt, without chat template; empty = the prompt has another form
    prompt_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("prompt", "system_prompt", "lora", "lm_head", "navigation"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be a string, got {quoted(getattr(self, name))}")
        self._check_media()
        self._check_conversation()
        self._check_prompt_ids()
        if not isinstance(self.sampling, SamplingParams):
            raise ValueError(f"sampling must be SamplingParams, got {type(self.sampling).__name__}")
        if not isinstance(self.disable_spec_decode, bool):
            value = quoted(self.disable_spec_decode)
            raise ValueError(f"disable_spec_decode must be True or False, got {value}")
        if not isinstance(self.output_hidden_states, bool):
            value = quoted(self.output_hidden_states)
            raise ValueError(f"output_hidden_states must be True or False, got {value}")
        check_number("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        check_number("action_samples", self.action_samples, 0, 2**31 - 1)
        if self.noise_seed is not None:
            check_number("noise_seed", self.noise_seed, 0, MAX_SEED)
        if self.denoise_steps is not None:
            check_number("denoise_steps", self.denoise_steps, 1, MAX_DENOISE_STEPS)
        if self.speed is not None:
            check_speed("speed", self.speed)
        self._check_cameras()
        self._check_guidance()
        if self.previous_chunk is not None and not isinstance(self.previous_chunk, ChunkCondition):
            raise ValueError(
                f"previous_chunk must be a ChunkCondition, got {type(self.previous_chunk).__name__}"
            )

    def _check_media(self) -> None:
        images = check_sequence("images", self.images, "images")
        object.__setattr__(self, "images", tuple(map(as_image, images)))
        object.__setattr__(self, "videos", check_sequence("videos", self.videos, "Videos"))
        for index, video in enumerate(self.videos):
            if not isinstance(video, Video):
                raise ValueError(f"videos[{index}] must be a Video, got {type(video).__name__}")
        object.__setattr__(self, "audio", check_sequence("audio", self.audio, "Sounds"))

    def _check_prompt_ids(self) -> None:
        object.__setattr__(self, "prompt_ids", check_sequence("prompt_ids", self.prompt_ids, "token ids"))
        if not self.prompt_ids:
            return
        for index, token in enumerate(self.prompt_ids):
            check_number(f"prompt_ids[{index}]", token, 0, 2**31 - 1)
        names = ("messages", *SHORT_FORM, "tools", "navigation")
        other = [name for name in names if getattr(self, name)]
        if other:
            raise ValueError(f"a request has prompt_ids or {other[0]}, not both")

    def _check_cameras(self) -> None:
        object.__setattr__(self, "cameras", check_texts("cameras", self.cameras, "names"))
        if self.cameras and len(self.cameras) != len(self.images):
            raise ValueError(f"cameras must name all {len(self.images)} images, got {quoted(self.cameras)}")
        if len(set(self.cameras)) != len(self.cameras):
            raise ValueError(f"cameras must be different, got {quoted(self.cameras)}")

    def _check_guidance(self) -> None:
        if self.guidance is None:
            return
        check_number("guidance", self.guidance, 0.0, MAX_GUIDANCE)
        if not self.navigation or not self.action_samples:
            missing = "navigation" if not self.navigation else "action_samples"
            raise ValueError(f"guidance needs {missing}, which the request lacks")
        if self.previous_chunk is not None:
            raise ValueError("a request has guidance or a previous_chunk, not both")

    @property
    def prompt_images(self) -> tuple[Image, ...]:
        """All images of the prompt in their order."""
        return self.images if self.messages is None else images_of(self.messages)

    @property
    def prompt_videos(self) -> tuple[Video, ...]:
        """All videos of the prompt in their order."""
        return self.videos if self.messages is None else videos_of(self.messages)

    @property
    def prompt_audio(self) -> tuple[Sound, ...]:
        """All sounds of the prompt in their order, with those of videos."""
        return tuple(sound for sound, _ in self._heard)

    @property
    def sounds_of_videos(self) -> tuple[bool, ...]:
        """Whether each sound of `prompt_audio` is that of a video."""
        return tuple(of_video for _, of_video in self._heard)

    @property
    def _heard(self) -> tuple[tuple[Sound, bool], ...]:
        if self.messages is not None:
            return sounds_of(self.messages)
        of_videos = ((video.sound, True) for video in self.videos if video.sound is not None)
        return (*of_videos, *((sound, False) for sound in self.audio))

    def _check_conversation(self) -> None:
        if not isinstance(self.continue_final_message, bool):
            value = quoted(self.continue_final_message)
            raise ValueError(f"continue_final_message must be True or False, got {value}")
        if self.continue_final_message and self.messages is None:
            raise ValueError("continue_final_message needs messages, whose last one is continued")
        if self.messages is not None:
            if not isinstance(self.messages, (list, tuple)):
                raise ValueError(f"messages must be a sequence of Message, got {quoted(self.messages)}")
            short = [name for name in SHORT_FORM if getattr(self, name)]
            if short:
                raise ValueError(f"a request has messages or {short[0]}, not both")
            object.__setattr__(self, "messages", tuple(self.messages))
            check_messages(self.messages, self.continue_final_message)
        if self.tools is not None:
            tools = self.tools
            if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
                raise ValueError(f"tools must be a sequence of JSON objects, got {quoted(tools)}")
            object.__setattr__(self, "tools", tuple(tools))
        thinking = self.enable_thinking
        if thinking is not None and not isinstance(thinking, bool):
            raise ValueError(f"enable_thinking must be True, False or None, got {quoted(thinking)}")
        if not isinstance(self.chat_template_kwargs, Mapping):
            raise ValueError(
                f"chat_template_kwargs must be a mapping, got {quoted(self.chat_template_kwargs)}"
            )
        taken = [name for name in TEMPLATE_FIELDS if name in self.chat_template_kwargs]
        if taken:
            raise ValueError(f"chat_template_kwargs must not have {taken[0]!r}: it is not a further variable")
        mixed = [name for name in AUDIO_IN_VIDEO if self.chat_template_kwargs.get(name)]
        if mixed:
            raise ValueError(
                f"chat_template_kwargs: {mixed[0]} is not supported: give the sound with its video "
                "(Video.sound)"
            )


@dataclass(frozen=True)
class ToolCall:
    """A function that the model calls, with its arguments: a JSON object."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class LLMGenerationResponse:
    """The answer to one request."""

    # the answer with its tool calls, without stop token and stop string; with continue_final_message only its
    # new part
    text: str
    token_ids: list[int]  # tokens of the answer, with the stop token
    finish_reason: str  # "stop" (token or string), "length" (max_tokens or KV cache full) or "cancelled"
    prompt_tokens: int  # number of tokens of the prompt
    # per token: (id, natural log-probability) of the most likely tokens in falling order, then of the sampled
    # token if it is not among them; None if not requested. With a grammar: among the tokens that it allows,
    # which may be fewer
    logprobs: list[list[tuple[int, float]]] | None
    # [n, T, A] in physical units; None if not requested, not triggered by the answer, or cancelled
    actions: np.ndarray | None
    # [n, T+1, 4]: x, y (m), heading (rad), speed (m/s) in the frame of the start pose; None without actions
    paths: np.ndarray | None
    noise_seed: int  # of the trajectories
    lora: str  # name of the adapter that answered; "" = the base model
    # seconds per stage of the whole batch: tokenize_s, vision_s, audio_s, prefill_s, decode_s, action_s,
    # keep_s (storing prompts in the prefix cache), first_token_s, total_s
    metrics: dict[str, float]
    lm_head: str = ""  # name of the LM head that answered; "" = that of the engine directory
    # by layer [n,H], for each token the state from which it was sampled: that of the token before it, in
    # the engine's type; None if not requested, empty without tokens
    hidden_states: Mapping[int, np.ndarray] | None = None
    reused_tokens: int = 0  # tokens of the prompt whose KV rows came from the prefix cache
    # decode steps or rounds of drafting that the answer took; the first token is the prefill's. One more step
    # follows a token that triggers the action head. 0 for a policy
    steps: int = 0
    # whether `text` is complete by the request's JSON schema, regular expression or choices: false if the
    # limit, a stop string or a cancellation cut it; None if the request has none
    grammar_complete: bool | None = None
    # of a request with tools: the calls in the text, as the family's chat template writes them
    tool_calls: tuple[ToolCall, ...] = ()
    content: str = ""  # `text` without these calls; the same as `text` if there are none
    tool_call_errors: tuple[str, ...] = ()  # why a call was not read; it stays in `content`
