# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a request, in OpenAI's format; mutations of good requests."""

from __future__ import annotations

import json
import threading
from collections import Counter

import cv2
import numpy as np
import openai
import pytest

from edgellm_ros.builder import export
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.mutated_http import PNG, Request, data_url, good_bodies, mutated, send
from fixtures.served_openai import KEY, MODEL, ScriptedRuntime, client, serving

MUTATIONS = 300  # 10,000 were sent by hand: docs/serve.md
SAY = {"messages": [{"role": "user", "content": "u"}]}
FUNCTION = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def port(tiny_checkpoint, tmp_path_factory):
    engine = tmp_path_factory.mktemp("malformed")
    export(tiny_checkpoint, engine, hidden_state_layers=(3,), max_batch_size=1)
    limits = {
        "max_tokens": 8,
        "max_body_bytes": 100_000,
        "max_images": 2,
        "max_pixels": 10_000,
        "body_s": 0.3,
    }
    with LLMInferenceRuntime(engine) as runtime, serving(runtime, **limits) as port:
        yield port


def ask(port, body, path="/v1/chat/completions", **parts):
    """Return status, and the content of the answer."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, answer = send(port, Request(path, body, **parts).raw())
    return status, json.loads(answer)


def with_image(url: str) -> dict:
    part = {"type": "image_url", "image_url": {"url": url}}
    return {"messages": [{"role": "user", "content": [part]}]}


IMAGE = "messages[0].content[0].image_url"
WRONG_CHATS = [
    ([], "body", "expected an object, got an empty list"),
    ({}, "messages", "messages: is missing"),
    ({"messages": "hi"}, "messages", "expected a list, got 'hi'"),
    ({"messages": []}, "messages", "must have at least one message"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0]", "role must be one of system, user"),
    (
        {"messages": [{"role": "assistant", "content": "a"}]},
        "messages[0]",
        "the last message must be from user",
    ),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "expected a string or a list of parts"),
    ({"messages": [{"role": "user", "content": "a", "x": 1}]}, "messages[0]", "unknown key 'x'"),
    (
        {"messages": [{"role": "user", "content": [{"type": "film"}]}]},
        "messages[0].content[0].type",
        "expected one of",
    ),
    ({**SAY, "model": "gpt"}, "model", "'gpt' does not exist; there are 'tiny'"),
    ({**SAY, "model": 5}, "model", "expected a string, got 5"),
    ({**SAY, "temprature": 1}, "temprature", "unknown field 'temprature'"),
    ({**SAY, "temperature": -1}, "temperature", "must be 0 or a number from 1e-06 to 1e+06, got -1"),
    ({**SAY, "top_p": 2}, "top_p", "must be a number from 1e-30 to 1, got 2"),
    ({**SAY, "max_tokens": 9}, "max_tokens", "must be an integer from 1 to 8, got 9"),
    ({**SAY, "max_completion_tokens": 0}, "max_completion_tokens", "must be an integer from 1 to 8"),
    ({**SAY, "n": 9}, "n", "must be an integer from 1 to 8, got 9"),
    ({**SAY, "seed": -1}, "seed", "must be an integer from 0 to"),
    ({**SAY, "stop": [5]}, "stop", "expected a string or a list of strings"),
    ({**SAY, "stop": ["a"] * 17}, "stop", "expected at most 16 strings, got 17"),
    ({**SAY, "stream": "yes"}, "stream", "expected true or false, got 'yes'"),
    ({**SAY, "stream_options": {}}, "stream_options", "is for streamed answers only"),
    ({**SAY, "stream": True, "stream_options": {"a": 1}}, "stream_options.a", "unknown field 'a'"),
    ({**SAY, "top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    ({**SAY, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "must be an integer from 0 to 20"),
    ({**SAY, "presence_penalty": 0.5}, "presence_penalty", "is not supported: expected no value or 0 or 0.0"),
    ({**SAY, "logit_bias": {"5": 1}}, "logit_bias", "is not supported"),
    ({**SAY, "modalities": ["audio"]}, "modalities", "is not supported: expected no value or ['text']"),
    (
        {**SAY, "response_format": {"type": "xml"}},
        "response_format.type",
        "expected one of text, json_object",
    ),
    ({**SAY, "response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
    (
        {**SAY, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "none"}}}},
        "response_format",
        "json_schema",
    ),
    ({**SAY, "regex": "("}, "regex", "cannot be used"),
    ({**SAY, "regex": "a", "choices": ["a"]}, "body", "regex or choices, not both"),
    ({**SAY, "tools": {}}, "tools", "expected a list, got an object"),
    ({**SAY, "tools": [{"type": "function"}]}, "tools[0].function", "is missing"),
    ({**SAY, "tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name", "expected 1 to 64 letters"),
    ({**SAY, "tools": [FUNCTION, FUNCTION]}, "tools[1].function.name", "is the name of two tools"),
    ({**SAY, "tool_choice": "auto"}, "tool_choice", "is for requests with tools"),
    ({**SAY, "tools": [FUNCTION], "tool_choice": "g"}, "tool_choice", "expected one of none, auto, required"),
    (
        {**SAY, "tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        "no tool is called 'g'",
    ),
    (
        {**SAY, "tools": [FUNCTION], "response_format": {"type": "json_object"}},
        "response_format",
        "excludes tools",
    ),
    ({**SAY, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "must not have 'tools'"),
    (
        {**SAY, "chat_template_kwargs": {"enable_thinking": 1}},
        "chat_template_kwargs.enable_thinking",
        "true or false",
    ),
    (with_image("http://127.0.0.1:1/a.png"), IMAGE, "nothing is fetched"),
    (with_image("https://example.com/a.png"), IMAGE, "nothing is fetched"),
    (with_image("file:///etc/hostname"), IMAGE, "no file is read"),
    (with_image("frame.png"), IMAGE, "no file is read"),
    (with_image(data_url(b"no image")), IMAGE, "not an image in PNG, JPEG, WEBP or GIF (8 bytes)"),
    (with_image(data_url(PNG[:-20])), IMAGE, "the PNG file is truncated"),
    (
        {"messages": [{"role": "user", "content": [{"type": "video", "video": "/a.mp4", "fps": 1}]}]},
        "messages[0].content[0].video",
        "no file is read",
    ),
]


@pytest.mark.parametrize(("body", "param", "words"), WRONG_CHATS)
def test_a_wrong_chat_is_refused_with_the_field(port, body, param, words):
    status, content = ask(port, body)
    error = content["error"]
    assert status == (404 if "does not exist" in words else 400)
    assert error["param"] == param
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].isprintable()


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("completions", {"prompt": ""}, "prompt", "expected at least one token"),
        ("completions", {"prompt": ["a", 5]}, "prompt[1]", "expected a text or token ids, got 5"),
        ("completions", {"prompt": [1, -1]}, "prompt", "prompt_ids[1] must be an integer"),
        ("completions", {"prompt": [1, 10**6]}, "prompt", "prompt_ids[1]: the model has"),
        ("completions", {"prompt": "a", "echo": True}, "echo", "is not supported"),
        ("completions", {"prompt": "a", "logprobs": 6}, "logprobs", "must be an integer from 0 to 5"),
        ("completions", {"prompt": "\ud800"}, "prompt", "not valid Unicode"),
        ("completions", {"prompt": "<|image_pad|>"}, "prompt", "stands for an image"),
        ("embeddings", {"input": []}, "input", "expected a text, token ids, or a list of these"),
        ("embeddings", {"input": ["a"] * 129}, "input", "expected at most 128 items, got 129"),
        ("embeddings", {"input": "a", "dimensions": 8}, "dimensions", "is not supported"),
        ("embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format", "expected one of float"),
    ],
)
def test_a_wrong_text_is_refused_with_the_field(port, path, body, param, words):
    status, content = ask(port, body, f"/v1/{path}")
    assert (status, content["error"]["param"]) == (400, param)
    assert words in content["error"]["message"]


def test_a_prompt_that_is_too_long_has_the_code_that_frameworks_know(port):
    long = {"messages": [{"role": "user", "content": "a" * 1000}]}
    for body in (long, {**long, "stream": True}):
        status, content = ask(port, body)
        assert (status, content["error"]["param"]) == (400, "messages")
        assert content["error"]["code"] == "context_length_exceeded"
        assert "messages: the prompt has 10" in content["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "a" * 20_000}]}, "messages", True),
        (
            "chat/completions",
            {**SAY, "tools": [{"function": {"name": "f", "description": "a" * 20_000}}]},
            "messages",
            True,
        ),
        ("completions", {"prompt": ["a", "a" * 20_000]}, "prompt[1]", True),
        ("embeddings", {"input": [5] * 20_000}, "input", True),
        ("chat/completions", {**SAY, "regex": "a" * 70_000}, "regex", False),
        ("chat/completions", {**SAY, "choices": ["a" * 40_000] * 2}, "choices", False),
        (
            "chat/completions",
            {
                **SAY,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"const": "a" * 70_000}},
                },
            },
            "response_format",
            False,
        ),
    ],
)
def test_texts_that_are_much_too_long_are_refused_before_work_is_done_on_them(port, path, body, param, code):
    status, content = ask(port, body, f"/v1/{path}")
    error = content["error"]
    assert (status, error["param"]) == (400, param)
    assert "characters" in error["message"]
    assert (error["code"] == "context_length_exceeded") == code


def test_too_many_and_too_large_images_are_refused(port):
    part = {"type": "image_url", "image_url": {"url": data_url(PNG)}}
    status, content = ask(port, {"messages": [{"role": "user", "content": [part] * 3}]})
    assert (status, content["error"]["param"]) == (400, "messages[0].content[2].image_url")
    assert "a request has at most 2 images" in content["error"]["message"]
    large = cv2.imencode(".png", np.zeros((101, 100, 3), np.uint8))[1].tobytes()
    status, content = ask(port, with_image(data_url(large)))
    assert "an image has at most 10000 pixels, this one has 100x101" in content["error"]["message"]


@pytest.mark.parametrize(
    ("parts", "status", "param"),
    [
        ({"kind": "text/plain"}, 415, "Content-Type"),
        ({"kind": None}, 415, "Content-Type"),
        ({"kind": "application/json; charset=latin-1"}, 415, "Content-Type"),
        ({"lines": ("Content-Encoding: gzip",)}, 415, "Content-Encoding"),
        ({"lines": ("Content-Length: 100001",)}, 413, "body"),
        ({"lines": ("Origin: http://example.com",)}, 403, "Origin"),
        ({"lines": ("Bad Header: 1",)}, 400, "request"),
        ({"lines": ("X: " + "a" * 40_000,)}, 431, "headers"),
        ({"method": "GET"}, 405, "method"),
        ({"path": "/v1/chat"}, 404, "path"),
    ],
)
def test_wrong_headers_are_refused_by_name(port, parts, status, param):
    parts = {"path": "/v1/chat/completions", "body": json.dumps(SAY).encode(), **parts}
    found, answer = send(port, Request(**parts).raw())
    error = json.loads(answer)["error"]
    assert (found, error["param"]) == (status, param)
    assert error["message"].startswith(param)


def test_a_body_in_chunks_is_limited_too(port):
    chunk = b"fa00\r\n" + b" " * 0xFA00 + b"\r\n"
    request = Request("/v1/chat/completions", chunk * 2, lines=("Transfer-Encoding: chunked",))
    status, answer = send(port, request.raw())
    assert (status, json.loads(answer)["error"]["param"]) == (413, "body")


def test_json_with_a_mark_of_its_encoding_or_too_deep_is_refused(port):
    for body in (
        b"\xef\xbb\xbf{}",
        b'{"a": "\xff"}',
        b"[" * 5000,
        b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}",
    ):
        status, content = ask(port, body)
        assert (status, content["error"]["param"]) == (400, "body")


@pytest.fixture(scope="module")
def guarded(tiny_engine):
    with LLMInferenceRuntime(tiny_engine) as runtime, serving(runtime, token=KEY) as port:
        yield port


class TestToken:
    def test_the_key_is_needed_but_for_health(self, guarded):
        with client(guarded, KEY) as known:
            assert [model.id for model in known.models.list().data] == [MODEL]
        for key in ("wrong", KEY + "x", KEY[:-1]):
            with client(guarded, key) as other, pytest.raises(openai.AuthenticationError) as refused:
                other.models.list()
            assert (refused.value.param, refused.value.code) == ("Authorization", "invalid_api_key")
        for path, status in (("/health", 200), ("/metrics", 401), ("/v1/models", 401)):
            assert send(guarded, Request(path, b"", "GET").raw())[0] == status

    def test_two_keys_are_refused(self, guarded):
        lines = (f"Authorization: Bearer {KEY}",) * 2
        assert send(guarded, Request("/v1/models", b"", "GET", lines=lines).raw())[0] == 401
        assert send(guarded, Request("/v1/models", b"", "GET", lines=lines[:1]).raw())[0] == 200

    def test_an_engine_without_hidden_states_says_how_to_get_them(self, guarded):
        with client(guarded, KEY) as known, pytest.raises(openai.BadRequestError) as refused:
            known.embeddings.create(model=MODEL, input="a")
        assert "export it with --hidden-states 3" in refused.value.message


def test_an_engine_that_answers_with_actions_only_is_refused(act_engine):
    refused = pytest.raises(ValueError, match="OpenAI's API needs an engine that answers with text")
    with refused, serving(ScriptedRuntime(act_engine)):
        pass


def check(status: int, body: bytes, method: str) -> None:
    """Check the answer to a mutated request: it is good, or it names what is wrong."""
    assert 200 <= status < 500, body
    if status >= 400 and method != "HEAD":
        error = json.loads(body)["error"]
        assert error["param"], error
        assert error["param"] in error["message"]
        assert error["message"].isprintable()
        assert len(error["message"]) < 2000
        assert "Traceback" not in error["message"]


def attack(port: int, count: int, seed: int) -> Counter:
    """Send mutated requests, and count the statuses."""
    rng = np.random.default_rng(seed)
    found: Counter = Counter()
    for _ in range(count):
        request = mutated(rng)
        status, body = send(port, request.raw())
        check(status, body, request.method)
        found[status] += 1
    return found


def test_good_bodies_are_answered(port):
    for path, bodies in good_bodies().items():
        for body in bodies:
            assert send(port, Request(path, json.dumps(body).encode()).raw())[0] == 200


def test_mutated_requests_are_answered_or_refused_and_others_do_not_notice(port):
    expected = {text: ask(port, {"prompt": text}, "/v1/completions")[1] for text in ("a", "b", "c d")}
    ended, wrong = threading.Event(), []

    def go_on_asking() -> None:
        while not ended.is_set():
            for text, answer in expected.items():
                status, found = ask(port, {"prompt": text}, "/v1/completions")
                if status != 200 or found["choices"] != answer["choices"]:
                    wrong.append(found)

    other = threading.Thread(target=go_on_asking)
    other.start()
    try:
        found = attack(port, MUTATIONS, seed=0)
    finally:
        ended.set()
        other.join(30)
    assert not wrong
    assert found[400] > MUTATIONS * 0.4
    assert found[200] > MUTATIONS * 0.03
    assert {404, 405, 415} <= set(found)
