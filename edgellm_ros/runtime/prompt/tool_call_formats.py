# SPDX-License-Identifier: Apache-2.0
"""Formats in which models write tool calls, and their readers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgellm_ros.echo import printable, quoted
from edgellm_ros.runtime.request import ToolCall

THINK, END_OF_THINKING = "<think>", "</think>"
BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
NULLS = ("null", "None")


@dataclass(frozen=True)
class ParsedAnswer:
    """An answer split into text and tool calls.

    - content: the text without the calls that were read, and without the space around them
    - errors: why a call was not read; it stays in the content
    """

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()


# Reads calls from a position of a text; returns them and the position after. ValueError says what is wrong.
Read = Callable[[str, re.Match[str], Sequence[Mapping[str, Any]]], tuple[list[ToolCall], int]]


@dataclass(frozen=True)
class ToolCallFormat:
    """A format of tool calls: `begin` matches their start, `read` parses the rest."""

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


def _after_thinking(text: str, begins_thinking: bool) -> int:
    """Return where the answer begins after its reasoning.

    Calls inside the reasoning are not calls of the answer.
    """
    if not begins_thinking and not text.lstrip().startswith(THINK):
        return 0
    end = text.find(END_OF_THINKING)
    return len(text) if end < 0 else end + len(END_OF_THINKING)


def _join(before: str, after: str) -> str:
    """Join the content before and after a call."""
    return "\n".join(part for part in (before.strip(), after.strip()) if part)


def _read_json(text: str, position: int) -> tuple[Any, int]:
    """Read a JSON value after white space; return it and the position after it."""
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
    """Return the position after the end mark of a call.

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
    """Read a list of objects, or a name, [ARGS] and arguments."""
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
