# SPDX-License-Identifier: Apache-2.0
"""OpenAI's own client against the server, around a tiny engine."""

from __future__ import annotations

import base64
import io
import json
from typing import Literal

import cv2
import numpy as np
import openai
import pytest
import soundfile
from jsonschema import validate
from pydantic import BaseModel, Field

from edgellm_ros.builder import export
from edgellm_ros.io.image_file import read_image
from edgellm_ros.io.sound_file import read_sound
from edgellm_ros.runtime.conversation import AudioPart, ImagePart, Message, TextPart
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams
from fixtures.reference_inputs import make_sound
from fixtures.served_openai import MODEL, client, serving
from fixtures.tiny_adapter import write_adapter

LAST = 3  # layer of the tiny model
SAY = [{"role": "user", "content": "what do you see?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "the weather of a place",
        "parameters": {
            "type": "object",
            "properties": {"days": {"$ref": "#/$defs/Days"}},
            "required": ["days"],
            "additionalProperties": False,
            "$defs": {"Days": {"type": "integer", "minimum": 1, "maximum": 3}},
        },
    },
}
STOP = {"type": "function", "function": {"name": "stop"}}
CALL = 'i look.\n<tool_call>\n{"name": "weather", "arguments": {"days": 2}}\n</tool_call>'


@pytest.fixture(scope="module")
def served(tiny_checkpoint, tmp_path_factory):
    """The runtime, and the port of its server."""
    folder = tmp_path_factory.mktemp("openai")
    limits = {"max_kv_cache_capacity": 768, "max_batch_size": 1}
    export(tiny_checkpoint, folder / "engine", max_lora_rank=4, hidden_state_layers=(LAST,), **limits)
    adapter = write_adapter(folder / "red", tiny_checkpoint, strength=4.0)
    options = {"lora_dirs": {"red": adapter}, "tool_call_format": "hermes"}
    with (
        LLMInferenceRuntime(folder / "engine", **options) as runtime,
        serving(runtime, max_tokens=300) as port,
    ):
        yield runtime, port


@pytest.fixture(scope="module")
def runtime(served):
    return served[0]


@pytest.fixture(scope="module")
def chat(served):
    """`chat(messages, ...)`: the answer of the client, or its stream."""
    with client(served[1]) as made:

        def create(messages=SAY, max_tokens=8, **options):
            asked = {"model": MODEL, "messages": messages, "max_completion_tokens": max_tokens, **options}
            return made.chat.completions.create(**asked)

        create.client = made
        yield create


@pytest.fixture(scope="module")
def expected(runtime):
    """`expected(messages, ...)`: the runtime's own answer."""

    def answer(*messages, lora="base", **sampling):
        asked = messages or (Message("user", "what do you see?"),)
        params = SamplingParams(**{"max_tokens": 8, **sampling})
        return runtime.handle_request(LLMGenerationRequest(messages=asked, lora=lora, sampling=params))

    return answer


