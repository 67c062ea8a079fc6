# SPDX-License-Identifier: Apache-2.0
"""MTP heads draft chains: answers are those of vanilla decoding."""

from __future__ import annotations

import dataclasses

import pytest

from doubles.scripted_drafter import draft_by_script
from edgellm_ros.builder import export
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.runtime.conversation import Message
from edgellm_ros.runtime.decoding.speculative.drafting_config import (
    SpecDecodeDraftingConfig,
    check_drafting,
    drafting_config,
)
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.head_reference import assert_scores, reference_of, watched_drafts
from fixtures.mtp_checkpoints import WRITERS, write_whole_qwen3_5_with_head
from fixtures.random_chains import LIMITS, TEXT, check_random_model
from fixtures.random_requests import cancelled_at
from fixtures.requests_for_tests import IMAGE, assert_same_with_drafting, request
from fixtures.requests_for_tests import request as make_request

MTP = SpecDecodeDraftingConfig(1, 3, 4, "mtp", falls_back=False)
BATCH = [
    request(TEXT, max_tokens=40, logprobs=2),
    request("stop", max_tokens=500, temperature=1.0, seed=3),  # until the KV cache is full
    request("x", max_tokens=5),
    request("turn left turn left ", max_tokens=30, repetition_penalty=1.3, temperature=0.6, seed=8),
]


