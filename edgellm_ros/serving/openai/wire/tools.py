# SPDX-License-Identifier: Apache-2.0
"""Tools that the model may or must call.

A call that `tool_choice` wants is written as JSON with a name and arguments, which a grammar forces. Other
calls are found in the answer by the format of the chat template (runtime/prompt/tool_calls.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgellm_ros.echo import quoted
from edgellm_ros.messages.json_checks import described
from edgellm_ros.runtime.request import LLMGenerationResponse, ToolCall
from edgellm_ros.serving.openai.limits import MAX_TOOLS
from edgellm_ros.serving.openai.wire.fields import Fields

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request.

    - forced: JSON schema of the call that the answer must be; None = the model decides
    - first_only: report one call at most
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    forced: Mapping[str, Any] | None = None
    first_only: bool = False

    def calls(self, response: LLMGenerationResponse) -> tuple[ToolCall, ...]:
        """Return the calls of an answer."""
        if self.forced is None:
            return response.tool_calls[: 1 if self.first_only else None]
        if not response.grammar_complete:  # cut by max_tokens or a stop string
            return ()
        call = json.loads(response.text)
        return (ToolCall(call["name"], call["arguments"]),)

    def content(self, response: LLMGenerationResponse) -> str:
        """Return an answer's text without its calls."""
        if self.calls(response):
            return "" if self.forced is not None else response.content
        return response.text


NO_TOOLS = ToolUse()


def read_tools(fields: Fields) -> ToolUse:
    """Read `tools`, `tool_choice` and `parallel_tool_calls`. ApiError 400."""
    tools = _tools(fields)
    choice = fields.take("tool_choice")
    first_only = not fields.flag("parallel_tool_calls", True)
    if choice is not None and not tools and choice != "none":
        raise fields.refuse("tool_choice", "is for requests with tools")
    if isinstance(choice, dict):
        wanted = Fields(choice, "tool_choice")
        wanted.choice("type", ("function",), "function")
        function = Fields(wanted.need("function"), "tool_choice.function")
        name = function.text("name")
        function.done()
        wanted.done()
        chosen = [tool for tool in tools if tool["function"]["name"] == name]
        if not chosen:
            raise fields.refuse("tool_choice", f"no tool is called {quoted(name)}")
        return ToolUse(tools, _schema(chosen))
    choice = fields.choice("tool_choice", ("none", "auto", "required"), "auto")
    if choice == "none":
        return NO_TOOLS
    return ToolUse(tools, _schema(tools) if choice == "required" else None, first_only)


def _tools(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    listed = fields.listed("tools", MAX_TOOLS) or []
    names: list[str] = []
    for index, tool in enumerate(listed):
        item = Fields(tool, f"tools[{index}]")
        item.choice("type", ("function",), "function")
        function = Fields(item.need("function"), f"tools[{index}].function")
        item.done()
        name = function.text("name")
        if not NAME.fullmatch(name):
            expected = "expected 1 to 64 letters, digits, _, . and -"
            raise function.refuse("name", f"{expected}, got {quoted(name)}")
        if name in names:
            raise function.refuse("name", f"{quoted(name)} is the name of two tools")
        names.append(name)
        function.text("description")
        function.flag("strict")
        parameters = function.take("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise function.refuse("parameters", f"expected an object, got {described(parameters)}")
        function.done()
    return tuple(listed)


def _schema(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the JSON schema of a call of one of these tools."""
    calls = []
    for index, tool in enumerate(tools):
        function = tool["function"]
        parameters = function.get("parameters") or {"type": "object"}
        if "properties" in parameters:  # a function takes no others, unless it says so
            parameters = {"additionalProperties": False, **parameters}
        call = {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                "arguments": _moved(parameters, f"#/anyOf/{index}/properties/arguments"),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        calls.append(call)
    return {"anyOf": calls}


def _moved(schema: Any, place: str) -> Any:
    """Return a schema whose references lead to its new place."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved
