# SPDX-License-Identifier: Apache-2.0
"""PromptBuilder: converts a request to the token ids of its prompt."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from edgellm_ros.echo import quoted
from edgellm_ros.engine_directory.chat_template import ChatTemplate
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.runtime.conversation import (
    ASSISTANT,
    USER,
    AudioPart,
    ImagePart,
    Message,
    TextPart,
    VideoPart,
)
from edgellm_ros.runtime.request import LLMGenerationRequest
from edgellm_ros.runtime.text.tokenizer import Tokenizer

NO_TOKEN = -1  # an id that occurs in no prompt
KEPT_PROMPTS = 4  # whose ids are kept


class PromptBuilder:
    """Renders the chat template, converts it to ids, and expands its placeholders.

    Thread-safe.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, config: EngineConfig) -> None:
        if tokenizer.size > config.llm.vocab_size:
            raise ValueError(
                f"the tokenizer has {tokenizer.size} tokens, the language model {config.llm.vocab_size}"
            )
        self._tokenizer = tokenizer
        self._template = template
        self._vocab_size = config.llm.vocab_size
        self._encoded: OrderedDict[str, list[int]] = OrderedDict()  # ids by what was rendered, latest last
        self._encoding = threading.Lock()  # of `_encoded`
        self._image_token = _or_no_token(config.special_tokens.image_token_id)
        self._image_boundaries: tuple[list[int], list[int]] = [], []
        if config.vision is not None and config.vision.adds_image_boundaries:
            tokens = config.special_tokens
            start, end = map(_or_no_token, (tokens.vision_start_token_id, tokens.vision_end_token_id))
            self._image_boundaries = [start], [end]
        self._video_token = NO_TOKEN if config.video is None else config.video.token_id
        self._audio_token = _or_no_token(config.special_tokens.audio_token_id)
        self._history_token = config.expert.history_token_id if config.expert else NO_TOKEN
        self._sounds_only = config.transcribes
        self._text_only = config.vision is None and config.audio is None and config.expert is None

    def system_prefix(self, system_prompt: str) -> list[int]:
        """Return the ids of the prefix that all prompts of a system prompt share.

        ValueError if the system prompt is empty, or if the chat template does not put it first.
        """
        if not system_prompt:
            raise ValueError("the system prompt is empty")
        if self._sounds_only:
            request = LLMGenerationRequest(system_prompt=system_prompt)
            one, other = (self.build(request, (), sounds, ()) for sounds in ((), (1,)))
        else:
            one, other = (
                self.build(LLMGenerationRequest(text, system_prompt=system_prompt), (), (), ())
                for text in "a0"
            )
        ids = _common_prefix(one, other)
        if not ids:
            raise ValueError(
                "no prompt begins with this system prompt: the chat template puts the text first"
            )
        return ids

    def next_turn_prefix(
        self,
        request: LLMGenerationRequest,
        answer: str,
        image_tokens: Sequence[int],
        audio_tokens: Sequence[int],
        videos: Sequence[Sequence[int]] = (),
    ) -> list[int]:
        """Return the ids that the next turn's prompt begins with, whatever the user says.

        The ids end where the next message begins. The template may write the answer in other tokens than the
        model did, or leave out its reasoning. `request` has messages. ValueError if the template refuses the
        next turn.
        """
        answered = _with_answer(request, answer)
        prompts = []
        for text, token in (("a", NO_TOKEN), ("0", NO_TOKEN - 1)):
            history = [token] if self._history_token != NO_TOKEN else []
            messages = (*answered, Message(USER, text))
            turn = dataclasses.replace(request, messages=messages, continue_final_message=False)
            prompts.append(self.build(turn, image_tokens, audio_tokens, history, videos))
        return _common_prefix(*prompts)

    def build(
        self,
        request: LLMGenerationRequest,
        image_tokens: Sequence[int],
        audio_tokens: Sequence[int],
        history: Sequence[int],
        videos: Sequence[Sequence[int]] = (),
    ) -> list[int]:
        """Return the ids of the prompt.

        The user's content of the short form has this order: image_tokens[i] placeholders for image i, the
        ids videos[i] for video i, the history's tokens, audio_tokens[i] placeholders for sound i, and the
        text. In a conversation images, videos and sounds follow its order, and the history goes to the last
        message of the user, after its last image or video, with an instruction of navigation behind it.
        Special tokens in the texts of messages and tools stay plain text. ValueError if the template leaves
        out one of these, or the text that is to be continued, for text of the user if the model is for
        speech to text, and for ids that stand for no text.
        """
        if request.prompt_ids:
            return self._checked(request.prompt_ids)
        if request.messages is None:
            counts = len(image_tokens), len(videos), len(audio_tokens)
            messages = _short_form(request.system_prompt, request.prompt, *counts)
        else:
            messages = [_to_template(message) for message in request.messages]
        if self._sounds_only:
            _refuse_text(messages)
        if history:
            _add_history(messages, request.navigation)
        if self._text_only:
            for message in messages:
                message["content"] = _text_of(message["content"])
        variables = dict(request.chat_template_kwargs)
        if request.enable_thinking is not None:
            variables["enable_thinking"] = request.enable_thinking
        ids = self._encode(messages, request.tools, variables, request.continue_final_message)
        before, after = self._image_boundaries
        images = [[*before, *[self._image_token] * count, *after] for count in image_tokens]
        sounds = [[self._audio_token] * count for count in audio_tokens]
        ids = _fill(ids, self._image_token, images, "images")
        ids = _fill(ids, self._audio_token, sounds, "sounds")
        ids = _fill(ids, self._video_token, videos, "videos")  # which may have placeholders of their sound
        return _fill(ids, self._history_token, [history] if history else [], "trajectory histories")

    def _checked(self, ids: Sequence[int]) -> list[int]:
        """Return the ids of a prompt that the request gives."""
        placeholders = {self._image_token, self._video_token, self._audio_token, self._history_token}
        for index, token in enumerate(ids):
            if token >= self._vocab_size:
                raise ValueError(f"prompt_ids[{index}]: the model has {self._vocab_size} tokens, got {token}")
            if token in placeholders:
                raise ValueError(
                    f"prompt_ids[{index}]: {token} stands for an image, a video, a sound or a history"
                )
        return list(ids)

    def _encode(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: dict[str, Any],
        continue_final_message: bool,
    ) -> list[int]:
        """Render the template and convert its text to ids.

        Special tokens in texts stay plain text. The latest results are kept: a robot asks for every plan with
        the same words, and a new frame.
        """
        key = repr((messages, tools, sorted(variables.items(), key=repr), continue_final_message))
        with self._encoding:
            ids = self._encoded.get(key)
            if ids is None or self._template.reads_clock:
                ids = self._encoded[key] = self._render(messages, tools, variables, continue_final_message)
                if len(self._encoded) > KEPT_PROMPTS:
                    self._encoded.popitem(last=False)
            self._encoded.move_to_end(key)
            return ids

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: dict[str, Any],
        continue_final_message: bool,
    ) -> list[int]:
        texts: list[str] = []
        _change_texts(messages, tools, texts.append)
        guard, protected = self._tokenizer.protect(*texts)
        waiting = iter(protected)
        messages, tools = _change_texts(messages, tools, lambda text: next(waiting))
        if tools is not None:
            variables["tools"] = tools
        prompt = self._template.render(messages, variables, continue_final_message)
        return self._tokenizer.encode_prompt(prompt, guard)


