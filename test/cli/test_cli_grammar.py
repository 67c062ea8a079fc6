# SPDX-License-Identifier: Apache-2.0
"""--json-schema, --regex and --choices, and the same keys of requests in a file."""

import json
import re

import pytest

SCHEMA = {"type": "object", "properties": {"go": {"type": "boolean"}}, "required": ["go"]}
SCHEMA["additionalProperties"] = False


@pytest.fixture
def generate(edgellm, tiny_engine):
    def run(*options):
        return edgellm("generate", tiny_engine, "--prompt", "go", "--max-tokens", 80, *options)

    return run


@pytest.mark.parametrize("as_file", [True, False], ids=["file", "text"])
def test_a_json_schema_is_a_file_or_text(generate, tmp_path, as_file):
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    schema = path if as_file else path.read_text()
    answer = generate("--json-schema", schema, "--temperature", 1, "--json").json
    assert json.loads(answer["text"]) in ({"go": True}, {"go": False})
    assert answer["grammar_complete"] is True


def test_true_is_the_schema_of_any_json(generate):
    answer = generate("--json-schema", "true", "--temperature", 1, "--json").json
    assert answer["grammar_complete"] in (True, False)
    assert not answer["text"][:1].isspace()


def test_an_answer_matches_the_regular_expression_or_says_that_it_was_cut(generate):
    assert re.fullmatch("[a-f]{4}\n", generate("--regex", "[a-f]{4}").out)
    cut = generate("--regex", "[a-f]{400}")
    assert re.fullmatch("[a-f]{80}\n", cut.out)
    assert "finish: length before the grammar is complete" in cut.err


def test_an_answer_is_one_of_the_choices(generate):
    assert generate("--choices", "left,right").out in ("left\n", "right\n")


@pytest.mark.parametrize(
    "options, words",
    [
        (["--regex", "("], ["regex '('", "unclosed group"]),
        (["--json-schema", '{"type": "text"}'], ["json_schema", "Invalid type: text"]),
        (["--json-schema", "[]"], ["json_schema must be an object or true, got '[]'"]),
        (["--json-schema", "false"], ["json_schema is false"]),
        (["--json-schema", "no/such.json"], ["no/such.json"]),
        (["--choices", "a,,b"], ["choices must be"]),
        (["--choices", "a,b", "--regex", "a"], ["not allowed with"]),
    ],
    ids=str,
)
def test_a_bad_grammar_is_refused_before_the_engines_load(generate, options, words):
    refused = generate(*options)
    assert refused.code == 2
    for word in words:
        assert word in refused.err


def test_requests_in_a_file_have_grammars_of_their_own(edgellm, tiny_engine, tmp_path):
    grammars = [{}, {"choices": ["stop"]}, {"json_schema": SCHEMA}]
    requests = [{"prompt": "go", **grammar} for grammar in grammars]
    (tmp_path / "requests.json").write_text(json.dumps(requests))
    files = ["--requests", tmp_path / "requests.json", "--out", tmp_path / "answers.json"]
    assert edgellm("generate", tiny_engine, *files, "--regex", "[0-9]{3}", "--max-tokens", 200).code == 0
    first, second, third = (answer["text"] for answer in json.loads((tmp_path / "answers.json").read_text()))
    assert re.fullmatch("[0-9]{3}", first)
    assert second == "stop"
    assert set(json.loads(third)) == {"go"}


def test_tool_calls_are_printed_and_in_the_json(edgellm, tiny_engine, tmp_path):
    call = '<tool_call>{"name": "find", "arguments": {"what": "box"}}</tool_call>'
    conversation = {"messages": [{"role": "user", "content": "go"}], "tools": [{"type": "function"}]}
    (tmp_path / "messages.json").write_text(json.dumps(conversation))
    options = ["--messages", tmp_path / "messages.json", "--regex", re.escape(f"I go. {call}")]
    options += ["--max-tokens", 200, "--tool-call-format", "hermes"]
    answer = edgellm("generate", tiny_engine, *options, "--json").json
    assert (answer["text"], answer["content"]) == (f"I go. {call}", "I go.")
    assert answer["tool_calls"] == [{"name": "find", "arguments": {"what": "box"}}]
    assert answer["tool_call_errors"] == []
    assert '[calls find({"what": "box"})]' in edgellm("generate", tiny_engine, *options).err
