# SPDX-License-Identifier: Apache-2.0
"""Parts of the server that need no connection."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import CancelledError

import pytest

from edgellm_ros.runtime.request import LLMGenerationRequest
from edgellm_ros.serving.openai.errors import bad_request
from edgellm_ros.serving.openai.one_at_a_time import OneAtATime
from edgellm_ros.serving.openai.wire.call_marks import before_calls
from edgellm_ros.serving.openai.wire.fields import Fields
from edgellm_ros.serving.openai.wire.tools import read_tools
from fixtures.served_openai import ScriptedRuntime


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


class TestOneAtATime:
    @pytest.fixture
    def runtime(self, tiny_engine):
        return ScriptedRuntime(tiny_engine)

    @pytest.fixture
    def queue(self, runtime):
        queue = OneAtATime(runtime)
        yield queue
        queue.close()

    @staticmethod
    def request(*ids: int) -> LLMGenerationRequest:
        return LLMGenerationRequest(prompt_ids=ids)

    def test_pieces_join_to_the_answer_of_the_result(self, queue):
        handle = queue.submit(self.request(1, 2, 3))
        pieces = list(handle)
        assert [piece.text for piece in pieces] == ["1", " 2", " 3", ""]
        assert pieces[-1].token_ids == tuple(handle.result(1).token_ids) == (5, 5, 5)
        assert handle.done
        assert list(handle) == []

    def test_high_priorities_and_early_deadlines_come_first(self, queue, runtime):
        runtime.go.clear()
        first = queue.submit(self.request(1, 1))
        next(iter(first))
        handles = [
            queue.submit(self.request(2)),
            queue.submit(self.request(3), deadline=9.0),
            queue.submit(self.request(4), deadline=5.0),
            queue.submit(self.request(5), priority=1),
        ]
        runtime.go.set()
        for handle in handles:
            handle.result(5)
        assert runtime.begun == ["1 1", "5", "4", "3", "2"]

    def test_a_cancelled_request_ends_at_its_next_token_or_is_never_begun(self, queue, runtime):
        runtime.go.clear()
        first, second = queue.submit(self.request(1, 2)), queue.submit(self.request(3))
        next(iter(first))
        second.cancel()
        first.cancel()
        assert first.result(5).finish_reason == "cancelled"
        with pytest.raises(CancelledError):
            second.result(5)
        assert list(second) == []
        assert runtime.begun == ["1 2"]

    def test_errors_are_those_of_the_runtime(self, queue, runtime):
        runtime.error = ValueError("no")
        handle = queue.submit(self.request(1))
        assert [piece.text for piece in handle] == ["1"]
        with pytest.raises(ValueError, match="no"):
            handle.result(5)

    def test_after_the_end_nothing_is_taken_or_left_open(self, runtime):
        queue = OneAtATime(runtime)
        runtime.go.clear()
        handles = [queue.submit(self.request(index, index)) for index in range(3)]
        next(iter(handles[0]))
        queue.close()
        assert all(handle.done for handle in handles)
        with pytest.raises(CancelledError):
            queue.submit(self.request(1))
        assert "answers" not in {thread.name for thread in threading.enumerate()}
