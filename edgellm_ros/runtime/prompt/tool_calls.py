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

import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from edgellm_ros.echo import printable, quoted
from edgellm_ros.runtime.prompt.chat_template import ChatTemplate
from edgellm_ros.runtime.prompt.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

AUTO, NONE = "auto", "none"
THINK, END_OF_THINKING = "<think>", "</think>"
MARK = "\u2603"  # stands for an answer in a rendered template
BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
NULLS = ("null", "None")


@dataclass(frozen=True)
class ToolCall:
    """A function that the model calls, with its arguments: a JSON object."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class ParsedAnswer:
    """What an answer says, and what it calls.

    - content: the text without the calls that were read, and without the space around them
    - errors: why a call was not read; it stays in the content
    """

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()


# Reads calls from a position of a text; returns them with the position behind. ValueError says what is wrong.
Read = Callable[[str, re.Match[str], Sequence[Mapping[str, Any]]], tuple[list[ToolCall], int]]


@dataclass(frozen=True)
class ToolCallFormat:
    """A form of calls. `begin` is found where calls begin; `read` reads what follows."""

    name: str
    begin: re.Pattern[str]
    read: Read

    def parse(
        self, text: str, tools: Sequence[Mapping[str, Any]] = (), begins_thinking: bool = False
    ) -> ParsedAnswer:
        """Read all calls of an answer.

        - tools: JSON schemas, which give the types of untyped values
        - begins_thinking: whether the prompt has opened the reasoning
        """
        calls: list[ToolCall] = []
        errors: list[str] = []
        start = _after_thinking(text, begins_thinking)
        content, answer, kept, position = text[:start], text[start:], 0, 0
        while (begin := self.begin.search(answer, position)) is not None:
            try:
                found, position = self.read(answer, begin, tools)
            except (ValueError, RecursionError) as error:
                errors.append(f"a tool call is not read: {printable(str(error))}")
                position = max(begin.end(), begin.start() + 1)
                continue
            calls += found
            content = _join(content, answer[kept : begin.start()])
            kept = position
        return ParsedAnswer(_join(content, answer[kept:]) if calls else text, tuple(calls), tuple(errors))


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
    """Return a call as chat templates read those of a message.

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
    """Return the part of a text between what it shares with another at both ends."""
    start, limit = 0, min(len(text), len(other))
    while start < limit and text[start] == other[start]:
        start += 1
    end = 0
    while end < limit - start and text[-1 - end] == other[-1 - end]:
        end += 1
    return text[start : len(text) - end]


def _after_thinking(text: str, begins_thinking: bool) -> int:
    """Return where the answer begins after its reasoning.

    The calls of the reasoning are only thought of.
    """
    if not begins_thinking and not text.lstrip().startswith(THINK):
        return 0
    end = text.find(END_OF_THINKING)
    return len(text) if end < 0 else end + len(END_OF_THINKING)


def _join(before: str, after: str) -> str:
    """Join the content before and after a call."""
    return "\n".join(part for part in (before.strip(), after.strip()) if part)


def _read_json(text: str, position: int) -> tuple[Any, int]:
    """Read a JSON value after white space; return it with the position behind."""
    position = _skip(text, position)
    if position == len(text):
        raise ValueError("it ends before its JSON begins")
    return DECODER.raw_decode(text, position)


def _refuse(number: str) -> Any:
    raise ValueError(f"{number[:20]} is not a finite number")


def _to_float(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _refuse(digits)


DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_to_float)


def _skip(text: str, position: int, also: str = "") -> int:
    """Return the position after white space and further characters."""
    while position < len(text) and (text[position].isspace() or text[position] in also):
        position += 1
    return position


def _end(text: str, position: int, mark: str) -> int:
    """Return the position behind the end mark of a call.

    The mark may be missing at the end of the text.
    """
    after = _skip(text, position)
    if text.startswith(mark, after):
        return after + len(mark)
    if after < len(text):
        raise ValueError(f"{quoted(text[after : after + 20])} in place of {mark}")
    return after


