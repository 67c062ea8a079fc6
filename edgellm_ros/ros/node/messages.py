# SPDX-License-Identifier: Apache-2.0
"""Converts between ROS messages and the runtime's requests and answers."""

from __future__ import annotations

import array
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from std_msgs.msg import Header

from edgellm_ros.action import Plan as PlanAction
from edgellm_ros.diffusion.action_head import SpaceConfig
from edgellm_ros.diffusion.chunking import FORMS, ChunkCondition
from edgellm_ros.echo import quoted
from edgellm_ros.msg import ActionChunk, AudioChunk, ChatMessage, Generation, PreviousChunk, ToolCall
from edgellm_ros.multimodal.audio.pcm import PcmFormat, join
from edgellm_ros.multimodal.audio.sound_stream import Utterance
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.ros.messaging import to_time
from edgellm_ros.ros.node.sensors.image_size import MAX_PIXELS
from edgellm_ros.ros.node.sensors.images import decode_image
from edgellm_ros.ros.node.settings.parameters import MAX_INT32, Parameters
from edgellm_ros.runtime.conversation import ImagePart, Message, TextPart
from edgellm_ros.runtime.request import MAX_DENOISE_STEPS, LLMGenerationResponse
from edgellm_ros.runtime.sampling_params import SAMPLED, SamplingParams


def sampling_from_goal(goal: PlanAction.Goal, defaults: Parameters) -> SamplingParams:
    """Return the sampling parameters of a goal, and check its other numbers.

    `defaults` has the values of a goal without its own, the grammar excepted. Raises ValueError for a value
    out of range.
    """
    message = goal.sampling
    _check_range("action_samples", goal.action_samples, MAX_INT32, "text only")
    _check_range("denoise_steps", goal.denoise_steps, MAX_DENOISE_STEPS, "the checkpoint's default")
    _check_range("max_tokens", message.max_tokens, MAX_INT32, "the node's parameter max_tokens")
    return SamplingParams(
        **{**_sampled(defaults), **_sampled(message)},
        max_tokens=message.max_tokens if message.max_tokens != 0 else defaults.max_tokens,
        stop=tuple(message.stop),
        seed=message.seed if message.seed >= 0 else defaults.seed,
        json_schema=message.json_schema,
        regex=message.regex,
        choices=tuple(message.choices),
    )


def sampling_from_parameters(parameters: Parameters) -> SamplingParams:
    """Return the sampling parameters of a command."""
    return SamplingParams(
        **_sampled(parameters),
        max_tokens=parameters.max_tokens,
        seed=parameters.seed,
        json_schema=parameters.json_schema,
        regex=parameters.regex,
        choices=tuple(text for text in parameters.choices if text),
    )


def _sampled(given: Any) -> dict[str, Any]:
    """Return the values of SAMPLED that are not negative; NaN stays, to be refused.

    given: Parameters, whose other values are the checkpoint's, or the `sampling` of a goal.
    """
    return {name: value for name in SAMPLED if not (value := getattr(given, name)) < 0}


def texts_of_grammar(given: Any) -> tuple[str, ...]:
    """Return the texts of a grammar, equal for equal ones.

    given: Parameters, or the `sampling` of a goal.
    """
    return given.json_schema, given.regex, *filter(None, given.choices)


def texts_of_message(message: ChatMessage) -> tuple[str, ...]:
    """Return an earlier message's texts: role, text, tool calls' names and arguments."""
    calls = (text for call in message.tool_calls for text in (call.name, call.arguments))
    return message.role, message.text, *calls


def earlier_messages_from_goal(
    earlier: Sequence[ChatMessage], max_pixels: int = MAX_PIXELS
) -> tuple[Message, ...]:
    """Convert the earlier messages of a goal; `max_pixels`: of an image.

    ValueError names the index of a message with an unknown role, with an image that cannot be decoded, or
    with tool calls that cannot be its own.
    """
    roles = (ChatMessage.USER, ChatMessage.ASSISTANT, ChatMessage.TOOL)
    messages = []
    for index, message in enumerate(earlier):
        if message.role not in roles:
            known, got = ", ".join(roles), quoted(message.role)
            raise ValueError(f"earlier_messages[{index}]: role must be one of {known}, got {got}")
        try:
            images = [ImagePart(decode_image(image, max_pixels)) for image in message.images]
        except ValueError as error:
            raise ValueError(f"earlier_messages[{index}] ({message.role}): {error}") from None
        content = (*images, TextPart(message.text)) if images else message.text
        if message.tool_calls and message.role != ChatMessage.ASSISTANT:
            raise ValueError(f"earlier_messages[{index}] ({message.role}): only an assistant has tool_calls")
        calls = [_to_template(call, index) for call in message.tool_calls]
        messages.append(Message(message.role, content, {"tool_calls": calls} if calls else {}))
    return tuple(messages)


