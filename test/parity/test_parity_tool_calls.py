# SPDX-License-Identifier: Apache-2.0
"""Tool calls that published chat templates write are read back.

The calls are also those that transformers reads.
"""

import ast
import json

import pytest

from edgellm_ros.engine_directory.chat_template import ChatTemplate
from edgellm_ros.runtime.prompt.tool_call_formats import FORMATS
from edgellm_ros.runtime.prompt.tool_calls import find_format
from fixtures.conversations import CALL, SPECIAL_TOKENS, WEATHER
from fixtures.reference_prompts import PUBLISHED, reference_prompt

pytestmark = pytest.mark.parity

WRITTEN = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_instruct_2507": "hermes",
    "qwen3_vl": "hermes",
    "qwen3_5_nothink": "xml",
    "qwen3_5_think": "xml",
    "qwen3_6": "xml",
    "nemotron_3_nano": "xml",
    "llama3_1": "llama",
    "llama3_2": "llama",
}
CALLED = '<tool_call>\n{"name": "weather", "arguments": {"town": "Ulm", "days": 2}}\n</tool_call>'
ANSWERS = {
    "qwen3": (
        CALLED,
        f"I look.\n{CALLED}\n{CALLED}",
        f"<think>\nI could call it.\n</think>\n\n{CALLED}",
        f"<think>\n{CALLED}\n</think>\n\nSunny.",
        '<tool_call>{"name":"weather","arguments":{"town":"</tool \\u00fc"}}</tool_call>',
        "Sunny.",
    ),
    "llama3": (
        '{"name": "weather", "parameters": {"town": "Ulm", "days": 2}}',
        '{"name": "weather", "parameters": {"town": {"x": [1, null, "}"]}}}',
        "Sunny.",
    ),
}
ENDS = {"qwen3": "<|im_end|>", "llama3": "<|eot_id|>"}


@pytest.fixture(scope="module", autouse=True)
def published():
    if not PUBLISHED.is_dir():
        pytest.skip(f"{PUBLISHED} not found: make parity installs it")


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_that_a_published_template_writes_are_read_back(tmp_path, name):
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(SPECIAL_TOKENS))
    source = (PUBLISHED / f"{name}.jinja").read_text()
    (tmp_path / "t.jinja").write_text(source)
    found = find_format(ChatTemplate(tmp_path / "t.jinja"))
    assert found.name == WRITTEN[name]
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    prompt = reference_prompt(source, messages, {"tools": [WEATHER], "date_string": "x"})
    answer = prompt[prompt.rindex('{"name": "weather"' if name.startswith("llama") else "<tool_call>") :]
    answer = answer[: answer.index("<|e" if name.startswith("llama") else "<|im_end|>")]
    (call,) = found.parse(answer, [WEATHER]).tool_calls
    days = "2" if found.name == "xml" else 2  # the schema has no days
    assert (call.name, call.arguments) == ("weather", CALL["function"]["arguments"] | {"days": days})


@pytest.mark.parametrize("family", ANSWERS)
def test_calls_are_those_that_transformers_reads(family):
    parsing = pytest.importorskip("transformers.utils.chat_parsing.response_parser")
    tree = ast.parse((PUBLISHED.parent / "chat_template_utils.py").read_text())
    name = f"{family}_template"
    template = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    )
    ours = FORMATS["hermes" if family == "qwen3" else "llama"]
    for answer in ANSWERS[family]:
        expected = parsing.parse_response(answer + ENDS[family], template, prefix="", tools=[WEATHER])
        found = ours.parse(answer, [WEATHER])
        calls = [call["function"] for call in expected.get("tool_calls", [])]
        assert [vars(call) for call in found.tool_calls] == calls
        content = found.content.split("</think>")[-1]  # transformers has the reasoning elsewhere
        assert content.strip() == expected.get("content", "").strip()
