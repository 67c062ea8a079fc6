# SPDX-License-Identifier: Apache-2.0
"""`edgellm generate --messages` and `--requests`: answers, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import soundfile

from edgellm_ros.cli.requests.request_files import read_conversation
from edgellm_ros.messages.content_parts import FileReaders
from fixtures.reference_inputs import make_sound
from fixtures.refusal import assert_refused
from fixtures.tiny_adapter import write_adapter

READERS = FileReaders(None, None)  # no message has a sound or a video
TOKENS = ("--max-tokens", 8)
SAY = {"role": "user", "content": "go to the red box"}


@pytest.fixture
def write(tmp_path, image):
    """`write(value)`: a JSON file beside frame.png and voice.wav."""
    (tmp_path / "frame.png").write_bytes(image.read_bytes())
    soundfile.write(tmp_path / "voice.wav", make_sound(1.0, 16000), 16000, subtype="FLOAT")

    def make(value: object, name: str = "talk.json") -> str:
        path = tmp_path / name
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return str(path)

    return make


@pytest.fixture
def answers(edgellm, tiny_engine, write, tmp_path):
    """`answers(requests)`: the exit code, and the list of answers."""

    def run(requests: list, *options: object, engine=tiny_engine):
        out = tmp_path / "answers.json"
        arguments = ("--requests", write(requests), "--out", out, *TOKENS, *options)
        run = edgellm("generate", engine, *arguments)
        return run.code, json.loads(out.read_text())

    return run


def same(one: dict, other: dict) -> bool:
    return all(one[key] == other[key] for key in one if key != "metrics")


def test_a_conversation_is_answered_as_the_same_options_are(edgellm, tiny_engine, write, image):
    parts = [
        {"type": "image", "image": "frame.png"},
        {"type": "audio", "audio": "voice.wav"},
        {"type": "text", "text": "go"},
    ]
    path = write([{"role": "system", "content": "be brief"}, {"role": "user", "content": parts}])
    told = edgellm("generate", tiny_engine, "--messages", path, *TOKENS, "--json").json
    voice = image.with_name("voice.wav")
    soundfile.write(voice, make_sound(1.0, 16000), 16000, subtype="FLOAT")
    options = ("--system", "be brief", "--image", image, "--audio", voice, "--prompt", "go")
    assert same(told, edgellm("generate", tiny_engine, *options, *TOKENS, "--json").json)


def test_the_object_form_is_the_list_with_its_variables(edgellm, tiny_engine, write):
    listed = edgellm("generate", tiny_engine, "--messages", write([SAY]), *TOKENS, "--json").json
    full = {"messages": [SAY], "tools": [], "enable_thinking": False, "chat_template_kwargs": {"x": 1}}
    told = edgellm("generate", tiny_engine, "--messages", write(full), *TOKENS, "--json").json
    assert same(told, listed)


def test_earlier_answers_are_part_of_the_prompt(edgellm, tiny_engine, write):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    messages = [SAY, call, {"role": "tool", "content": "5", "tool_call_id": "1"}]
    short = edgellm("generate", tiny_engine, "--messages", write([SAY]), *TOKENS, "--json").json
    long = edgellm("generate", tiny_engine, "--messages", write(messages), *TOKENS, "--json").json
    # <|im_start|>assistant\n<|im_end|>\n and <|im_start|>tool\n5<|im_end|>\n
    assert long["prompt_tokens"] == short["prompt_tokens"] + 13 + 9


def test_fields_of_messages_are_read_unchanged(write):
    function = {"name": "f", "arguments": {"at": [1, 2.5, None], "to": "\u00e4"}}
    asked = {"tool_calls": [{"id": "call_1", "type": "function", "function": function}], "thinking": "hm"}
    answered = {"tool_call_id": "call_1", "name": "f"}
    messages = [SAY, {"role": "assistant", **asked}, {"role": "tool", "content": "5", **answered}]
    read = read_conversation(write(messages), READERS)["messages"]
    assert [message.fields for message in read] == [{}, asked, answered]


@pytest.mark.parametrize(
    ("written", "arguments"),
    [('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}), ("a", "a"), ("[1]", "[1]"), ("", "")],
)
def test_arguments_of_a_call_in_a_string_of_json_become_an_object(write, written, arguments):
    for call in ({"name": "f", "arguments": written}, {"function": {"name": "f", "arguments": written}}):
        messages = [{"role": "assistant", "tool_calls": [call]}, SAY]
        read = read_conversation(write(messages), READERS)["messages"][0].fields["tool_calls"][0]
        assert read.get("function", read) == {"name": "f", "arguments": arguments}


def test_an_answer_continues_the_last_message(edgellm, tiny_engine, write):
    begun = {"messages": [SAY, {"role": "assistant", "content": "ok, "}], "continue_final_message": True}
    told = edgellm("generate", tiny_engine, "--messages", write(begun), *TOKENS, "--json").json
    short = edgellm("generate", tiny_engine, "--messages", write([SAY]), *TOKENS, "--json").json
    assert told["prompt_tokens"] == short["prompt_tokens"] + len("ok, ")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("[", ["not valid JSON", "line 1 column 2"]),
        (5, ["expected a list of messages or an object, got 5"]),
        ([], ["messages must have at least one message"]),
        ({"message": []}, ["unknown key 'message'", "known are messages, tools"]),
        ({"tools": []}, ["missing key 'messages'"]),
        ({"messages": "hi"}, ["messages: expected a list, got 'hi'"]),
        ([SAY, "hi"], ["messages[1]: expected an object, got 'hi'"]),
        ([{"content": "hi"}], ["messages[0]: missing key 'role'"]),
        ([{"role": "user", "text": "hi"}], ["messages[0]: unknown key 'text'"]),
        ([{"role": "robot", "content": "hi"}], ["messages[0]: role must be one of", "got 'robot'"]),
        ([SAY, {"role": "assistant", "content": "x"}], ["messages[1] (assistant): the last message"]),
        ([{"role": "user", "content": 5}], ["messages[0].content: expected a string or a list", "got 5"]),
        ([{"role": "user"}], ["messages[0].content: expected a string or a list", "got None"]),
        ([{"role": "user", "content": ["x"]}], ["messages[0].content[0]: expected an object, got 'x'"]),
        (
            [{"role": "user", "content": [{"type": "smell", "smell": "x"}]}],
            ["messages[0].content[0].type: expected one of text, image, image_url, video, ", "got 'smell'"],
        ),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            ["messages[0].content[0]: missing key 'image'"],
        ),
        (
            [{"role": "user", "content": [{"type": "image", "image": 5}]}],
            ["messages[0].content[0].image: expected a file name, got 5"],
        ),
        (
            [{"role": "user", "content": [{"type": "image", "image": "no.png"}]}],
            ["messages[0].content[0].image: ", "no.png: no such file"],
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": ["x"]}]}],
            ["messages[0].content[0].text: expected a string, got a list"],
        ),
        (
            [{"role": "assistant", "tool_calls": {"name": "f"}}, SAY],
            ["messages[0].tool_calls: expected a list of objects, got an object"],
        ),
        (
            {"messages": [SAY], "continue_final_message": True},
            ["messages[0] (user): with continue_final_message the last message must be from assistant"],
        ),
        ({"messages": [SAY], "tools": [5]}, ["tools must be a sequence of JSON objects, got [5]"]),
        ({"messages": [SAY], "enable_thinking": "no"}, ["enable_thinking must be", "got 'no'"]),
    ],
)
def test_a_wrong_conversation_is_one_line_that_says_where(edgellm, tiny_engine, write, value, words):
    path = write(value)
    assert_refused(edgellm("generate", tiny_engine, "--messages", path), path, *words)


def test_sounds_for_an_engine_without_ears_are_refused(edgellm, engine_without_audio, write):
    path = write([{"role": "user", "content": [{"type": "audio", "audio": "voice.wav"}]}])
    told = edgellm("generate", engine_without_audio, "--messages", path)
    assert_refused(told, "messages[0].content[0].audio: ", "has no audio encoder")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--messages", "a", "--prompt", "x"), "--messages and --prompt: give one of them"),
        (("--messages", "a", "--image", "x"), "--messages and --image: give one of them"),
        (("--requests", "a", "--messages", "x", "--out", "o"), "--requests and --messages: give one of them"),
        (("--requests", "a"), "--requests and --out are given together"),
        (("--prompt", "a", "--out", "o"), "--requests and --out are given together"),
        (("--requests", "a", "--out", "o", "--stream"), "--stream is for one request"),
        (("--requests", "no.json", "--out", "o"), "no.json: no such file"),
        (("--messages", "no.json"), "no.json: no such file"),
        ((), "nothing to answer: give --prompt or --audio, --messages or --requests"),
    ],
)
def test_options_that_exclude_each_other_are_refused(edgellm, tiny_engine, options, words):
    assert_refused(edgellm("generate", tiny_engine, *options), words)


def test_the_folder_of_the_answers_must_exist(edgellm, tiny_engine, write, tmp_path):
    told = edgellm("generate", tiny_engine, "--requests", write([[SAY]]), "--out", tmp_path / "no" / "a.json")
    assert_refused(told, "its folder does not exist")


@pytest.mark.slow
def test_requests_are_answered_in_order_as_each_alone(edgellm, tiny_engine, answers, write):
    prompts = [f"go to box {number}" for number in range(6)]  # more than one batch of 4
    code, told = answers([{"prompt": prompt} for prompt in prompts])
    assert code == 0
    for prompt, answer in zip(prompts, told, strict=True):
        assert same(answer, edgellm("generate", tiny_engine, "--prompt", prompt, *TOKENS, "--json").json)


def test_a_failed_request_keeps_its_place_with_its_error(answers):
    code, told = answers(
        [
            {"prompt": "go"},
            {"prompt": "go", "images": ["no.png"]},
            {"prompt": "x" * 500},
            {"prompt": "go", "temperature": "hot"},
            {"prompt": "go", "colour": "red"},
            {"prompt": "go", "history": [["x"]]},
            {"prompt": "go", "lora": "polite"},
            {"system": "be brief"},
            {"prompt": "go", "messages": [SAY]},
            [SAY],
        ]
    )
    assert code == 1
    errors = [answer.get("error") for answer in told]
    for error, words in zip(
        errors[1:-1],
        (
            "talk.json[1].images[0]: ", "talk.json[2]: ", "talk.json[3]: temperature must be 0 or a number",
            "talk.json[4]: unknown key 'colour'", "talk.json[5].history: expected poses",
            "talk.json[6]: lora 'polite': no such adapter in ", "talk.json[7]: nothing to answer",
            "talk.json[8]: a request has messages or prompt, not both",
        ),
        strict=True,
    ):  # fmt: skip
        assert words in error
    assert errors[0] is errors[-1] is None
    assert told[0]["prompt_tokens"] < told[-1]["prompt_tokens"]


def test_null_in_a_request_is_the_same_as_no_key(answers):
    absent = (
        "stop", "choices", "regex", "json_schema", "temperature", "max_tokens", "seed", "tools", "messages",
        "images", "audio", "cameras", "state", "history", "speed", "system", "lora", "logprobs",
    )  # fmt: skip
    code, told = answers([{"prompt": "go", **dict.fromkeys(absent)}, {"prompt": "go"}], "--temperature", 1.5)
    assert code == 0
    assert same(*told)


def test_null_is_no_prompt(answers):
    code, (told,) = answers([{"prompt": None}])
    assert code == 1
    assert told["error"].endswith("talk.json[0]: nothing to answer: give messages, prompt or audio")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("stop", 5, "stop must be a sequence of non-empty strings, got 5"),
        ("stop", {"a": 1}, "stop must be a sequence of non-empty strings, got {'a': 1}"),
        ("choices", {"a": 1}, "choices must be a sequence of non-empty strings, got {'a': 1}"),
        ("cameras", 5, "cameras must be a sequence of names, got 5"),
    ],
)
def test_a_key_of_a_request_with_another_type_is_named(answers, key, value, message):
    code, (told,) = answers([{"prompt": "go", key: value}])
    assert code == 1
    assert told["error"].endswith(f"talk.json[0]: {message}")


def test_what_the_runtime_refuses_has_its_place_in_the_file(answers):
    long = {"prompt": "x" * 500}
    code, told = answers([{"prompt": "go"}, long, long])
    assert code == 1
    assert "error" not in told[0]
    for index in (1, 2):
        place, text = told[index]["error"].split(": ", 1)
        assert place.endswith(f"talk.json[{index}]")
        assert "at most 447" in text
        assert "request 0" not in text


def test_a_name_of_an_adapter_in_a_file_of_requests_is_no_path(answers, tmp_path):
    """Only the command line may name directories."""
    code, told = answers([{"prompt": "go", "lora": f"mine={tmp_path / 'no'}"}, {"prompt": "go"}])
    assert code == 1
    assert "talk.json[0]: lora 'mine=" in told[0]["error"]
    assert "error" not in told[1]


def test_a_request_has_options_of_its_own(edgellm, tiny_engine, answers):
    own = {"max_tokens": 3, "temperature": 1.0, "seed": 5, "logprobs": 2, "action_samples": 0}
    _, (told, other) = answers([{"prompt": "go", **own}, {"prompt": "go"}])
    options = ("--temperature", 1, "--seed", 5, "--logprobs", 2, "--max-tokens", 3, "--action-samples", 0)
    known = edgellm("generate", tiny_engine, "--prompt", "go", *options, "--json").json
    assert same(told, known)
    assert len(other["token_ids"]) == 8


@pytest.mark.slow
def test_requests_may_name_different_adapters(tiny_checkpoint, tiny_lora_engine, answers, tmp_path):
    import shutil

    engine = shutil.copytree(tiny_lora_engine, tmp_path / "engine")
    for seed, name in enumerate(("one", "two")):
        write_adapter(engine / "lora" / name, tiny_checkpoint, seed=seed, r=4)
    requests = [{"prompt": "go", "lora": name} for name in ("", "one", "two", "three")]
    code, told = answers(requests, engine=engine)
    assert code == 1
    assert (
        f"talk.json[3]: lora 'three': no such adapter in {engine}/lora, which has one, two"
        in told[3]["error"]
    )
    assert [answer.get("lora") for answer in told] == ["", "one", "two", None]
    assert len({tuple(answer["token_ids"]) for answer in told[:3]}) == 3


def test_the_summary_is_json_on_request(edgellm, tiny_engine, write, tmp_path):
    out = tmp_path / "answers.json"
    arguments = ("--requests", write([[SAY], 5]), "--out", out, *TOKENS, "--json")
    assert edgellm("generate", tiny_engine, *arguments).json == {"requests": 2, "failed": 1, "out": str(out)}
    assert np.shape(json.loads(out.read_text())) == (2,)
