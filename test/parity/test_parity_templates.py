# SPDX-License-Identifier: Apache-2.0
"""Prompts of conversations have the ids that transformers makes of them, for templates of every family."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.runtime.conversation import ImagePart, Message, TextPart
from edgellm_ros.runtime.prompt.chat_template import ChatTemplate
from edgellm_ros.runtime.prompt.prompt_builder import PromptBuilder
from edgellm_ros.runtime.prompt.tokenizer import Tokenizer
from edgellm_ros.runtime.request import LLMGenerationRequest
from fixtures.tiny_checkpoint import make_tokenizer

pytestmark = pytest.mark.parity

TEMPLATES = Path(__file__).parent.parent / "data" / "chat_templates"
TEXT_FAMILIES = ("qwen3", "qwen2_5", "llama3", "nemotron_h")
VISION_FAMILIES = ("qwen3_vl", "qwen2_5_vl", "internvl3", "qwen3_5")
FURTHER_TOKENS = (
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eot|>", "<|image|>",
    "<|header_start|>", "<|header_end|>", "<|python_start|>", "<|python_end|>", "<SPECIAL_10>",
    "<SPECIAL_11>", "<SPECIAL_12>", "<IMG_CONTEXT>",
)  # fmt: skip
SPECIAL_TOKENS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather in a 'town' <now> \u00e9",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Ulm", "days": 2}}}
SYSTEM = {"role": "system", "content": " Be brief. "}
CALLED = [
    {"role": "user", "content": "Weather in Ulm?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"sun": true}'},
]
CONVERSATIONS = {
    "question": [{"role": "user", "content": "  hi \u00e9\n"}],
    "system": [SYSTEM, {"role": "user", "content": "hi"}],
    "turns": [
        SYSTEM,
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "<think>\nwhy not?\n</think>\n\nHello. "},
        {"role": "user", "content": "and /no_think now?"},
    ],
    "call": CALLED,
    "calls": [
        SYSTEM,
        *CALLED,
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "Sunny.", "reasoning_content": "sun is true"},
        {"role": "user", "content": "Thanks."},
    ],
    "reasoning before a call": [
        CALLED[0],
        {**CALLED[1], "content": "Let me see.", "reasoning_content": "\nI need the weather.\n"},
        CALLED[2],
    ],
}
IMAGE, IS = {"type": "image"}, {"type": "text", "text": " = "}
IMAGE_CONVERSATIONS = {
    "image": [{"role": "user", "content": [IMAGE, {"type": "text", "text": "What?"}]}],
    "images between words": [
        SYSTEM,
        {"role": "user", "content": [{"type": "text", "text": "Is "}, IMAGE, IS, IMAGE]},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": [IMAGE, {"type": "text", "text": "And this?"}]},
    ],
}
VARIABLES = {
    "plain": {},
    "thinking": {"enable_thinking": True},
    "no thinking": {"enable_thinking": False},
    "tools": {"tools": [WEATHER, WEATHER]},
    "no tools": {"tools": []},
    "kwargs": {"tools": [WEATHER], "add_vision_id": True, "tools_in_user_message": False, "date_string": "x"},
}


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory) -> Path:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(list(FURTHER_TOKENS))
    path = tmp_path_factory.mktemp("templates") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def compare(tokenizer_file, tiny_engine, tmp_path):
    """`compare(template, conversation, variables, text_only)`: assert that both make the same ids.

    A template that refuses a conversation must refuse it in both.
    """
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file), **SPECIAL_TOKENS)
    tokenizer = Tokenizer(tokenizer_file)
    config = EngineConfig.load(tiny_engine)
    config = dataclasses.replace(config, llm=dataclasses.replace(config.llm, vocab_size=tokenizer.size))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(SPECIAL_TOKENS))

    def run(template: str, conversation: list[dict], variables: dict, text_only: bool) -> list[int] | None:
        (tmp_path / "t.jinja").write_text(template)
        parts = {"vision": None, "audio": None, "action": None} if text_only else {}
        engine = dataclasses.replace(config, **parts)
        builder = PromptBuilder(tokenizer, ChatTemplate(tmp_path / "t.jinja"), engine)
        fields = {name: variables[name] for name in ("tools", "enable_thinking") if name in variables}
        further = {name: value for name, value in variables.items() if name not in fields}
        request = LLMGenerationRequest(
            messages=[to_message(message) for message in conversation], chat_template_kwargs=further, **fields
        )
        try:
            expected = reference.apply_chat_template(
                conversation, chat_template=template, add_generation_prompt=True, **variables
            )["input_ids"]
        except Exception:  # whatever the template raises
            with pytest.raises(ValueError, match=r"t\.jinja: "):
                builder.build(request, (), (), ())
            return None
        assert builder.build(request, (), (), ()) == expected
        return expected

    return run


def to_message(message: dict) -> Message:
    content = message["content"]
    if not isinstance(content, str):
        pixels = np.zeros((4, 4, 3), np.uint8)
        content = [ImagePart(pixels) if part == IMAGE else TextPart(part["text"]) for part in content]
    fields = {name: value for name, value in message.items() if name not in ("role", "content")}
    return Message(message["role"], content, fields)


@pytest.mark.parametrize("variables", VARIABLES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("family", [*TEXT_FAMILIES, *VISION_FAMILIES])
def test_a_conversation_has_the_ids_of_transformers(compare, family, conversation, variables):
    template = (TEMPLATES / f"{family}.jinja").read_text()
    ids = compare(template, CONVERSATIONS[conversation], VARIABLES[variables], family in TEXT_FAMILIES)
    assert ids


@pytest.mark.parametrize("variables", VARIABLES)
@pytest.mark.parametrize("conversation", IMAGE_CONVERSATIONS)
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_images_have_the_ids_of_transformers(compare, family, conversation, variables):
    template = (TEMPLATES / f"{family}.jinja").read_text()
    assert compare(template, IMAGE_CONVERSATIONS[conversation], VARIABLES[variables], text_only=False)


@pytest.mark.parametrize("variables", VARIABLES)
@pytest.mark.parametrize("conversation", [*CONVERSATIONS, *IMAGE_CONVERSATIONS])
def test_a_published_template_gives_the_ids_of_transformers(compare, conversation, variables):
    """The template of Llama 4, which transformers itself contains."""
    published = pytest.importorskip("transformers.models.llama4.processing_llama4").chat_template
    messages = (CONVERSATIONS | IMAGE_CONVERSATIONS)[conversation]
    assert compare(published, messages, VARIABLES[variables], text_only=False)


def test_a_conversation_that_a_template_refuses_is_refused_by_both(compare):
    template = (TEMPLATES / "qwen3_5.jinja").read_text()
    messages = [{"role": "system", "content": [IMAGE]}, *CONVERSATIONS["question"]]
    assert compare(template, messages, {}, text_only=False) is None
