# SPDX-License-Identifier: Apache-2.0
"""Tool calls of answers, in the ways in which models write them.

Chat templates, and prompts that transformers made, say what the ways are.
"""

import functools
import json
import logging

import pytest

from edgellm_ros.engine_directory.chat_template import ChatTemplate
from edgellm_ros.runtime.conversation import Message
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.prompt.tool_call_formats import FORMATS
from edgellm_ros.runtime.prompt.tool_calls import ToolCallReader, find_format
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams, ToolCall
from fixtures.conversations import SPECIAL_TOKENS, TEMPLATES, WEATHER, recorded_prompts
from fixtures.requests_for_tests import request

WRITTEN = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_vl": "hermes",
    "qwen3_5": "xml",
    "llama3": "llama",
    "nemotron_h": "nemotron",
}
MISTRAL = """{{ bos_token }}{% for message in messages %}{% if message.role == "user" %}{{ "[INST] " + message.content + "[/INST]" }}
{%- elif message.tool_calls is defined and message.tool_calls %}{{ "[TOOL_CALLS] [" }}{% for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception("ids have 9 characters") }}{% endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{{ ", " if not loop.last }}{% endfor %}{{ "]" + eos_token }}
{%- else %}{{ " " + message.content + eos_token }}{% endif %}{% endfor %}"""  # noqa: E501
ARGUMENTS = [
    {},
    {"text": ""},
    {"text": "two words"},
    {"text": 'a "quoted" word, größer \U0001f600\n  on two lines\n', "count": 7},
    {"count": -3, "share": 0.5, "on": True, "off": False, "nothing": None},
    {"where": {"x": 1.5, "names": ["</tool_call>", "a, b", "[TOOL_CALLS]"]}, "list": [1, [2, {"3": None}]]},
    {"text": "7", "list": []},
    {"text": "<function=x>\n<parameter=y>\nz"},
]
TYPES = {"text": "string", "count": "integer", "share": "number", "on": "boolean", "off": "boolean"}
TYPES |= {"nothing": ["string", "null"], "where": "object", "list": "array"}
PROPERTIES = {name: {"type": kind} for name, kind in TYPES.items()}
MOVE = {
    "type": "function",
    "function": {"name": "move.to", "parameters": {"type": "object", "properties": PROPERTIES}},
}


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A function that loads a template by its file's name, or `mistral`."""
    directory = tmp_path_factory.mktemp("templates")
    (directory / "special_tokens_map.json").write_text(json.dumps(SPECIAL_TOKENS))

    @functools.cache
    def load(name: str) -> ChatTemplate:
        text = MISTRAL if name == "mistral" else (TEMPLATES / f"{name}.jinja").read_text()
        (directory / f"{name}.jinja").write_text(text)
        return ChatTemplate(directory / f"{name}.jinja")

    return load


def written(template: ChatTemplate, calls: list[ToolCall], content: str) -> str:
    """Return what a template makes of an answer, up to its end."""
    user, tools = {"role": "user", "content": "go"}, {"tools": [MOVE]}
    functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
    made = [{"id": "call00001", "type": "function", "function": function} for function in functions]
    other = template.render([user, {"role": "assistant", "content": "\u2603"}], tools)
    text = template.render([user, {"role": "assistant", "content": content, "tool_calls": made}], tools)
    start = next(index for index, pair in enumerate(zip(other, text, strict=False)) if pair[0] != pair[1])
    ends = ("<|im_end|>", "<|eot_id|>", "\n<SPECIAL_12>")
    text = text[start : min(at for end in ends if (at := text.find(end, start)) >= 0)]
    return text.removeprefix("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("name, expected", [*WRITTEN.items(), ("mistral", "mistral")])
def test_the_format_follows_from_the_chat_template(template, name, expected):
    assert find_format(template(name)).name == expected


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=range(len(ARGUMENTS)))
@pytest.mark.parametrize("name", [*WRITTEN, "mistral"])
def test_a_call_that_the_template_writes_is_read_back(template, name, arguments):
    calls = [ToolCall("move.to", arguments)]
    found = find_format(template(name)).parse(written(template(name), calls, ""), [MOVE])
    assert (found.tool_calls, found.content, found.errors) == (tuple(calls), "", ())