def _to_call(value: Any) -> ToolCall:
    """Check the JSON of a call: a name, and arguments as an object or JSON text."""
    if not isinstance(value, dict):
        raise ValueError(f"expected an object with a name, got {quoted(value)}")
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if not isinstance(name, str):
        raise ValueError(f"the name must be a string, got {quoted(name)}")
    if isinstance(arguments, str):
        arguments = DECODER.decode(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {quoted(name)} must be an object, got {quoted(arguments)}")
    return _named(name, arguments)


def _named(name: str, arguments: Mapping[str, Any]) -> ToolCall:
    """Make a call. ValueError for a name that is empty or not printable."""
    if not name or not name.isprintable():
        raise ValueError(f"the name must be printable and not empty, got {quoted(name)}")
    return ToolCall(name, arguments)


def _to_calls(value: Any) -> list[ToolCall]:
    return [_to_call(item) for item in (value if isinstance(value, list) else [value])]


def _tagged(mark: str) -> Read:
    """Make the reader of JSON, an object or a list of them, up to an end mark."""

    def read(
        text: str, begin: re.Match[str], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[list[ToolCall], int]:
        value, position = _read_json(text, begin.end())
        return _to_calls(value), _end(text, position, mark)

    return read


def _read_llama(
    text: str, begin: re.Match[str], tools: Sequence[Mapping[str, Any]]
) -> tuple[list[ToolCall], int]:
    """Read objects that are the whole answer."""
    calls, position = [], begin.end()
    while position < len(text):
        value, position = _read_json(text, position)
        calls.append(_to_call(value))
        position = _skip(text, position, also=";,")
    return calls, position


def _read_mistral(
    text: str, begin: re.Match[str], tools: Sequence[Mapping[str, Any]]
) -> tuple[list[ToolCall], int]:
    """Read a list of objects, or the name before [ARGS] and the arguments behind."""
    named = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]").match(text, begin.end())
    if named is None:
        value, position = _read_json(text, begin.end())
        return _to_calls(value), position
    value, position = _read_json(text, named.end())
    return [_to_call({"name": named[1], "arguments": value})], position


PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
END_OF_FUNCTION = re.compile(r"\s*</function>(?:\s*</tool_call>)?")


def _read_xml(
    text: str, begin: re.Match[str], tools: Sequence[Mapping[str, Any]]
) -> tuple[list[ToolCall], int]:
    """Read parameters between tags. Their types come from the tool's schema."""
    name, position = begin[1].strip(), begin.end()
    properties = _properties(name, tools)
    arguments: dict[str, Any] = {}
    while (parameter := PARAMETER.match(text, position)) is not None:
        key, position = parameter[1].strip(), parameter.end()
        arguments[key] = _typed(parameter[2], properties.get(key))
    end = END_OF_FUNCTION.match(text, position)
    if end is None:
        raise ValueError(f"{quoted(text[position : position + 20])} in place of </function>")
    return [_named(name, arguments)], end.end()


def _properties(name: str, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the schemas of a tool's parameters; empty for an unknown tool."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            return properties if isinstance(properties, Mapping) else {}
    return {}


def _types(schema: Any) -> list[str]:
    """Return the JSON types that a schema allows."""
    if not isinstance(schema, Mapping):
        return []
    types = [kind for kind in _listed(schema.get("type")) if isinstance(kind, str)]
    for union in ("anyOf", "oneOf"):
        for choice in _listed(schema.get(union)):
            types += _types(choice)
    return [*types, "null"] if schema.get("nullable") else types


def _listed(value: Any) -> Sequence[Any]:
    """Return a list as it is, and another value as a list of it.

    Schemas of clients are not checked.
    """
    return value if isinstance(value, (list, tuple)) else [value]


def _typed(text: str, schema: Any) -> Any:
    """Convert a value by its schema; text that is not of an allowed type stays text."""
    types = _types(schema)
    if "null" in types and text.strip() in NULLS:
        return None
    if "boolean" in types and text.strip().lower() in BOOLEANS:
        return BOOLEANS[text.strip().lower()]
    try:
        value = DECODER.decode(text)
    except (ValueError, RecursionError):
        return text
    kinds = {dict: "object", list: "array", float: "number", int: "integer"}
    kind = kinds.get(type(value))
    if kind in types or (kind == "integer" and "number" in types):
        return value
    if kind == "number" and "integer" in types and value.is_integer():
        return int(value)
    return text


FORMATS = {
    each.name: each
    for each in (
        ToolCallFormat("hermes", re.compile(r"<tool_call>(?=\s*[\[{])"), _tagged("</tool_call>")),
        ToolCallFormat("xml", re.compile(r"(?:<tool_call>\s*)?<function=([^>\n]+)>"), _read_xml),
        ToolCallFormat("llama", re.compile(r'\A\s*(?:<\|python_tag\|>\s*)?(?=\{\s*"name")'), _read_llama),
        ToolCallFormat("mistral", re.compile(r"\[TOOL_CALLS\]"), _read_mistral),
        ToolCallFormat("nemotron", re.compile(r"<TOOLCALL>"), _tagged("</TOOLCALL>")),
    )
}
TOOL_CALL_FORMATS = (AUTO, NONE, *FORMATS)
