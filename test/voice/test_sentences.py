# SPDX-License-Identifier: Apache-2.0
"""Sentences that can be spoken, from text that arrives in pieces."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm_ros.voice.sentences import SentenceSplitter, sentences_of
from fixtures.tiny_voice import random_text

ANSWER = """# Plan
I see **Dr. Smith** at 3.5 m, e.g. near the box. See https://www.example.com/a/b.html. Done!
1. First, turn left.
2) Then `stop`.
- item *one*

```python
print("no. no.")
```
<think>Hmm. A red one.</think>It costs $5.00 ... really? "Yes." He said so. 你好。我是机器人！Это тест. वह है।
Ok 😀
| a | b |
|---|---|
[the map](http://x.y/z?q=1.2) of snake_case in the U.S. is J. R. Smith's."""
SPOKEN = [
    "Plan",
    "I see Dr. Smith at 3.5 m, e.g. near the box.",
    "See example.com.",
    "Done!",
    "1, First, turn left.",
    "2, Then stop.",
    "item one",
    "It costs $5.00. really?",
    '"Yes."',
    "He said so.",
    "你好。",
    "我是机器人！",
    "Это тест.",
    "वह है।",
    "Ok",
    "a, b",
    "the map of snake_case in the U.S. is J. R. Smith's.",
]


def streamed(text: str, size: int, **lengths: int) -> list[str]:
    splitter = SentenceSplitter(**lengths)
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    return [sentence for piece in pieces for sentence in splitter.add(piece)] + splitter.end()


def test_sentences_are_without_marks_code_and_thoughts():
    assert sentences_of(ANSWER) == SPOKEN


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
def test_the_sentences_do_not_depend_on_the_pieces(size):
    assert streamed(ANSWER, size) == SPOKEN


def test_a_sentence_is_returned_as_soon_as_the_next_one_begins():
    splitter = SentenceSplitter()
    assert splitter.add("I go. ") == []  # "e.g. the" would go on
    assert splitter.add("Then") == ["I go."]
    assert splitter.add(" I stop! ") == ["Then I stop!"]


def test_a_decimal_number_is_not_cut_between_two_pieces():
    splitter = SentenceSplitter()
    assert splitter.add("It is 3.") == []
    assert splitter.add("5 m away. It") == ["It is 3.5 m away."]


def test_a_long_sentence_is_cut_at_pauses_then_spaces():
    text = "it goes on and on, " * 40
    sentences = sentences_of(text, max_length=100)
    assert all(len(sentence) <= 100 and sentence.endswith("on") for sentence in sentences)
    assert ", ".join(sentences).split() == text.strip(", ").split()
    assert max(map(len, sentences_of("word " * 1000, max_length=50))) <= 50
    assert list(map(len, sentences_of("a" * 450))) == [200, 200, 50]


def test_the_first_sentence_may_be_shorter():
    text = "The robot stands in front of a large red box and a blue cone is behind it, far away from here."
    first, *rest = streamed(text, 5, first_length=40)
    assert first == "The robot stands in front of a large"
    assert rest == ["red box and a blue cone is behind it, far away from here."]


def test_the_text_that_waits_is_bounded():
    splitter = SentenceSplitter(max_length=100)
    for piece in ("x" * 100_000, " y" * 10_000, "`" * 10_000, "<think>" + "z " * 10_000):
        splitter.add(piece)
        assert len(splitter._text) <= 300


def test_random_texts_give_short_sentences_that_can_be_encoded():
    rng = np.random.default_rng(5)
    for _ in range(300):
        for sentence in sentences_of(random_text(rng)):
            assert 0 < len(sentence) <= 200
            assert sentence.encode().decode().isprintable() or " " in sentence
            assert not any(ord(character) < 32 for character in sentence)


def test_a_length_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="max_length must be at least 20 characters, got 5"):
        SentenceSplitter(5)
