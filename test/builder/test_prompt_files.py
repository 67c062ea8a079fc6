# SPDX-License-Identifier: Apache-2.0
"""Tokenizers, templates and token ids that no prompt can use are refused."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from edgellm_ros.builder import check, export
from edgellm_ros.builder.config.prompt_files import prompt_files
from fixtures.changed_json import change
from fixtures.conversations import SPECIAL_TOKENS, TEMPLATES, TEXT_TEMPLATES
from fixtures.smolvla_checkpoint import write_smolvla
from fixtures.tiny_checkpoint import write_tiny_checkpoint

CHARSMAP = "BAAAAAAAAAAAAAAA"  # on which the library panics


@pytest.fixture
def checkpoint(tmp_path):
    return write_tiny_checkpoint(tmp_path / "checkpoint", shards=1)


def refused(checkpoint, message):
    """Check that an export and its check refuse a checkpoint with one line."""
    for run in (lambda: export(checkpoint, checkpoint / "engine"), lambda: check(checkpoint)):
        with pytest.raises(ValueError, match=message) as error:
            run()
        assert len(str(error.value).splitlines()) == 1
    assert not (checkpoint / "engine").exists()


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "pad_token_id"])
@pytest.mark.parametrize(
    ("file", "section"),
    [("config.json", []), ("config.json", ["text_config"]), ("generation_config.json", [])],
)
@pytest.mark.parametrize("value", [302, -1, 2**40])
def test_an_id_outside_the_vocabulary_is_refused(checkpoint, key, file, section, value):
    change(checkpoint / file, [*section, key], value)
    refused(checkpoint, rf"{file}.*: {key} {value}: outside the vocabulary of 302$")


@pytest.mark.parametrize("value", [[258, 302], [258, "a"], "258", True])
def test_a_list_of_ids_is_checked(checkpoint, value):
    change(checkpoint / "generation_config.json", ["eos_token_id"], value)
    refused(checkpoint, rf"generation_config\.json: eos_token_id {re.escape(repr(value))}: ")


@pytest.mark.parametrize("name", ["image", "vision_start", "vision_end", "audio", "audio_start", "audio_end"])
def test_an_id_of_a_placeholder_outside_the_vocabulary_is_refused(checkpoint, name):
    change(checkpoint / "config.json", [f"{name}_token_id"], 302)
    refused(checkpoint, rf"config\.json: {name}_token_id 302: outside the vocabulary of 302$")


def test_an_id_of_videos_outside_the_vocabulary_is_refused(tmp_path):
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint", shards=1, videos=True)
    change(checkpoint / "config.json", ["video_token_id"], 302)
    refused(checkpoint, r"config\.json: .*video.*302")


def test_a_tokenizer_of_more_tokens_than_the_model_has_is_refused(checkpoint):
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    more = tokenizer["added_tokens"][-1] | {"id": 302, "content": "<|later|>"}
    change(checkpoint / "tokenizer.json", ["added_tokens"], [*tokenizer["added_tokens"], more])
    refused(checkpoint, r"tokenizer\.json: token '<\|later\|>' has the id 302, outside the vocabulary of 302")


def test_a_token_far_outside_the_vocabulary_is_refused(checkpoint):
    change(checkpoint / "tokenizer.json", ["model", "vocab", "h"], 2**31)
    refused(checkpoint, r"tokenizer\.json: token 'h' has the id 2147483648, outside the vocabulary of 302")


def test_an_added_token_with_the_id_of_another_place_is_refused(checkpoint):
    """The library would give it the next id without a word."""
    change(checkpoint / "tokenizer.json", ["added_tokens", 0, "id"], 270)
    refused(checkpoint, r"tokenizer\.json: added token '<\|endoftext\|>' has the id 270, but the tokens ")


WORD_LEVEL = {"type": "WordLevel", "vocab": {f"word{i}": i for i in range(256)}, "unk_token": "<unk>"}
TOKENIZERS = [
    (["model", "type"], "Word", "not a tokenizer: "),
    (["model", "merges"], ["a b c"], "not a tokenizer: "),
    (["added_tokens"], [{"id": 3}], "not a tokenizer: "),
    (["added_tokens"], 3, "not a tokenizer: "),
    (["pre_tokenizer"], {"type": "Split"}, "not a tokenizer: "),
    (["model"], WORD_LEVEL, "cannot encode text: WordLevel error: Missing"),
    (["model", "vocab"], {}, "has the id|no tokens for 'hello'"),
    (["normalizer"], {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}, "cannot encode text: index"),
    (["normalizer"], {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "not a tokenizer: "),
]


@pytest.mark.parametrize(("keys", "value", "message"), TOKENIZERS)
def test_a_tokenizer_that_cannot_be_used_is_refused(checkpoint, keys, value, message):
    change(checkpoint / "tokenizer.json", keys, value)
    refused(checkpoint, rf"tokenizer\.json: .*({message})")


DAMAGED = [
    ("{% for m in messages %}", "not a Jinja template: Unexpected end of template"),
    ("{{ messages | beautiful }}", "not a Jinja template: No filter named 'beautiful'"),
    ("{% include 'other' %}", "no loader for this environment specified"),
    ("{{ fetch('x') }}", "'fetch' is undefined"),
    ("{{ messages[0].content.__class__.__mro__ }}", "access to attribute '__class__'"),
    ("{{ raise_exception('not this one') }}", "not this one"),
    ("{{ 1 / 0 }}", "division by zero"),
    ("{% if true %}" * 300 + "{% endif %}" * 300, "not a Jinja template: "),
    ("", "leaves out the user's text"),
    ("{{ messages[0].role }}", "leaves out the user's text"),
]


@pytest.mark.parametrize(("template", "message"), DAMAGED)
def test_a_template_that_cannot_be_rendered_is_refused(checkpoint, template, message):
    (checkpoint / "chat_template.jinja").write_text(template)
    refused(checkpoint, rf"chat_template\.jinja: .*{message}")


def test_a_damaged_template_names_the_file_that_has_it(checkpoint):
    (checkpoint / "chat_template.jinja").unlink()
    (checkpoint / "tokenizer_config.json").write_text('{"chat_template": "{% for"}')
    refused(checkpoint, r"tokenizer_config\.json: not a Jinja template")


def test_a_template_that_is_not_utf_8_is_named(checkpoint):
    (checkpoint / "chat_template.jinja").write_bytes(b"{{ messages }} \xff")
    refused(checkpoint, r"chat_template\.jinja: a chat template that is not UTF-8: .* in position 15")


@pytest.mark.parametrize("name", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
def test_published_templates_are_taken(checkpoint, name):
    shutil.copyfile(TEMPLATES / f"{name}.jinja", checkpoint / "chat_template.jinja")
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(SPECIAL_TOKENS))
    text_only = name in TEXT_TEMPLATES
    assert prompt_files(checkpoint, 302, text_only)["chat_template.jinja"]


def test_a_template_that_needs_a_system_prompt_is_taken(checkpoint):
    template = (checkpoint / "chat_template.jinja").read_text()
    needs = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}"
    (checkpoint / "chat_template.jinja").write_text(needs + template)
    assert check(checkpoint).files["chat_template.jinja"]


def test_a_table_with_more_rows_than_the_tokenizer_has_tokens_is_taken(checkpoint):
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    change(checkpoint / "tokenizer.json", ["added_tokens"], tokenizer["added_tokens"][:-2])
    assert check(checkpoint).config.llm.vocab_size == 302


def test_a_tokenizer_of_a_policy_is_checked(tmp_path):
    checkpoint = write_smolvla(tmp_path / "checkpoint")
    original = (checkpoint / "vlm" / "tokenizer.json").read_bytes()
    for keys, value, message in (
        (["model", "vocab", "h"], 2**31, "has the id 2147483648, outside the vocabulary"),
        (["model"], WORD_LEVEL, "cannot encode text: WordLevel error"),
    ):
        (checkpoint / "vlm" / "tokenizer.json").write_bytes(original)
        change(checkpoint / "vlm" / "tokenizer.json", keys, value)
        shutil.rmtree(checkpoint / "engine", ignore_errors=True)
        refused(checkpoint, rf"tokenizer\.json: .*({message})")