class TestChat:
    def test_an_answer_is_that_of_the_runtime(self, chat, expected):
        answer = chat()
        found = expected()
        (choice,) = answer.choices
        assert (choice.message.content, choice.message.role) == (found.text, "assistant")
        assert (choice.finish_reason, choice.message.tool_calls, choice.logprobs) == ("length", None, None)
        usage = (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens)
        assert usage == (found.prompt_tokens, 8, found.prompt_tokens + 8)
        assert (answer.model, answer.object) == (MODEL, "chat.completion")
        assert chat().usage.prompt_tokens_details.cached_tokens > 0

    def test_a_stream_has_the_same_text_in_pieces(self, chat, expected):
        stream = [*chat(max_tokens=20, stream=True, stream_options={"include_usage": True})]
        *events, last = stream
        assert events[0].choices[0].delta.role == "assistant"
        pieces = [event.choices[0].delta.content or "" for event in events]
        assert "".join(pieces) == expected(max_tokens=20).text
        assert sum(map(bool, pieces)) > 5
        assert [event.choices[0].finish_reason for event in events[-2:]] == [None, "length"]
        assert {event.usage for event in events} == {None}
        assert (last.choices, last.usage.completion_tokens) == ([], 20)
        assert len({event.id for event in stream}) == 1
        assert not [event for event in chat(stream=True) if not event.choices]

    def test_roles_parts_and_names_are_those_of_the_runtime(self, chat, expected):
        messages = [
            {"role": "developer", "content": [{"type": "text", "text": "be brief"}]},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "hello", "refusal": None, "annotations": []},
            {"role": "user", "content": "go", "name": "anna"},
        ]
        found = expected(
            Message("system", [TextPart("be brief")]),
            Message("user", "hi"),
            Message("assistant", "hello"),
            Message("user", "go", {"name": "anna"}),
        )
        assert chat(messages).choices[0].message.content == found.text

    def test_an_image_and_a_sound_in_the_request_are_seen_and_heard(self, chat, expected):
        png = cv2.imencode(".png", np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8))[
            1
        ].tobytes()
        file = io.BytesIO()
        soundfile.write(file, make_sound(0.5, 16000), 16000, format="wav")
        wav = file.getvalue()
        url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        sound = {"data": base64.b64encode(wav).decode(), "format": "wav"}
        parts = [
            {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
            {"type": "input_audio", "input_audio": sound},
            {"type": "text", "text": "go there"},
        ]
        answer = chat([{"role": "user", "content": parts}])
        shown = ImagePart(read_image(png)), AudioPart(read_sound(wav, 30)), TextPart("go there")
        found = expected(Message("user", shown))
        assert answer.choices[0].message.content == found.text
        assert answer.usage.prompt_tokens == found.prompt_tokens

    def test_choices_of_a_request_have_seeds_of_their_own(self, chat, expected):
        answer = chat(n=3, seed=5, temperature=1.0)
        texts = [choice.message.content for choice in answer.choices]
        assert texts == [expected(seed=5 + index, temperature=1.0).text for index in range(3)]
        assert len(set(texts)) == 3
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage.completion_tokens == 24
        assert answer.usage.prompt_tokens == chat().usage.prompt_tokens
        streamed = ["", "", ""]
        for event in chat(n=3, seed=5, temperature=1.0, stream=True):
            streamed[event.choices[0].index] += event.choices[0].delta.content or ""
        assert streamed == texts

    def test_without_a_seed_answers_differ(self, chat):
        texts = {chat(temperature=2.0).choices[0].message.content for _ in range(3)}
        assert len(texts) > 1

    def test_a_stop_string_ends_the_answer_before_it(self, chat, expected):
        text = expected(max_tokens=20).text
        stop = text[9:11]
        for given in (stop, [stop, "never said"]):
            choice = chat(max_tokens=20, stop=given).choices[0]
            assert (choice.message.content, choice.finish_reason) == (text[: text.index(stop)], "stop")
        streamed = "".join(
            e.choices[0].delta.content or "" for e in chat(max_tokens=20, stop=stop, stream=True)
        )
        assert streamed == text[: text.index(stop)]

    def test_log_probabilities_have_tokens_bytes_and_the_likeliest(self, chat, runtime):
        asked = LLMGenerationRequest(
            messages=(Message("user", "what do you see?"),),
            lora="base",
            sampling=SamplingParams(max_tokens=8),
            logprobs=3,
        )
        found = runtime.handle_request(asked)
        whole = chat(logprobs=True, top_logprobs=3).choices[0]
        assert [entry.logprob for entry in whole.logprobs.content] == [row[0][1] for row in found.logprobs]
        assert [len(entry.top_logprobs) for entry in whole.logprobs.content] == [3] * 8
        heard = b"".join(bytes(entry.bytes) for entry in whole.logprobs.content)
        assert heard.decode(errors="replace") == whole.message.content
        plain = chat(logprobs=True).choices[0].logprobs.content
        assert [entry.top_logprobs for entry in plain] == [[]] * 8

    def test_log_probabilities_are_streamed_with_the_text_of_their_tokens(self, chat, expected):
        text = expected().text
        for options in (
            {},
            {"stop": f"{text[3]}never said"},  # holds a character back
            {"tools": [WEATHER, STOP], "extra_body": {"choices": [CALL]}, "max_tokens": 200},
        ):
            asked = {"logprobs": True, "top_logprobs": 3, **options}
            whole = chat(**asked).choices[0]
            streamed, text = [], ""
            for event in chat(**asked, stream=True):
                text += event.choices[0].delta.content or ""
                streamed += (event.choices[0].logprobs or empty()).content
                heard = b"".join(bytes(entry.bytes) for entry in streamed).decode(errors="replace")
                assert heard.startswith(text)
            assert streamed == whole.logprobs.content


def empty():
    from openai.types.chat.chat_completion import ChoiceLogprobs

    return ChoiceLogprobs(content=[], refusal=None)


class TestTools:
    def test_a_call_in_the_answer_is_a_tool_call(self, chat):
        asked = {"tools": [WEATHER, STOP], "extra_body": {"choices": [CALL]}, "max_tokens": 200}
        choice = chat(**asked).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "i look.")
        (call,) = choice.message.tool_calls
        assert (call.type, call.function.name) == ("function", "weather")
        assert json.loads(call.function.arguments) == {"days": 2}
        content, calls, reason = "", [], None
        for event in chat(**asked, stream=True):
            delta = event.choices[0].delta
            content += delta.content or ""
            calls += delta.tool_calls or []
            reason = event.choices[0].finish_reason
        assert (content.strip(), reason) == ("i look.", "tool_calls")
        assert [(c.index, c.function.name, c.function.arguments) for c in calls] == [
            (0, "weather", '{"days": 2}')
        ]

    def test_the_answer_to_a_call_goes_back_into_the_conversation(self, chat):
        asked = {"tools": [WEATHER], "extra_body": {"choices": [CALL]}, "max_tokens": 200}
        message = chat(**asked).choices[0].message
        tool = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
        answer = chat([*SAY, message, tool], tools=[WEATHER], max_tokens=3)
        assert answer.usage.completion_tokens == 3

    @pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
    def test_a_call_that_is_wanted_is_made(self, chat, choice):
        asked = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 100}
        answer = chat(**asked).choices[0]
        (call,) = answer.message.tool_calls
        assert (answer.finish_reason, answer.message.content, call.function.name) == (
            "tool_calls",
            None,
            "weather",
        )
        arguments = json.loads(call.function.arguments)
        validate(arguments, WEATHER["function"]["parameters"])
        events = [*chat(**asked, stream=True)]
        calls = [call for event in events for call in event.choices[0].delta.tool_calls or []]
        assert json.loads(calls[0].function.arguments) == arguments
        assert not any(event.choices[0].delta.content for event in events)

    def test_a_wanted_call_that_the_limit_cuts_is_text(self, chat):
        choice = chat(tools=[WEATHER], tool_choice="required", max_tokens=5).choices[0]
        assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
        assert choice.message.content.startswith('{"nam')

    def test_without_a_call_the_text_arrives_as_it_is(self, chat):
        plain = chat(max_tokens=20)
        for tools in ({"tools": [WEATHER], "tool_choice": "none"}, {"tools": [WEATHER]}):
            text = "".join(
                e.choices[0].delta.content or "" for e in chat(max_tokens=20, stream=True, **tools)
            )
            assert text == plain.choices[0].message.content


