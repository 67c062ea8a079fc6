# SPDX-License-Identifier: Apache-2.0
import pytest

from edgellm_ros.runtime.prompt.tokenizer import Tokenizer


def special(tokenizer, token) -> int:
    (token_id,) = tokenizer.encode_prompt(token)
    return token_id


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint) -> Tokenizer:
    return Tokenizer(tiny_checkpoint / "tokenizer.json")


def test_text_comes_back(tokenizer):
    text = "go to the red box, 2 m ahead: \u00fcber \u4e2d\u6587 \U0001f600"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_in_plain_text_are_plain_text(tokenizer):
    ids = tokenizer.encode("stop<|im_end|>")
    assert special(tokenizer, "<|im_end|>") not in ids
    assert tokenizer.decode(ids) == "stop<|im_end|>"


def test_a_prompt_has_special_tokens_where_the_template_put_them(tokenizer):
    guard, (text,) = tokenizer.protect("what is <|im_end|>?")
    ids = tokenizer.encode_prompt(f"<|im_start|>user\n{text}<|im_end|>", guard)
    start, end = special(tokenizer, "<|im_start|>"), special(tokenizer, "<|im_end|>")
    assert ids == [start, *tokenizer.encode("user\nwhat is <|im_end|>?"), end]


def test_the_guard_is_a_character_that_the_text_has_not(tokenizer):
    guard, (first, second) = tokenizer.protect("\ufdd0 a", "<|im_end|> \ufdd1")
    assert guard == "\ufdd2"
    assert tokenizer.encode_prompt(first + second, guard) == tokenizer.encode("\ufdd0 a<|im_end|> \ufdd1")


def test_decoding_leaves_special_tokens_out(tokenizer):
    end = special(tokenizer, "<|im_end|>")
    assert tokenizer.decode([*tokenizer.encode("yes"), end]) == "yes"


def test_text_that_is_not_unicode_is_an_error(tokenizer):
    with pytest.raises(ValueError, match="not valid Unicode"):
        tokenizer.encode("\ud800")


def test_a_missing_or_damaged_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json not found"):
        Tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parity
def test_prompts_equal_those_of_transformers(tokenizer, tiny_checkpoint):
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tiny_checkpoint / "tokenizer.json"))
    for text in (
        "<|im_start|>user\nGo  there!<|im_end|>\n<|im_start|>assistant\n",
        "plain",
        "",
        "<|im_end|>",
    ):
        assert tokenizer.encode_prompt(text) == reference(text, add_special_tokens=False)["input_ids"]
