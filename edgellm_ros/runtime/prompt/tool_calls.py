# SPDX-License-Identifier: Apache-2.0
"""Tool calls in answers: read as the family's chat template writes them.

  answer    I look. <tool_call>{"name": "find", "arguments": {"what": "box"}}</tool_call>
  content   I look.
  calls     find(what="box")

A model that was given tools writes its calls as text. Its form follows from the chat template, which writes
the calls of earlier messages: a call with known values is rendered, and the format that reads the same values
back is the model's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from edgellm_ros.echo import quoted
from edgellm_ros.engine_directory.chat_template import ChatTemplate
from edgellm_ros.runtime.prompt.tool_call_formats import FORMATS, THINK, ParsedAnswer, ToolCallFormat
from edgellm_ros.runtime.request import ToolCall
from edgellm_ros.runtime.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

AUTO, NONE = "auto", "none"
MARK = "\u2603"  # stands for an answer in a rendered template
TOOL_CALL_FORMATS = (AUTO, NONE, *FORMATS)


def find_format(template: ChatTemplate) -> ToolCallFormat:
    """Return the format in which a chat template writes calls.

    ValueError if it writes none, one that no format reads, or one that several formats read.
    """
    call = ToolCall("name_of_the_tool", {"first": "one word", "second": "7 x"})
    tool = {"name": "other", "description": "b", "parameters": {"type": "object", "properties": {}}}
    try:
        plain, called = (
            template.render(
                [{"role": "user", "content": "a"}, {"role": "assistant", **answer}],
                {"tools": [{"type": "function", "function": tool}]},
            )
            for answer in ({"content": MARK}, {"content": "", "tool_calls": [_to_template(call)]})
        )
    except ValueError as error:
        raise ValueError(f"the chat template writes no tool calls: {error}") from None
    written, expected = _difference(called, plain), ParsedAnswer("", (call,))
    if call.name not in written:
        raise ValueError("the chat template writes no tool calls")
    found = [each for each in FORMATS.values() if each.parse(written) == expected]
    if not found:
        raise ValueError(f"no format reads the tool calls of the chat template: {quoted(written)}")
    if len(found) > 1:
        names = " and ".join(each.name for each in found)
        raise ValueError(f"the formats {names} read the tool calls of the chat template: choose one of them")
    return found[0]


def _to_template(call: ToolCall) -> dict[str, Any]:
    """Return a call in the form that chat templates expect in a message.

    Mistral wants an id of 9 characters.
    """
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": "call00001", "type": "function", "function": function}


class ToolCallReader:
    """Reads the tool calls of a model's answers.

    `name`: one of TOOL_CALL_FORMATS; "auto" asks the chat template when the first answer is read. ValueError
    for another name.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, name: str = AUTO) -> None:
        check_format(name)
        self._tokenizer = tokenizer
        self._template = template
        self._name = name

    def read(
        self,
        token_ids: Sequence[int],
        text: str,
        stop: Sequence[str],
        prompt_end: Sequence[int],
        tools: Sequence[Mapping[str, Any]],
    ) -> ParsedAnswer:
        """Read the calls of an answer.

        token_ids: without the stop token; text: without special tokens, which may be marks of calls; stop:
        strings that end an answer; prompt_end: some tokens before the answer.
        """
        if self.format is None:
            return ParsedAnswer(text)
        whole = self._tokenizer.decode(token_ids, special_tokens=True)
        whole = whole[: min((at for each in stop if (at := whole.find(each)) >= 0), default=len(whole))]
        before = self._tokenizer.decode(prompt_end, special_tokens=True)
        found = self.format.parse(whole, tools, before.rstrip().endswith(THINK))
        if not found.tool_calls:
            return replace(found, content=text)
        content = found.content
        for mark in self._tokenizer.special_texts:
            content = content.replace(mark, "")
        return replace(found, content=content.strip())

    @cached_property
    def format(self) -> ToolCallFormat | None:
        """The format of the model's calls; None if none is known or wanted.

        The log says if none is known.
        """
        if self._name != AUTO:
            return FORMATS.get(self._name)
        try:
            return find_format(self._template)
        except ValueError as error:
            logger.warning("answers are not searched for tool calls: %s (set tool_call_format)", error)
            return None


def check_format(name: str) -> None:
    """Raise ValueError unless this is one of TOOL_CALL_FORMATS."""
    if name not in TOOL_CALL_FORMATS:
        expected = ", ".join(TOOL_CALL_FORMATS)
        raise ValueError(f"tool_call_format must be one of {expected}, got {quoted(name)}")


def _difference(text: str, other: str) -> str:
    """Return a text without the prefix and suffix that it shares with another."""
    start, limit = 0, min(len(text), len(other))
    while start < limit and text[start] == other[start]:
        start += 1
    end = 0
    while end < limit - start and text[-1 - end] == other[-1 - end]:
        end += 1
    return text[start : len(text) - end]