def _short_form(
    system_prompt: str, prompt: str, images: int, videos: int, sounds: int
) -> list[dict[str, Any]]:
    """Return the messages of a request's short form."""
    content = [{"type": "image"}] * images + [{"type": "video"}] * videos + [{"type": "audio"}] * sounds
    messages: list[dict[str, Any]] = [{"role": USER, "content": [*content, {"type": "text", "text": prompt}]}]
    if system_prompt:
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def _with_answer(request: LLMGenerationRequest, answer: str) -> tuple[Message, ...]:
    """Return the messages of a conversation with the answer.

    The answer may continue the last message.
    """
    messages = request.messages or ()
    if not request.continue_final_message:
        return (*messages, Message(ASSISTANT, answer))
    last = messages[-1]
    content = last.content + answer if isinstance(last.content, str) else [*last.content, TextPart(answer)]
    return (*messages[:-1], dataclasses.replace(last, content=content))


def _to_template(message: Message) -> dict[str, Any]:
    """Return a message as the template reads it, without pixels and samples."""
    if isinstance(message.content, str):
        return {"role": message.role, "content": message.content, **message.fields}
    names = {ImagePart: "image", VideoPart: "video", AudioPart: "audio"}
    parts = [
        {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": names[type(part)]}
        for part in message.content
    ]
    return {"role": message.role, "content": parts, **message.fields}


def _add_history(messages: list[dict[str, Any]], navigation: str) -> None:
    """Add the trajectory history to the last message of the user.

    The history follows the last image or video of the message. The instruction of navigation follows it.
    """
    users = [message for message in messages if message["role"] == USER]
    if not users:
        raise ValueError("messages need one from the user, which the trajectory history is written to")
    content = users[-1]["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    seen = [place for place, part in enumerate(parts) if part["type"] in ("image", "video")]
    place = seen[-1] + 1 if seen else 0
    added: list[dict[str, Any]] = [{"type": "trajectory_history"}]
    if navigation:
        added.append({"type": "navigation", "text": navigation})
    users[-1]["content"] = [*parts[:place], *added, *parts[place:]]


def _refuse_text(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError for text of the user, which speech to text leaves out."""
    for message in messages:
        text = _text_of(message["content"]) if message["role"] == USER else ""
        if text.strip():
            raise ValueError(
                f"this engine writes what sounds say and reads no text of the user, got {quoted(text)}: give "
                "names that may be said as the system prompt"
            )


def _text_of(content: str | list[dict[str, Any]]) -> str:
    """Join the texts of a content.

    Templates of models without encoders expect a string.
    """
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _change_texts(
    messages: list[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    change: Callable[[str], Any],
) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Apply `change` to every text of messages and tools, always in the same order."""

    def content_of(content: str | list[dict[str, Any]]) -> Any:
        if isinstance(content, str):
            return change(content)
        return [{**part, "text": change(part["text"])} if "text" in part else part for part in content]

    changed = [
        {
            name: value if name == "role" else content_of(value) if name == "content" else _map(value, change)
            for name, value in message.items()
        }
        for message in messages
    ]
    return changed, None if tools is None else [_map(tool, change) for tool in tools]


def _map(value: Any, change: Callable[[str], Any]) -> Any:
    """Apply `change` to every string of a JSON value."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map(key, change): _map(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map(item, change) for item in value]
    return value


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> list[int]:
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return [token for token, _ in pairs]


def _or_no_token(token: int | None) -> int:
    return NO_TOKEN if token is None else token


def _fill(ids: Sequence[int], placeholder: int, contents: Sequence[Sequence[int]], what: str) -> list[int]:
    """Replace the i-th placeholder by contents[i]. ValueError for too few of them."""
    if not contents:
        return list(ids)
    filled: list[int] = []
    waiting = list(contents)
    for token in ids:
        filled += waiting.pop(0) if token == placeholder and waiting else [token]
    if waiting:
        raise ValueError(
            f"the chat template has {len(contents) - len(waiting)} placeholders for {len(contents)} {what}"
        )
    return filled