@pytest.mark.parametrize("name", [name for name in (*WRITTEN, "mistral") if name != "llama3"])
def test_several_calls_are_read_in_their_order(template, name):
    calls = [ToolCall("move.to", arguments) for arguments in ARGUMENTS[2:5]]
    found = find_format(template(name)).parse(written(template(name), calls, ""), [MOVE])
    assert found.tool_calls == tuple(calls)


@pytest.mark.parametrize("name", [name for name in WRITTEN if name != "llama3"])
def test_the_words_before_a_call_are_the_content(template, name):
    calls = [ToolCall("move.to", {"count": 7})]
    found = find_format(template(name)).parse(written(template(name), calls, "I go there."), [MOVE])
    assert found.tool_calls == tuple(calls)
    assert found.content == "I go there."


@pytest.mark.parametrize("case", ["call", "reasoning before a call"])
@pytest.mark.parametrize("name", WRITTEN)
def test_calls_in_prompts_that_transformers_made_are_read(template, name, case):
    prompt = recorded_prompts(name)[case]
    start = prompt.rindex("Weather in Ulm?")
    if name == "llama3":  # its calls are whole answers
        start = prompt.index('{"name"', start)
        prompt = prompt[: prompt.index("<|eot_id|>", start)]
    found = find_format(template(name)).parse(prompt[start:], [WEATHER])
    arguments = {"town": "Ulm", "days": "2" if name == "qwen3_5" else 2}  # the schema has no days
    assert found.tool_calls == (ToolCall("weather", arguments),)


def test_a_template_without_calls_or_with_an_unknown_form_says_so(template, tmp_path):
    with pytest.raises(ValueError, match=r"^the chat template writes no tool calls$"):
        find_format(template("internvl3"))
    other = TEMPLATES.joinpath("qwen3.jinja").read_text().replace("<tool_call>", "<call>")
    (tmp_path / "other.jinja").write_text(other)
    with pytest.raises(ValueError, match=r"^no format reads the tool calls of the chat template: '<call>"):
        find_format(ChatTemplate(tmp_path / "other.jinja"))


def test_a_template_that_several_formats_read_says_so(template, monkeypatch):
    monkeypatch.setitem(FORMATS, "again", FORMATS["hermes"])
    with pytest.raises(ValueError, match=r"^the formats hermes and hermes read the tool calls"):
        find_format(template("qwen3"))


@pytest.mark.parametrize(
    "name, text, reason",
    [
        ("hermes", '<tool_call>{"name": "go", "arguments": {"a": }}</tool_call>', "Expecting value"),
        ("hermes", '<tool_call>{"name": "go", "arguments": [1]}</tool_call>', "arguments of 'go' must be an"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "the name must be a string, got None"),
        ("hermes", '<tool_call>{"name": "\\ud800"}</tool_call>', "the name must be printable"),
        ("hermes", '<tool_call>{"name": "go", "arguments": {"a": NaN}}</tool_call>', "NaN is not a finite"),
        ("hermes", '<tool_call>{"name": "go", "arguments": {"a": 1e999}}</tool_call>', "1e999 is not a"),
        ("hermes", '<tool_call>{"name": "go"} and more</tool_call>', "'and more</tool_call>' in place of"),
        ("hermes", '<tool_call>{"name": "go", "argu', "Unterminated string"),
        ("xml", "<tool_call>\n<function=go>\n<parameter=a>\n1\n", "in place of </function>"),
        ("llama", '{"name": "go", "parameters": {"a": 1', "Expecting"),
        ("llama", '{"name": "go", "parameters": {}} I go.', "Expecting value"),
        ("mistral", "[TOOL_CALLS]", "it ends before its JSON begins"),
        ("nemotron", '<TOOLCALL>[{"name": "go"}, 3]</TOOLCALL>', "expected an object with a name, got 3"),
    ],
)
def test_a_call_that_cannot_be_read_stays_text_and_is_reported(name, text, reason):
    found = FORMATS[name].parse(text)
    assert (found.content, found.tool_calls) == (text, ())
    assert found.errors[0].startswith("a tool call is not read: ")
    assert reason in found.errors[0]
    assert "\n" not in found.errors[0]


