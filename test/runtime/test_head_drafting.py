# SPDX-License-Identifier: Apache-2.0
"""Draft heads that draft chains: answers are those of vanilla decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from edgellm_ros.builder import export
from edgellm_ros.runtime.conversation import Message
from edgellm_ros.runtime.decoding.speculative.drafting_config import SpecDecodeDraftingConfig
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures import dflash_checkpoints, mtp_checkpoints
from fixtures.drafted_chains import BATCH, DFLASH, MTP, assert_all_same, draft_right_tokens
from fixtures.draws import draws
from fixtures.random_chains import LIMITS, TEXT, check_random_model
from fixtures.random_requests import cancelled_at
from fixtures.requests_for_tests import assert_same_with_drafting, request


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of draft head, and the models that it is tested with."""

    config: SpecDecodeDraftingConfig
    writers: Mapping[str, Callable[[Path, int], Path]]
    most_vanilla_runs: int  # for the last tokens of a full KV cache
    least_tokens: float  # of a verification with 0.8 of the drafted tokens right


KINDS = {
    "mtp": Kind(MTP, mtp_checkpoints.WRITERS, most_vanilla_runs=4, least_tokens=1.5),
    "dflash": Kind(DFLASH, dflash_checkpoints.WRITERS, most_vanilla_runs=8, least_tokens=2),
}
MODELS = [(kind, family) for kind, each in KINDS.items() for family in each.writers]
MODEL_IDS = ["-".join(model) for model in MODELS]
STEPS = draws((1, 2, 4, 7), tuple(range(1, 8)))
SEEDS = draws((100, 103), tuple(range(100, 104)))  # with and without fallback and prefix cache


@pytest.fixture(scope="module", params=MODELS, ids=MODEL_IDS)
def model(request):
    return request.param


@pytest.fixture(scope="module")
def kind(model):
    return KINDS[model[0]]


@pytest.fixture(scope="module")
def engine(model, tmp_path_factory):
    kind, family = model
    folder = tmp_path_factory.mktemp("-".join(model))
    checkpoint = KINDS[kind].writers[family](folder / "checkpoint", 2)
    export(checkpoint, folder / "engine", **LIMITS)
    return folder / "engine"


@pytest.fixture(scope="module")
def plain(engine, runtime_device):
    with LLMInferenceRuntime(engine, runtime_device, prefix_cache_bytes=0, drafting=None) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def drafting(engine, runtime_device, kind):
    with LLMInferenceRuntime(engine, runtime_device, prefix_cache_bytes=0, drafting=kind.config) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def expected(plain):
    return plain.handle_request(BATCH)


@pytest.mark.parametrize("steps", STEPS)
def test_answers_are_those_of_vanilla_decoding(engine, runtime_device, kind, expected, steps):
    config = SpecDecodeDraftingConfig(1, steps, steps + 1, kind.config.strategy, falls_back=False)
    options = {"drafting": config, "prefix_cache_bytes": 0}
    with LLMInferenceRuntime(engine, runtime_device, **options) as runtime:
        assert_all_same(runtime.handle_request(BATCH), expected)
        assert not runtime.pipeline.drafter.failed
        assert runtime.spec_decode_generation_metrics.vanilla_runs <= kind.most_vanilla_runs


def test_accepted_tokens_of_several_rows(drafting, kind, expected):
    draft_right_tokens(drafting, kind.config, BATCH, expected)
    before = dataclasses.replace(drafting.spec_decode_generation_metrics)
    assert_all_same(drafting.handle_request(BATCH), expected)
    metrics = drafting.spec_decode_generation_metrics
    verified = metrics.verified_trees - before.verified_trees
    assert metrics.generated_tokens - before.generated_tokens > kind.least_tokens * verified


def test_a_saved_system_prompt_brings_the_rows_of_the_head(engine, runtime_device, kind, plain):
    system = "you are a small robot on a floor with coloured solids. "
    one = request("go to the red box", system_prompt=system, max_tokens=20)
    with LLMInferenceRuntime(engine, runtime_device, drafting=kind.config) as runtime:
        runtime.gen_and_save_system_prompt_kv_cache(system)
        answer = runtime.handle_request(one)
        assert answer.reused_tokens > 32
        expected = dataclasses.replace(plain.handle_request(one), reused_tokens=answer.reused_tokens)
        assert_same_with_drafting(answer, expected)


def test_turns_of_a_conversation(engine, runtime_device, kind, plain):
    turns = [Message("user", "go to the red box")]
    with LLMInferenceRuntime(engine, runtime_device, drafting=kind.config) as runtime:
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


def test_fallback_pauses_a_head_that_is_never_right(engine, runtime_device, kind, expected):
    config = dataclasses.replace(kind.config, falls_back=True)
    options = {"drafting": config, "prefix_cache_bytes": 0}
    with LLMInferenceRuntime(engine, runtime_device, **options) as runtime:
        assert_all_same(runtime.handle_request(BATCH), expected)
        assert runtime.spec_decode_generation_metrics.vanilla_runs > 10


@pytest.mark.only_on("cpu", "cuda", reason="TensorRT writes to no FP8 cache")
@pytest.mark.parametrize(("kind", "family"), MODELS, ids=MODEL_IDS)
def test_a_model_with_an_fp8_kv_cache(tmp_path, runtime_device, kind, family):
    config = KINDS[kind].config
    checkpoint = KINDS[kind].writers[family](tmp_path / "checkpoint", 2)
    export(checkpoint, tmp_path / "engine", **LIMITS, kv_cache="fp8")
    options = {"prefix_cache_bytes": 0}
    with LLMInferenceRuntime(tmp_path / "engine", runtime_device, **options, drafting=None) as runtime:
        expected = runtime.handle_request(BATCH)
    with LLMInferenceRuntime(tmp_path / "engine", runtime_device, **options, drafting=config) as runtime:
        draft_right_tokens(runtime, config, BATCH, expected)
        assert_all_same(runtime.handle_request(BATCH), expected)


@pytest.mark.slow
@pytest.mark.only_on("cpu", "cuda", reason="minutes on the double, which runs other tests of drafts")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("kind", "family"), MODELS, ids=MODEL_IDS)
def test_random_models(tmp_path, runtime_device, kind, family, seed):
    check_random_model(tmp_path, runtime_device, KINDS[kind].writers[family], kind, seed)
