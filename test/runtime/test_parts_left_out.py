# SPDX-License-Identifier: Apache-2.0
"""Encoders and action head that are left out when an engine directory is opened."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm_ros.diffusion.chunking import ChunkCondition
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.runtime.conversation import Message, TextPart
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.requests_for_tests import IMAGE, SOUND, assert_same_answer, request

ALL = ("visual", "audio", "action")


@pytest.fixture(scope="module")
def text_only(acting_engine, device):
    """A runtime with the language model only."""
    with LLMInferenceRuntime(acting_engine, device, prefix_cache_bytes=0, without=ALL) as runtime:
        yield runtime


@pytest.fixture
def opened(monkeypatch) -> list[str]:
    """The folders of the graphs that are opened."""
    paths: list[str] = []
    real = EngineExecutor.open

    def open_and_note(path, *arguments):
        paths.append(path.parent.name)
        return real(path, *arguments)

    monkeypatch.setattr(EngineExecutor, "open", open_and_note)
    return paths


@pytest.mark.parametrize("without", [(), ("visual",), ("audio", "action"), ALL])
def test_what_is_left_out_is_not_opened(tiny_engine, device, opened, without):
    with LLMInferenceRuntime(tiny_engine, device, without=without) as runtime:
        assert opened == ["llm", *(part for part in ALL if part not in without)]
        assert runtime.parts.without == without


def test_rows_of_encoders_take_memory_only_with_an_encoder(tiny_engine, device):
    sizes = {}
    for without in ((), ("visual",), ("visual", "audio")):
        with LLMInferenceRuntime(tiny_engine, device, without=without) as runtime:
            sizes[without] = runtime.pipeline.embedder._rows.shape[0]
    assert sizes == {(): 4 * 320, ("visual",): 4 * 320, ("visual", "audio"): 1}


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "what do you see?", "max_tokens": 20},
        {"prompt": "go on", "temperature": 1.2, "seed": 4, "logprobs": 3, "max_tokens": 20},
        {"prompt": "drive", "history": np.arange(8).reshape(4, 2) * 0.1},
        {"prompt": "", "messages": (Message("user", [TextPart("hello"), TextPart("you")]),)},
    ],
    ids=["greedy", "sampled", "history", "messages"],
)
def test_answers_in_words_are_those_of_the_whole_engine(text_only, acting_runtime, fields):
    one = request(**fields)
    assert_same_answer(text_only.handle_request(one), acting_runtime.handle_request(one))


def test_the_parts_that_stay_work(acting_engine, acting_runtime, device):
    with LLMInferenceRuntime(acting_engine, device, prefix_cache_bytes=0, without=["audio"]) as runtime:
        one = request(images=(IMAGE,), max_tokens=30, action_samples=2)
        answer = runtime.handle_request(one)
        assert answer.actions is not None
        assert_same_answer(answer, acting_runtime.handle_request(one))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"images": (IMAGE,)}, "the vision encoder was left out .*, the request has images"),
        ({"audio": (SOUND,)}, "the audio encoder was left out .*, the request has audio"),
        ({"action_samples": 1}, "the action head was left out .*, the request has action_samples"),
        (
            {"previous_chunk": ChunkCondition(actions=np.zeros((6, 2)), executed=0, delay=1)},
            "the action head was left out .*, the request has a previous_chunk",
        ),
    ],
)
def test_a_request_that_needs_a_part_that_was_left_out_is_refused(text_only, fields, message):
    with pytest.raises(ValueError, match=message.replace(".*", "when this engine directory was opened")):
        text_only.handle_request(request(**fields))
    assert text_only.handle_request(request()).token_ids


def test_a_part_that_the_engine_has_not_may_be_left_out(engine_without_audio, runtime_device):
    with LLMInferenceRuntime(engine_without_audio, runtime_device, without=["audio"]) as runtime:
        assert runtime.handle_request(request()).token_ids
        with pytest.raises(ValueError, match="this engine has no audio encoder"):
            runtime.handle_request(request(audio=(SOUND,)))


@pytest.mark.parametrize(
    ("without", "message"),
    [
        (["vision"], "without must be of visual, audio, action, got 'vision'"),
        (["llm"], "without must be of visual, audio, action, got 'llm'"),
        ("visual", "without must be a sequence of names, got 'visual'"),
        (None, "without must be a sequence of names, got None"),
        ([["visual"]], r"without must be a sequence of names, got \[\['visual'\]\]"),
    ],
)
def test_an_unknown_part_is_refused(tiny_engine, runtime_device, without, message):
    with pytest.raises(ValueError, match=message):
        LLMInferenceRuntime(tiny_engine, runtime_device, without=without)


def test_saved_prefixes_are_those_of_the_whole_engine(acting_engine, runtime_device, tmp_path):
    with LLMInferenceRuntime(acting_engine, runtime_device) as whole:
        tokens = whole.gen_and_save_system_prompt_kv_cache("you are a robot on wheels")
        whole.save_prefix_cache(tmp_path / "prompts")
    with LLMInferenceRuntime(acting_engine, runtime_device, without=ALL) as text_only:
        text_only.load_prefix_cache(tmp_path / "prompts")
        answer = text_only.handle_request(request("hello", system_prompt="you are a robot on wheels"))
        assert answer.reused_tokens >= tokens