def test_a_call_that_is_nested_too_deeply_is_reported():
    found = FORMATS["hermes"].parse("<tool_call>" + '{"a":' * 100_000)
    assert (found.tool_calls, len(found.errors)) == ((), 1)


def test_a_bad_call_between_good_ones_stays_in_the_content():
    good = '<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>'
    found = FORMATS["hermes"].parse(f"One.\n{good}\n<tool_call>\n{{no}}\n</tool_call>\n{good} Two.")
    assert [call.name for call in found.tool_calls] == ["a", "a"]
    assert found.content == "One.\n<tool_call>\n{no}\n</tool_call>\nTwo."
    assert len(found.errors) == 1


@pytest.mark.parametrize("name, answer", [("llama", '{"x": 1}'), ("hermes", "I go."), ("mistral", "[1]")])
def test_an_answer_without_calls_is_its_content(name, answer):
    found = FORMATS[name].parse(answer)
    assert (found.content, found.tool_calls, found.errors) == (answer, (), ())


def test_arguments_may_be_json_text_or_absent():
    """As OpenAI's API writes them, and as models call functions without parameters."""
    found = FORMATS["hermes"].parse('<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>')
    assert found.tool_calls == (ToolCall("a", {"x": 1}),)
    assert FORMATS["llama"].parse('{"name": "a"}').tool_calls == (ToolCall("a", {}),)


def test_the_last_call_needs_no_end_mark():
    assert FORMATS["hermes"].parse('<tool_call>\n{"name": "a"}\n').tool_calls == (ToolCall("a", {}),)


@pytest.mark.parametrize(
    "text, begins_thinking",
    [
        ('<think>\n<tool_call>{"name": "a"}</tool_call>\n</think>\nNo.', False),
        ('<think>\n<tool_call>{"name": "a"}</tool_call>', False),
        ('I could.\n<tool_call>{"name": "a"}</tool_call>\n</think>\nNo.', True),
        ('<tool_call>{"name": "a"}</tool_call>', True),
    ],
)
def test_calls_that_are_only_thought_of_are_not_calls(text, begins_thinking):
    found = FORMATS["hermes"].parse(text, (), begins_thinking)
    assert (found.content, found.tool_calls) == (text, ())
    after = f'{text}\n</think>\n<tool_call>{{"name": "b"}}</tool_call>'
    assert FORMATS["hermes"].parse(after, (), begins_thinking).tool_calls[-1].name == "b"