def chunk_condition_from_message(message: PreviousChunk, space: SpaceConfig) -> ChunkCondition | None:
    """Convert the previous chunk of a goal; None if its form is "off".

    ValueError for a value out of range, or a chunk that is not of the action space.
    """
    if message.form == PreviousChunk.OFF:
        return None
    if message.form not in FORMS:
        known, got = ", ".join((PreviousChunk.OFF, *FORMS)), quoted(message.form)
        raise ValueError(f"previous_chunk: form must be one of {known}, got {got}")
    chunk, columns = message.chunk, space.dim
    if tuple(chunk.names) != space.names:
        known, got = ", ".join(space.names), quoted(", ".join(chunk.names))
        raise ValueError(f"previous_chunk: the names of chunk must be {known}, got {got}")
    if chunk.dt != space.dt:
        raise ValueError(f"previous_chunk: dt of chunk must be {space.dt}, got {chunk.dt}")
    if len(chunk.values) != chunk.horizon * columns:
        raise ValueError(
            f"previous_chunk: chunk has {len(chunk.values)} values, expected horizon {chunk.horizon} x "
            f"{columns} names"
        )
    try:
        return ChunkCondition(
            actions=np.array(chunk.values, np.float32).reshape(-1, columns),
            executed=message.executed,
            delay=message.delay,
            form=message.form,
            horizon=message.horizon if message.horizon != 0 else None,
            schedule=message.schedule or "linear",
            max_guidance_weight=message.max_guidance_weight if message.max_guidance_weight != 0 else None,
        )
    except ValueError as error:
        raise ValueError(f"previous_chunk: {error}") from None


def tools_from_goal(tools: Sequence[str]) -> tuple[dict[str, Any], ...]:
    """Convert a goal's tools; ValueError with the index of one that is no JSON object."""
    return tuple(_json_object(tool, f"tools[{index}]") for index, tool in enumerate(tools))


def _to_template(call: ToolCall, index: int) -> dict[str, Any]:
    """Convert a tool call of an earlier message to what chat templates read."""
    what = f"earlier_messages[{index}]: the arguments of {quoted(call.name)}"
    arguments = _json_object(call.arguments, what)
    return {"type": "function", "function": {"name": call.name, "arguments": arguments}}


def _json_object(text: str, what: str) -> dict[str, Any]:
    """Parse the text of a JSON object. ValueError says what it is not."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} must be JSON text, got {quoted(text)}: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be a JSON object, got {quoted(text)}")
    return value


def sound_from_messages(chunks: Sequence[AudioChunk]) -> Sound:
    """Join the audio chunks of a goal into one sound.

    Raises ValueError for chunks that cannot be decoded.
    """
    return join(
        [(PcmFormat(chunk.encoding, chunk.sample_rate, chunk.channels), chunk.data) for chunk in chunks]
    )


def to_audio_chunk(utterance: Utterance) -> AudioChunk:
    """Convert an utterance to a message with the samples of the model's input.

    A goal with this message as its audio gives the same plan.
    """
    samples = utterance.sound.samples
    header = Header(stamp=to_time(utterance.stamp))
    return AudioChunk(
        header=header,
        encoding=AudioChunk.F32LE,
        sample_rate=utterance.sound.sample_rate,
        channels=1,
        data=samples.astype("<f4").tobytes(),
    )


def to_generation(
    response: LLMGenerationResponse,
    header: Header,
    request_id: str,
    queue_s: float,
    total_s: float,
) -> Generation:
    """Convert an answer without its actions.

    `queue_s` and `total_s` count from the request's arrival; the runtime's own queue comes after `queue_s`.
    """
    metrics = response.metrics
    queued_s = metrics.get("queued_s", 0.0)  # of a submitted request
    return Generation(
        header=header,
        request_id=request_id,
        text=response.text,
        content=response.content,
        tool_calls=[
            ToolCall(name=call.name, arguments=json.dumps(call.arguments)) for call in response.tool_calls
        ],
        tool_call_errors=response.tool_call_errors,
        token_count=len(response.token_ids),
        token_ids=array.array("i", response.token_ids),
        prompt_token_count=response.prompt_tokens,
        finish_reason=response.finish_reason,
        grammar_complete=bool(response.grammar_complete),
        lora=response.lora,
        action_chunk_count=0 if response.actions is None else len(response.actions),
        queue_latency=queue_s + queued_s,
        vision_latency=metrics["vision_s"],
        audio_latency=metrics["audio_s"],
        prefill_latency=metrics["prefill_s"],
        first_token_latency=metrics["first_token_s"] - queued_s,
        decode_latency=metrics["decode_s"],
        action_latency=metrics["action_s"],
        total_latency=total_s,
    )


def to_action_chunks(
    response: LLMGenerationResponse, space: SpaceConfig, header: Header, request_id: str
) -> list[ActionChunk]:
    """Convert the actions of an answer, one chunk per sample.

    Empty if the answer has no actions.
    """
    actions = np.zeros((0, space.horizon, space.dim)) if response.actions is None else response.actions
    return [
        ActionChunk(
            header=header,
            request_id=request_id,
            dt=space.dt,
            horizon=len(sample),
            names=list(space.names),
            units=list(space.units),
            values=array.array("f", np.ascontiguousarray(sample, np.float32).tobytes()),
            sample_index=index,
            noise_seed=response.noise_seed,
        )
        for index, sample in enumerate(actions)
    ]


def _check_range(name: str, value: int, high: int, zero: str) -> None:
    """Raise ValueError unless 0 <= value <= high; `zero` is the meaning of 0."""
    if not 0 <= value <= high:
        raise ValueError(f"{name} must be an integer from 0 to {high} (0 = {zero}), got {value}")