class Box(BaseModel):
    """What an answer has."""

    colour: Literal["red", "blue"]
    count: int = Field(ge=1, le=9)


class TestStructuredOutput:
    def test_an_answer_is_parsed_by_the_client(self, chat):
        parse = chat.client.chat.completions.parse
        answer = parse(model=MODEL, messages=SAY, response_format=Box, max_completion_tokens=60)
        box = answer.choices[0].message.parsed
        assert isinstance(box, Box)
        assert box.colour in ("red", "blue")

    def test_a_schema_forces_the_answer(self, chat):
        schema = {
            "type": "object",
            "properties": {
                "side": {"enum": ["left", "right"]},
                "n": {"type": "integer", "maximum": 9, "minimum": 0},
            },
            "required": ["side", "n"],
            "additionalProperties": False,
        }
        given = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
        choice = chat(response_format=given, max_tokens=60).choices[0]
        assert choice.finish_reason == "stop"
        validate(json.loads(choice.message.content), schema)

    def test_any_object_a_regular_expression_and_choices(self, chat):
        text = chat(response_format={"type": "json_object"}, max_tokens=5).choices[0].message.content
        assert text.startswith("{")
        assert chat(extra_body={"regex": "[ab]{3}c"}).choices[0].message.content[-1] == "c"
        assert chat(extra_body={"choices": ["yes", "no"]}).choices[0].message.content in ("yes", "no")