@pytest.mark.parametrize(
    "kind, text, expected",
    [
        ("integer", "7", 7), ("integer", "7.0", 7), ("integer", "7.5", "7.5"), ("number", "7", 7),
        ("number", "-0.5", -0.5), ("boolean", "True", True), ("boolean", "false", False),
        ("string", "7", "7"), (["integer", "null"], "None", None), ("array", "[1]", [1]),
        ("object", '{"a": 1}', {"a": 1}),
        ("array", '{"a": 1}', '{"a": 1}'), ("object", "{a}", "{a}"), (None, "7", "7"),
    ],
)  # fmt: skip
def test_values_between_tags_get_the_types_of_the_schema(kind, text, expected):
    properties = {} if kind is None else {"a": {"type": kind}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    answer = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    (call,) = FORMATS["xml"].parse(answer, [tool]).tool_calls
    assert call.arguments == {"a": expected}
    assert type(call.arguments["a"]) is type(expected)


@pytest.mark.parametrize("schema", [{"type": None}, {"type": 5}, {"anyOf": 5}, {"oneOf": True}, 7, None])
def test_a_parameter_with_a_wrong_schema_stays_text(schema):
    tool = {"name": "f", "parameters": {"properties": {"a": schema}}}
    answer = "<function=f>\n<parameter=a>\n7\n</parameter>\n</function>"
    (call,) = FORMATS["xml"].parse(answer, [tool]).tool_calls
    assert call.arguments == {"a": "7"}


ANSWER = 'I look.\n<tool_call>\n{"name": "find", "arguments": {"what": "box"}}\n</tool_call>'


@pytest.fixture(scope="module")
def hermes(tiny_engine, device):
    options = {"prefix_cache_bytes": 0, "tool_call_format": "hermes"}
    with LLMInferenceRuntime(tiny_engine, device, **options) as runtime:
        yield runtime


def test_an_answer_has_its_calls_its_content_and_its_whole_text(hermes):
    answer = hermes.handle_request(request(choices=[ANSWER], max_tokens=200, tools=[WEATHER]))
    assert answer.text == ANSWER
    assert (answer.content, answer.tool_calls) == ("I look.", (ToolCall("find", {"what": "box"}),))
    assert answer.tool_call_errors == ()


def test_without_tools_answers_are_not_searched(hermes):
    answer = hermes.handle_request(request(choices=[ANSWER], max_tokens=200))
    assert (answer.content, answer.tool_calls) == (ANSWER, ())


def test_a_call_that_the_limit_cuts_is_reported(hermes):
    answer = hermes.handle_request(request(choices=[ANSWER], max_tokens=30, tools=[WEATHER]))
    assert answer.content == answer.text
    assert answer.tool_calls == ()
    assert len(answer.tool_call_errors) == 1


def test_a_stop_string_cuts_calls_too(hermes):
    one = request(choices=[ANSWER + " Then I go."], max_tokens=300, tools=[WEATHER], stop=(" Then",))
    answer = hermes.handle_request(one)
    assert (answer.text, answer.content, len(answer.tool_calls)) == (ANSWER, "I look.", 1)


def test_the_call_of_an_answer_goes_back_into_the_conversation(hermes):
    """A message with the calls has the same form as one with the text."""
    answer = hermes.handle_request(request(choices=[ANSWER], max_tokens=200, tools=[WEATHER]))
    calls = [{"type": "function", "function": vars(call)} for call in answer.tool_calls]
    messages = (
        Message("user", "where is the box?"),
        Message("assistant", answer.content, {"tool_calls": calls}),
        Message("tool", "on the left"),
    )
    one = LLMGenerationRequest(messages=messages, tools=(WEATHER,), sampling=SamplingParams(max_tokens=3))
    assert len(hermes.handle_request(one).token_ids) == 3


def test_special_tokens_mark_calls_but_are_no_content(tmp_path, template):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from edgellm_ros.runtime.text import tokenizer as ours

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True), AddedToken("</s>", special=True)])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = ours.Tokenizer(tmp_path / "tokenizer.json")
    ids = tokenizer.encode_prompt('I go. [TOOL_CALLS] [{"name": "go", "arguments": {}}]')
    reader = ToolCallReader(tokenizer, template("mistral"))
    found = reader.read(ids, tokenizer.decode(ids), (), (), [MOVE])
    assert (found.content, found.tool_calls) == ("I go.", (ToolCall("go", {}),))


def test_a_template_without_calls_leaves_answers_as_they_are_and_is_logged_once(hermes, template, caplog):
    reader = ToolCallReader(hermes.tokenizer, template("internvl3"))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert reader.read([], ANSWER, (), (), [MOVE]).content == ANSWER
    (record,) = caplog.records
    assert "the chat template writes no tool calls (set tool_call_format)" in record.getMessage()


def test_an_unknown_format_is_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(ValueError, match=r"^tool_call_format must be one of auto, none, hermes.*got 'json'$"):
        LLMInferenceRuntime(tmp_path, tool_call_format="json")
