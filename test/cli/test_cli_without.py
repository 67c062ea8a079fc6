# SPDX-License-Identifier: Apache-2.0
"""The option --without: parts of an engine directory that are not opened."""

from __future__ import annotations

import io

import pytest
import soundfile

from fixtures.reference_inputs import make_sound
from fixtures.refusal import assert_refused

WITHOUT = ("--without", "visual,audio,action")


def test_generate_answers_in_words(edgellm, tiny_engine):
    question = ("generate", tiny_engine, "--prompt", "hello", "--max-tokens", 8, "--json")
    expected = edgellm(*question).json
    answer = edgellm(*question, *WITHOUT).json
    assert answer["token_ids"] == expected["token_ids"]
    assert answer["prompt_tokens"] == expected["prompt_tokens"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--image", "IMAGE"), "the vision encoder was left out when this engine directory was opened"),
        (("--action-samples", 1), "the action head was left out when this engine directory was opened"),
    ],
)
def test_generate_refuses_what_needs_a_part_that_was_left_out(edgellm, tiny_engine, image, arguments, words):
    given = (image if word == "IMAGE" else word for word in arguments)
    assert_refused(edgellm("generate", tiny_engine, "--prompt", "hello", *WITHOUT, *given), words)


@pytest.mark.parametrize("command", ["generate", "chat", "bench", "inspect"])
def test_an_unknown_part_is_refused(edgellm, tiny_engine, command):
    told = edgellm(command, tiny_engine, "--without", "visual,vision")
    assert told.code == 2
    assert "--without: without must be of visual, audio, action, got 'vision'" in told.err


def test_requests_of_a_file_are_refused_one_by_one(edgellm, tiny_engine, image, tmp_path):
    requests, answers = tmp_path / "requests.json", tmp_path / "answers.json"
    requests.write_text(f'[{{"prompt": "hello"}}, {{"prompt": "hello", "images": ["{image}"]}}]')
    told = edgellm("generate", tiny_engine, "--requests", requests, "--out", answers, *WITHOUT, "--json")
    assert (told.code, told.json["failed"]) == (1, 1)
    assert "the vision encoder was left out" in answers.read_text()


def test_chat_refuses_a_picture_and_a_sound_at_once(edgellm, tiny_engine, image, tmp_path, monkeypatch):
    sound = tmp_path / "a.wav"
    soundfile.write(sound, make_sound(1.0, 16000), 16000)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"/image {image}\n/audio {sound}\nhello\n"))
    told = edgellm("chat", tiny_engine, "--max-tokens", 4, *WITHOUT)
    assert told.code == 0
    first, second = told.err.splitlines()[:2]
    assert "the vision encoder was left out" in first
    assert "the audio encoder was left out" in second
    assert len(told.out.splitlines()) == 1


def test_bench_times_words_only(edgellm, tiny_engine):
    told = edgellm("bench", tiny_engine, "--runs", 2, "--warmup", 0, "--max-tokens", 5, *WITHOUT).json
    assert told["trajectories"] == 0
    assert told["tokens"] == 5


def test_inspect_counts_the_memory_of_what_is_opened(edgellm, tiny_engine):
    whole, text_only = (edgellm("inspect", tiny_engine, "--json", *more).json for more in ((), WITHOUT))
    weights = {part["name"]: part["weight_bytes"] for part in whole["parts"]}
    assert text_only["memory"]["weights"] == weights["llm"] < whole["memory"]["weights"]
    assert text_only["without"] == ["visual", "audio", "action"]
    assert "memory without audio" in edgellm("inspect", tiny_engine, "--without", "audio").out
