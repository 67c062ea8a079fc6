# SPDX-License-Identifier: Apache-2.0
"""Parts of the server that need no connection."""

from __future__ import annotations

import itertools

import pytest

from edgellm_ros.serving.openai.errors import bad_request
from edgellm_ros.serving.openai.wire.call_marks import before_calls
from edgellm_ros.serving.openai.wire.fields import Fields
from edgellm_ros.serving.openai.wire.tools import read_tools


class TestBeforeCalls:
    @pytest.mark.parametrize(
        ("text", "settled"),
        [
            ("I look. <tool_call>{", "I look. "),
            ("I look. <tool_c", "I look. "),
            ("I look. <", "I look. "),
            ("I look. <b", "I look. <b"),
            ("I look. <tool_box> and", "I look. <tool_box> and"),
            ("a b <function=go>", "a b "),
            ("a b [TOOL_CA", "a b "),
            ("a b <TOOLCALL>[", "a b "),
            ('{"name": "go"', ""),
            (' [{"name"', ""),
            ("go", ""),
            ("go_to.it {", ""),
            ("go there", "go there"),
            ("", ""),
        ],
    )
    def test_what_may_be_a_call_is_held_back(self, text, settled):
        assert before_calls(text) == settled

    def test_what_was_sent_stays_a_prefix_of_what_is_sent(self):
        text = 'Well, 1 < 2 and <x>.\n<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>'
        sent = [before_calls(text[:end]) for end in range(len(text) + 1)]
        for one, other in itertools.pairwise(sent):
            assert other.startswith(one)
        assert sent[-1] == "Well, 1 < 2 and <x>.\n"


def test_references_of_a_tool_lead_to_their_new_place():
    schema = {"properties": {"a": {"$ref": "#/$defs/A"}, "b": {"$ref": "#"}}, "$defs": {"A": {"enum": [1]}}}
    functions = [{"function": {"name": name, "parameters": schema}} for name in ("f", "g")]
    forced = read_tools(Fields({"tools": functions, "tool_choice": "required"})).forced
    for index, call in enumerate(forced["anyOf"]):
        place = f"#/anyOf/{index}/properties/arguments"
        properties = call["properties"]["arguments"]["properties"]
        assert properties == {"a": {"$ref": f"{place}/$defs/A"}, "b": {"$ref": place}}


def test_a_wanted_call_has_no_arguments_that_the_function_does_not_take():
    schemas = ({"properties": {}}, {"properties": {}, "additionalProperties": True}, {"type": "object"}, None)
    tools = [{"function": {"name": f"f{i}", "parameters": schema}} for i, schema in enumerate(schemas)]
    forced = read_tools(Fields({"tools": tools, "tool_choice": "required"})).forced
    arguments = [call["properties"]["arguments"] for call in forced["anyOf"]]
    assert [each.get("additionalProperties") for each in arguments] == [False, True, None, None]


@pytest.mark.parametrize(
    ("text", "param", "message"),
    [
        (
            "messages[2] (user): content[0]: too large",
            "messages[2]",
            "messages[2] (user): content[0]: too large",
        ),
        (
            "json_schema {} cannot be used: x",
            "response_format",
            "response_format: json_schema {} cannot be used: x",
        ),
        ("the prompt\nis long", "prompt", "prompt: the prompt is long"),
        ("messages_of is odd", "prompt", "prompt: messages_of is odd"),
    ],
)
def test_errors_name_fields_of_the_request(text, param, message):
    names = {"messages": "messages", "json_schema": "response_format"}
    error = bad_request(ValueError(text), names, "prompt")
    assert (error.param, error.message) == (param, message)