@pytest.fixture(scope="module", params=WRITERS)
def engine(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = WRITERS[request.param](folder / "checkpoint", 2)
    export(checkpoint, folder / "engine", **LIMITS)
    return folder / "engine"


@pytest.fixture(scope="module")
def plain(engine, runtime_device):
    with LLMInferenceRuntime(engine, runtime_device, prefix_cache_bytes=0, drafting=None) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def drafting(engine, runtime_device):
    with LLMInferenceRuntime(engine, runtime_device, prefix_cache_bytes=0, drafting=MTP) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def expected(plain):
    return plain.handle_request(BATCH)


def assert_all_same(answers, expected) -> None:
    for answer, other in zip(answers, expected, strict=True):
        assert_same_with_drafting(answer, other)


def draft_right_tokens(runtime, requests, answers, right: float = 0.8) -> None:
    """Replace a share of the drafted tokens by those of the answers."""
    known = {one.prompt: answer.token_ids for one, answer in zip(requests, answers, strict=True)}
    config = MTP
    drafter = draft_by_script(runtime, config.drafting_step, config.tree_size, seed=1, right=right)
    drafter.answers = lambda one: known[one.prompt]


@pytest.mark.parametrize("steps", range(1, 8))
def test_answers_are_those_of_vanilla_decoding(engine, runtime_device, expected, steps):
    config = SpecDecodeDraftingConfig(1, steps, steps + 1, "mtp", falls_back=False)
    options = {"drafting": config, "prefix_cache_bytes": 0}
    with LLMInferenceRuntime(engine, runtime_device, **options) as runtime:
        assert_all_same(runtime.handle_request(BATCH), expected)
        assert not runtime.pipeline.drafter.failed
        assert runtime.spec_decode_generation_metrics.vanilla_runs <= 4, "the last tokens of a full KV cache"


def test_accepted_tokens_of_several_rows(drafting, expected):
    draft_right_tokens(drafting, BATCH, expected)
    before = dataclasses.replace(drafting.spec_decode_generation_metrics)
    assert_all_same(drafting.handle_request(BATCH), expected)
    metrics = drafting.spec_decode_generation_metrics
    verified = metrics.verified_trees - before.verified_trees
    assert metrics.generated_tokens - before.generated_tokens > 1.5 * verified


def test_a_saved_system_prompt_brings_the_rows_of_the_head(engine, runtime_device, plain):
    system = "you are a small robot on a floor with coloured solids. "
    one = request("go to the red box", system_prompt=system, max_tokens=20)
    with LLMInferenceRuntime(engine, runtime_device, drafting=MTP) as runtime:
        runtime.gen_and_save_system_prompt_kv_cache(system)
        answer = runtime.handle_request(one)
        assert answer.reused_tokens > 32
        expected = dataclasses.replace(plain.handle_request(one), reused_tokens=answer.reused_tokens)
        assert_same_with_drafting(answer, expected)


def test_turns_of_a_conversation(engine, runtime_device, plain):
    turns = [Message("user", "go to the red box")]
    with LLMInferenceRuntime(engine, runtime_device, drafting=MTP) as runtime:
        for words in ("and now", "stop"):
            one = request("", messages=tuple(turns), max_tokens=12)
            answer = runtime.handle_request(one)
            expected = dataclasses.replace(plain.handle_request(one), reused_tokens=answer.reused_tokens)
            assert_same_with_drafting(answer, expected)
            turns += [Message("assistant", answer.text), Message("user", words)]


def test_a_stop_string_and_a_grammar(drafting, plain):
    asked = [
        request(TEXT, max_tokens=30, stop=("e",)),
        request(TEXT, max_tokens=30, regex="(left|right|straight on)"),
    ]
    for one in asked:
        assert_same_with_drafting(drafting.handle_request(one), plain.handle_request(one))


def test_a_cancelled_row_leaves_the_others_as_they_are(drafting, expected):
    cancelled = cancelled_at(BATCH[1], "decode", 5)
    answers = drafting.handle_request([BATCH[0], cancelled, *BATCH[2:]])
    assert answers[1].finish_reason == "cancelled"
    assert_all_same([*answers[:1], *answers[2:]], [*expected[:1], *expected[2:]])


def test_fallback_pauses_a_head_that_is_never_right(engine, runtime_device, expected):
    config = dataclasses.replace(MTP, falls_back=True)
    options = {"drafting": config, "prefix_cache_bytes": 0}
    with LLMInferenceRuntime(engine, runtime_device, **options) as runtime:
        assert_all_same(runtime.handle_request(BATCH), expected)
        assert runtime.spec_decode_generation_metrics.vanilla_runs > 10


@pytest.mark.only_on("cpu", "cuda", reason="TensorRT writes to no FP8 cache")
@pytest.mark.parametrize("family", WRITERS)
def test_a_model_with_an_fp8_kv_cache(tmp_path, runtime_device, family):
    checkpoint = WRITERS[family](tmp_path / "checkpoint", 2)
    export(checkpoint, tmp_path / "engine", **LIMITS, kv_cache="fp8")
    options = {"prefix_cache_bytes": 0}
    with LLMInferenceRuntime(tmp_path / "engine", runtime_device, **options, drafting=None) as runtime:
        expected = runtime.handle_request(BATCH)
    with LLMInferenceRuntime(tmp_path / "engine", runtime_device, **options, drafting=MTP) as runtime:
        draft_right_tokens(runtime, BATCH, expected)
        assert_all_same(runtime.handle_request(BATCH), expected)


@pytest.fixture(params=["an image", "chosen tokens"])
def special(request, tmp_path):
    """Engine and request with which a head may go wrong while answers stay right."""
    if request.param == "an image":
        checkpoint = write_whole_qwen3_5_with_head(tmp_path / "checkpoint")
        export(checkpoint, tmp_path / "engine", max_input_len=200)
        return tmp_path / "engine", make_request("what do you see", images=(IMAGE,), max_tokens=20)
    export(WRITERS["mimo"](tmp_path / "checkpoint", 2), tmp_path / "engine", draft_vocab_size=40, **LIMITS)
    assert EngineConfig.load(tmp_path / "engine").draft.vocab_size < 302
    return tmp_path / "engine", make_request(TEXT, max_tokens=20)


@pytest.mark.only_on("cpu", "cuda", reason="the reference runs the engine's other graphs")
def test_candidates_are_those_of_a_head_that_sees_the_whole_text(special, runtime_device):
    engine, one = special
    with LLMInferenceRuntime(engine, runtime_device, prefix_cache_bytes=0, drafting=None) as runtime:
        expected = runtime.handle_request(one)
    with LLMInferenceRuntime(engine, runtime_device, prefix_cache_bytes=0, drafting=MTP) as runtime:
        draft_right_tokens(runtime, [one], [expected])
        with watched_drafts(runtime) as drafts:
            assert_same_with_drafting(runtime.handle_request(one), expected)
    with reference_of(engine, runtime_device, MTP) as reference:
        recorded = reference(one)
        assert len(drafts) > 3
        for draft in drafts:
            assert_scores(draft, *recorded)


class TestChoice:
    @pytest.mark.parametrize(("on_cpu", "length"), [(False, 3), (True, 2)])
    def test_auto_takes_the_head_with_a_short_chain(self, engine, on_cpu, length):
        found = drafting_config("auto", EngineConfig.load(engine), on_cpu)
        assert found == SpecDecodeDraftingConfig(1, length, length + 1, "mtp")

    def test_a_head_of_another_kind_is_refused(self, engine):
        config = EngineConfig.load(engine)
        with pytest.raises(ValueError, match="drafting eagle: this engine's draft head is of kind mtp"):
            check_drafting(SpecDecodeDraftingConfig(1, 3, 4), config, on_cpu=True)

    def test_an_engine_without_a_head_is_refused(self, tiny_engine):
        with pytest.raises(ValueError, match=r"no draft head \(export a checkpoint with an MTP head\)"):
            check_drafting(MTP, EngineConfig.load(tiny_engine), on_cpu=True)


@pytest.mark.slow
@pytest.mark.only_on("cpu", "cuda", reason="minutes on the double, which runs other tests of drafts")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", WRITERS)
def test_random_models(tmp_path, runtime_device, family, seed):
    check_random_model(tmp_path, runtime_device, WRITERS[family], "mtp", seed + 100)
