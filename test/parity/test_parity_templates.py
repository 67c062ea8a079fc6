# SPDX-License-Identifier: Apache-2.0
"""Prompts of conversations have the ids that transformers makes of them.

There are templates of every family.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import numpy as np
import pytest

from edgellm_ros.engine_directory.chat_template import ChatTemplate
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.runtime.conversation import ImagePart, Message, TextPart
from edgellm_ros.runtime.prompt.prompt_builder import PromptBuilder
from edgellm_ros.runtime.request import LLMGenerationRequest
from edgellm_ros.runtime.text.tokenizer import Tokenizer
from fixtures.conversations import (
    CONVERSATIONS,
    IMAGE,
    IMAGE_CONVERSATIONS,
    SPECIAL_TOKENS,
    TEMPLATES,
    TEXT_TEMPLATES,
    UNFINISHED,
    VARIABLES,
    VISION_TEMPLATES,
    recorded_cases,
    recorded_prompts,
)
from fixtures.reference_prompts import PUBLISHED, reference_prompt
from fixtures.tiny_checkpoint import make_tokenizer

pytestmark = pytest.mark.parity

FURTHER_TOKENS = (
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eot|>", "<|image|>",
    "<|header_start|>", "<|header_end|>", "<|python_start|>", "<|python_end|>", "<SPECIAL_10>",
    "<SPECIAL_11>", "<SPECIAL_12>", "<IMG_CONTEXT>",
)  # fmt: skip
COPIES = {  # file here: file of the package trl
    "qwen2_5": "qwen2_5",
    "qwen2_5_vl": "qwen2_5_vl",
    "qwen3": "qwen3",
    "qwen3_vl": "qwen3_vl",
    "qwen3_5": "qwen3_5_nothink",
}
# Further templates of trl, of models that the families here read, and whether the model is for text only.
PUBLISHED_TEMPLATES = {
    "qwen3_instruct_2507": True,
    "deepseek_r1_distill": True,  # of Qwen2.5 and Llama
    "llama3": True,
    "llama3_1": True,
    "llama3_2": True,
    "nemotron_3_nano": True,
    "qwen3_5_think": False,
    "qwen3_6": False,
}


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory) -> Path:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(list(FURTHER_TOKENS))
    path = tmp_path_factory.mktemp("templates") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module")
def compare(tokenizer_file, tiny_engine, tmp_path_factory):
    """A function that asserts that transformers and this package make the same ids.

    The arguments are `compare(template, conversation, variables, text_only, last)`; `last`: an unfinished
    message that is continued. A template that refuses a conversation must refuse it in both.
    """
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file), **SPECIAL_TOKENS)
    tokenizer = Tokenizer(tokenizer_file)
    config = EngineConfig.load(tiny_engine)
    config = dataclasses.replace(config, llm=dataclasses.replace(config.llm, vocab_size=tokenizer.size))

    @functools.cache  # a long template takes Jinja 50 ms to compile
    def builder_of(template: str, text_only: bool) -> PromptBuilder:
        folder = tmp_path_factory.mktemp("template")
        (folder / "special_tokens_map.json").write_text(json.dumps(SPECIAL_TOKENS))
        (folder / "t.jinja").write_text(template)
        parts = {"vision": None, "audio": None, "action": None} if text_only else {}
        engine = dataclasses.replace(config, **parts)
        return PromptBuilder(tokenizer, ChatTemplate(folder / "t.jinja"), engine)

    def run(
        template: str, conversation: list[dict], variables: dict, text_only: bool, last: dict | None = None
    ) -> list[int] | None:
        conversation = [*conversation, *([last] if last else [])]
        builder = builder_of(template, text_only)
        fields = {name: variables[name] for name in ("tools", "enable_thinking") if name in variables}
        further = {name: value for name, value in variables.items() if name not in fields}
        request = LLMGenerationRequest(
            messages=[to_message(message) for message in conversation],
            chat_template_kwargs=further,
            continue_final_message=last is not None,
            **fields,
        )
        try:
            expected = reference.apply_chat_template(
                conversation,
                chat_template=template,
                add_generation_prompt=last is None,
                continue_final_message=last is not None,
                **variables,
            )["input_ids"]
        except Exception:  # whatever the template raises
            with pytest.raises(ValueError, match=r"t\.jinja"):
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
@pytest.mark.parametrize("family", [*TEXT_TEMPLATES, *VISION_TEMPLATES])
def test_a_conversation_has_the_ids_of_transformers(compare, family, conversation, variables):
    template = (TEMPLATES / f"{family}.jinja").read_text()
    ids = compare(template, CONVERSATIONS[conversation], VARIABLES[variables], family in TEXT_TEMPLATES)
    assert ids


@pytest.mark.parametrize("variables", VARIABLES)
@pytest.mark.parametrize("conversation", IMAGE_CONVERSATIONS)
@pytest.mark.parametrize("family", VISION_TEMPLATES)
def test_images_have_the_ids_of_transformers(compare, family, conversation, variables):
    template = (TEMPLATES / f"{family}.jinja").read_text()
    assert compare(template, IMAGE_CONVERSATIONS[conversation], VARIABLES[variables], text_only=False)


@pytest.mark.parametrize("unfinished", UNFINISHED)
@pytest.mark.parametrize("family", [*TEXT_TEMPLATES, *VISION_TEMPLATES])
def test_a_continued_message_has_the_ids_of_transformers(compare, family, unfinished):
    template = (TEMPLATES / f"{family}.jinja").read_text()
    for conversation in CONVERSATIONS.values():
        ids = compare(template, conversation, {}, family in TEXT_TEMPLATES, UNFINISHED[unfinished])
        # the template of Nemotron-H leaves out reasoning, so transformers refuses to continue it
        assert ids or (family, unfinished) == ("nemotron_h", "reasoning")


@pytest.mark.parametrize("variables", VARIABLES)
@pytest.mark.parametrize("conversation", [*CONVERSATIONS, *IMAGE_CONVERSATIONS])
def test_the_template_of_llama_4_gives_the_ids_of_transformers(compare, conversation, variables):
    """The one published template that transformers itself contains."""
    published = pytest.importorskip("transformers.models.llama4.processing_llama4").chat_template
    messages = (CONVERSATIONS | IMAGE_CONVERSATIONS)[conversation]
    assert compare(published, messages, VARIABLES[variables], text_only=False)


@pytest.fixture
def published() -> Path:
    """The published templates, which `make parity` installs."""
    if not PUBLISHED.is_dir():
        pytest.skip(f"{PUBLISHED} not found: make parity installs it")
    return PUBLISHED


@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_of_a_published_template_has_its_bytes(published, copy):
    original = published / f"{COPIES[copy]}.jinja"
    assert (TEMPLATES / f"{copy}.jinja").read_bytes() == original.read_bytes()


@pytest.mark.parametrize("name", PUBLISHED_TEMPLATES)
def test_a_published_template_of_a_family_gives_the_ids_of_transformers(compare, published, name):
    template, text_only = (published / f"{name}.jinja").read_text(), PUBLISHED_TEMPLATES[name]
    conversations = CONVERSATIONS | ({} if text_only else IMAGE_CONVERSATIONS)
    further = [(variables, None) for variables in VARIABLES.values()]
    further += [({}, last) for last in UNFINISHED.values()]
    made = [
        compare(template, conversation, variables | {"date_string": "x"}, text_only, last)
        for conversation in conversations.values()
        for variables, last in further
    ]
    assert sum(ids is not None for ids in made) > len(made) / 2


def test_every_published_template_renders_as_transformers_renders_it(published, tmp_path):
    """Templates of further models have further constructs."""
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(SPECIAL_TOKENS))
    paths = [path for path in sorted(published.glob("*.jinja")) if not path.stem.endswith("_training")]
    sources = {path.name: path.read_text() for path in paths}
    assert len(sources) > 30
    for name, source in sources.items():
        (tmp_path / name).write_text(source)
        ours = ChatTemplate(tmp_path / name)
        for case, (messages, variables, last) in recorded_cases("qwen3_vl").items():
            try:
                expected = reference_prompt(source, messages, variables, last)
            except Exception:  # whatever the template raises
                with pytest.raises(ValueError, match=name):
                    ours.render(messages, variables, last)
            else:
                assert ours.render(messages, variables, last) == expected, case


@pytest.mark.parametrize("template", [*TEXT_TEMPLATES, *VISION_TEMPLATES])
def test_the_recorded_prompts_are_those_of_transformers(template):
    source = (TEMPLATES / f"{template}.jinja").read_text()
    cases = recorded_cases(template)
    expected = {name: reference_prompt(source, *case) for name, case in cases.items()}
    assert recorded_prompts(template) == expected


def test_a_conversation_that_a_template_refuses_is_refused_by_both(compare):
    template = (TEMPLATES / "qwen3_5.jinja").read_text()
    messages = [{"role": "system", "content": [IMAGE]}, *CONVERSATIONS["question"]]
    assert compare(template, messages, {}, text_only=False) is None
