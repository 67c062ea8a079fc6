# SPDX-License-Identifier: Apache-2.0
import itertools

import pytest
import tokenizers

from edgellm_ros.runtime.text.text_stream import TextStream
from edgellm_ros.runtime.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint) -> Tokenizer:
    """A byte tokenizer: non-ASCII characters and stop strings span several tokens."""
    return Tokenizer(tiny_checkpoint / "tokenizer.json")


def stream(tokenizer, text, stop=()) -> tuple[TextStream, list[str]]:
    """Push a text token by token; return the visible text after each."""
    result, visible = TextStream(tokenizer, stop), []
    for token in tokenizer.encode(text):
        result.push(token)
        visible.append(result.visible)
        if result.stopped:
            break
    return result, visible


def test_characters_appear_when_they_are_complete(tokenizer):
    result, visible = stream(tokenizer, "a\u00e4\u4e2d\U0001f600b")
    assert result.text == "a\u00e4\u4e2d\U0001f600b"
    complete = ["a", "a\u00e4", "a\u00e4\u4e2d", "a\u00e4\u4e2d\U0001f600", "a\u00e4\u4e2d\U0001f600b"]
    held_back = [1, 2, 3, 0, 0]  # bytes that come before the next character is complete
    assert visible == [
        text for text, count in zip(complete, held_back, strict=True) for _ in range(count + 1)
    ]


def test_a_continued_text_keeps_the_space_that_decoding_removes_from_its_first_token(tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"\u2581go": 0, "\u2581there": 1}, "\u2581go"))
    words.decoder = tokenizers.decoders.Metaspace()
    words.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    alone, continued = TextStream(tokenizer, ()), TextStream(tokenizer, (), before=[0])
    alone.push(1)
    continued.push(1)
    assert (alone.text, continued.text) == ("there", " there")


def test_incomplete_bytes_are_shown_at_the_end(tokenizer):
    result = TextStream(tokenizer, ())
    for token in [*tokenizer.encode("a"), *tokenizer.encode("\u4e2d")[:2]]:
        result.push(token)
    assert result.text == "a"
    result.finish()
    assert result.text == "a\ufffd"


def test_the_text_is_cut_before_a_stop_string_that_is_spread_over_tokens(tokenizer):
    result, visible = stream(tokenizer, "the end is near", ["end"])
    assert result.stopped
    assert result.text == "the "
    assert visible == ["t", "th", "th", "the ", "the ", "the ", "the "]  # "th": the "e" might begin an "end"


def test_a_partial_stop_string_is_shown_once_it_cannot_match(tokenizer):
    _, visible = stream(tokenizer, "enter", ["end"])
    assert visible == ["", "", "ent", "ent", "enter"]


def test_visible_text_only_grows(tokenizer):
    stops = ["aab", "ba", "abab"]
    for letters in itertools.product("ab", repeat=7):
        result, visible = stream(tokenizer, "".join(letters), stops)
        result.finish()
        assert all(result.text.startswith(shown) for shown in visible)
        assert not any(stop in result.text for stop in stops)


def test_the_stop_string_that_is_complete_first_ends_the_text(tokenizer):
    assert stream(tokenizer, "one two three", ["three", "two"])[0].text == "one "


def test_special_tokens_add_no_text(tokenizer):
    result = TextStream(tokenizer, ())
    for token in tokenizer.encode_prompt("a<|im_start|>b"):
        result.push(token)
    assert result.text == "ab"


def test_text_equals_that_of_decoding_everything_at_once(tokenizer):
    text = "the red box \u2014 \u00abpr\u00eat\u00bb \U0001f916\U0001f9e1!"
    result, _ = stream(tokenizer, text)
    result.finish()
    assert result.text == tokenizer.decode(tokenizer.encode(text)) == text