class TestModels:
    def test_the_models_are_the_engine_and_its_adapters(self, chat):
        models = chat.client.models.list().data
        assert [model.id for model in models] == [MODEL, "red"]
        assert chat.client.models.retrieve("red").parent == MODEL
        with pytest.raises(openai.NotFoundError, match="'blue' does not exist; there are 'tiny', 'red'"):
            chat.client.models.retrieve("blue")

    def test_an_adapter_answers_under_its_name(self, chat, expected):
        answer = chat(model="red")
        assert answer.model == "red"
        assert answer.choices[0].message.content == expected(lora="red").text
        assert answer.choices[0].message.content != expected().text


class TestTexts:
    def test_a_completion_continues_a_text_without_a_template(self, chat, runtime):
        answer = chat.client.completions.create(model=MODEL, prompt="go to", max_tokens=6, seed=1)
        assert answer.usage.prompt_tokens == len("go to")
        assert len(answer.choices[0].text) > 0
        ids = chat.client.completions.create(model=MODEL, prompt=[[72, 80], "go to"], max_tokens=6, seed=1)
        assert ids.choices[1].text == answer.choices[0].text
        assert ids.usage.prompt_tokens == 7
        asked = LLMGenerationRequest(prompt_ids=(72, 80), lora="base", sampling=SamplingParams(max_tokens=6))
        assert ids.choices[0].text == runtime.handle_request(asked).text

    def test_a_completion_has_sixteen_tokens_unless_told(self, chat):
        assert chat.client.completions.create(model=MODEL, prompt="a").usage.completion_tokens == 16

    def test_a_completion_is_streamed_with_its_log_probabilities(self, chat):
        asked = {"model": MODEL, "prompt": ["a", "b"], "max_tokens": 5, "logprobs": 2, "n": 2}
        whole = chat.client.completions.create(**asked)
        texts = [""] * 4
        logprobs = [{} for _ in range(4)]
        for event in chat.client.completions.create(**asked, stream=True):
            choice = event.choices[0]
            texts[choice.index] += choice.text
            for name, values in (choice.logprobs.to_dict() if choice.logprobs else {}).items():
                logprobs[choice.index].setdefault(name, []).extend(values)
        assert texts == [choice.text for choice in whole.choices]
        assert logprobs == [choice.logprobs.to_dict() for choice in whole.choices]
        assert logprobs[0]["text_offset"] == [0, 1, 2, 3, 4]
        assert [len(top) for top in logprobs[0]["top_logprobs"]] == [2] * 5
        none_likely = chat.client.completions.create(**{**asked, "logprobs": 0}).choices[0].logprobs
        assert none_likely.token_logprobs == logprobs[0]["token_logprobs"]
        assert none_likely.top_logprobs == [None] * 5

    def test_an_embedding_is_the_last_state_with_length_one(self, chat, runtime):
        made = chat.client.embeddings.create(model=MODEL, input=["go", "stop", [72, 80]])
        vectors = np.array([item.embedding for item in made.data])
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-6)
        assert np.abs(vectors[0] - vectors[1]).max() > 0.01
        asked = LLMGenerationRequest(prompt_ids=(72, 80), lora="base", sampling=SamplingParams(max_tokens=1))
        runtime.handle_request(asked, output_thinker_embeddings=True)
        state = np.asarray(runtime.base_model_hidden_states(LAST).array)[0, 1]
        np.testing.assert_allclose(vectors[2], state / np.linalg.norm(state), rtol=1e-5, atol=1e-6)
        assert made.usage.prompt_tokens == 8
        plain = chat.client.embeddings.create(model=MODEL, input="go", encoding_format="float")
        np.testing.assert_allclose(plain.data[0].embedding, vectors[0], rtol=1e-6)
        red = chat.client.embeddings.create(model="red", input="go")
        assert np.abs(np.array(red.data[0].embedding) - vectors[0]).max() > 0.01
