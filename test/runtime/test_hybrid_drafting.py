# SPDX-License-Identifier: Apache-2.0
"""Hybrid models verify chains of drafted tokens.

Answers and states are those of vanilla decoding.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from doubles.deferred_runtime import WatchedDevice, queueing
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
from edgellm_ros.runtime.request import LLMGenerationRequest
from fixtures.draws import draws
from fixtures.hybrid_checkpoints import write_nemotron_h_checkpoint, write_qwen3_5_checkpoint
from fixtures.random_head import base_config, write_random_head
from fixtures.random_requests import cancelled_at
from fixtures.requests_for_tests import assert_same_with_drafting, request

pytestmark = pytest.mark.slow
WRITERS = {"nemotron_h": write_nemotron_h_checkpoint, "qwen3_5": write_qwen3_5_checkpoint}
REPEATING = {"nemotron_h": 6, "qwen3_5": 3}  # seeds of models whose answers repeat themselves
LAYERS = {
    "nemotron_h": {"hybrid_override_pattern": "M*-M"},
    "qwen3_5": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
}
SYSTEM = "turn left at the red box "
BATCH = [
    request("go to the red box abc abc", max_tokens=40, logprobs=2),
    request("stop", max_tokens=500, temperature=1.0, seed=3),  # until the KV cache is full
    request("x", max_tokens=5),
    request("turn left turn left ", max_tokens=30, repetition_penalty=1.3, temperature=0.6, seed=8),
]
LOOKUP = SpecDecodeDraftingConfig(1, 7, 8, "lookup", falls_back=False)
EAGLE = SpecDecodeDraftingConfig(1, 5, 6, falls_back=False)
LONG = "you are a small robot on a floor with coloured solids, and you answer shortly. "
ROUNDING = 2e-4  # of a state of up to 10, summed in another order


@pytest.fixture(scope="module", params=WRITERS)
def engine(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = WRITERS[request.param](folder / "checkpoint", REPEATING[request.param])
    export(checkpoint, folder / "engine", max_input_len=130, max_kv_cache_capacity=150)
    return folder / "engine"


@pytest.fixture(scope="module", params=WRITERS)
def head_engine(request, tmp_path_factory):
    """An engine with a random draft head."""
    folder = tmp_path_factory.mktemp(f"{request.param}-head")
    checkpoint = WRITERS[request.param](folder / "checkpoint", 2, **LAYERS[request.param])
    head = write_random_head(folder / "head", base_config(checkpoint), vocabulary=None)
    export(checkpoint, folder / "engine", draft=head, max_input_len=130, max_kv_cache_capacity=150)
    return folder / "engine"


@pytest.fixture(scope="module")
def plain(engine, runtime_device):
    with LLMInferenceRuntime(engine, runtime_device, prefix_cache_bytes=0) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def drafting(engine, runtime_device):
    with LLMInferenceRuntime(engine, runtime_device, prefix_cache_bytes=0, drafting=LOOKUP) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def expected(plain):
    return plain.handle_request(BATCH)


def script(runtime, steps: int, requests, answers, right: float = 0.8) -> None:
    """Draft chains of `steps` tokens, of which a share are those of the answers."""
    known = {one.prompt: answer.token_ids for one, answer in zip(requests, answers, strict=True)}
    drafter = draft_by_script(runtime, steps, steps + 1, seed=steps, right=right)
    drafter.answers = lambda one: known[one.prompt]


def assert_all_same(answers, expected) -> None:
    for answer, other in zip(answers, expected, strict=True):
        assert_same_with_drafting(answer, other)


@pytest.mark.parametrize("steps", draws((1, 2, 4, 7), tuple(range(1, 8))))
def test_rows_that_accept_different_counts_have_the_answers_of_vanilla_decoding(drafting, expected, steps):
    script(drafting, steps, BATCH, expected)
    before = dataclasses.replace(drafting.spec_decode_generation_metrics)
    assert_all_same(drafting.handle_request(BATCH), expected)
    metrics = drafting.spec_decode_generation_metrics
    runs = metrics.verified_trees - before.verified_trees
    assert runs < metrics.generated_tokens - before.generated_tokens < runs * (steps + 1)


@pytest.mark.parametrize("limit", [2, 7, 12, 31])
@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
def test_the_states_are_those_after_the_accepted_tokens(plain, drafting, limit, right):
    one = request("go to the red box abc abc", max_tokens=limit)
    answer = plain.handle_request(one)
    script(drafting, 5, [one], [answer], right)
    drafting.handle_request(one)
    found = []
    for runtime in (plain, drafting):
        state = runtime.pipeline.runner.recurrent
        found.append([runtime.pipeline.device.download(tensor)[:, 0] for tensor in state.committed])
    for ours, theirs in zip(*found, strict=True):
        assert np.abs(ours).max() > 0.1
        np.testing.assert_allclose(theirs, ours, atol=ROUNDING)


def test_texts_that_repeat_are_drafted_by_lookup(engine, plain, runtime_device):
    with LLMInferenceRuntime(engine, runtime_device, prefix_cache_bytes=0, drafting=LOOKUP) as runtime:
        one = request("stop", max_tokens=60)
        assert_same_with_drafting(runtime.handle_request(one), plain.handle_request(one))
        assert runtime.spec_decode_generation_metrics.tokens_per_verification > 1.2


def test_a_cancelled_row_leaves_the_others_as_they_are(drafting, expected):
    script(drafting, 3, BATCH, expected)
    cancelled = cancelled_at(BATCH[1], "decode", 9)
    answers = drafting.handle_request([BATCH[0], cancelled, *BATCH[2:]])
    assert_all_same([*answers[:1], *answers[2:]], [*expected[:1], *expected[2:]])
    tokens = answers[1].token_ids
    assert answers[1].finish_reason == "cancelled"
    assert 0 < len(tokens) < 40
    assert tokens == expected[1].token_ids[: len(tokens)]


def test_a_row_without_drafting_is_decoded_beside_others(drafting, expected):
    script(drafting, 5, BATCH, expected)
    off = dataclasses.replace(BATCH[0], disable_spec_decode=True)
    assert_all_same(drafting.handle_request([off, *BATCH[1:]]), expected)


class Turns:
    """Step sizes that make rounds and vanilla steps by turns."""

    def __init__(self) -> None:
        self._drafts = itertools.cycle([True, False, False, True, True, False])
        self.begin = self.delivered = lambda *arguments: None

    def next_size(self, room: int) -> int:
        return room if next(self._drafts) else 1


def test_vanilla_steps_between_rounds(drafting, expected):
    script(drafting, 4, BATCH, expected)
    drafting.pipeline.method._step_sizes_by_grammar = [Turns()] * 2
    before = dataclasses.replace(drafting.spec_decode_generation_metrics)
    assert_all_same(drafting.handle_request(BATCH), expected)
    metrics = drafting.spec_decode_generation_metrics
    assert metrics.total_runs > before.total_runs + 5
    assert metrics.vanilla_runs > before.vanilla_runs + 5


def test_grammars_beside_free_answers(drafting, plain):
    batch = [
        request("go", regex="[a-z]{30}", max_tokens=40, temperature=1.0, seed=2),
        request("turn", choices=["left", "left turn " * 3], max_tokens=60),
        BATCH[0],
    ]
    expected = plain.handle_request(batch)
    script(drafting, 5, batch, expected)
    before = dataclasses.replace(drafting.spec_decode_generation_metrics)
    assert_all_same(drafting.handle_request(batch), expected)
    metrics = drafting.spec_decode_generation_metrics
    runs = metrics.verified_trees - before.verified_trees
    assert runs < metrics.generated_tokens - before.generated_tokens


@pytest.mark.only_on("cpu", reason="brings its own device")
def test_with_a_grammar_logits_that_were_computed_ahead_change_no_state(engine, plain):
    """Sequences end at different times; then logits of others are computed again."""
    batch = [request("go", regex="[a-z]{3,9}", temperature=2.0, seed=seed, max_tokens=20) for seed in (1, 2)]
    batch.append(request("abc abc", max_tokens=30))
    with queueing(), LLMInferenceRuntime(engine, WatchedDevice(), prefix_cache_bytes=0) as runtime:
        assert_all_same(runtime.handle_request(batch), plain.handle_request(batch))


def test_prompts_and_turns_go_on_from_saved_states(engine, runtime_device):
    first, turns = "what do you see?", []
    found = []
    for drafting in (None, LOOKUP):
        with LLMInferenceRuntime(engine, runtime_device, drafting=drafting) as runtime:
            saved = runtime.gen_and_save_system_prompt_kv_cache(SYSTEM)
            asked = [dataclasses.replace(one, system_prompt=SYSTEM) for one in (*BATCH[:1], *BATCH[2:])]
            answers = runtime.handle_request(asked)
            assert [answer.reused_tokens for answer in answers] == [saved] * 3
            turns = [Message("user", first)]
            for question in ("go", "stop"):
                answer = runtime.handle_request(
                    LLMGenerationRequest(messages=turns, sampling=request(max_tokens=8).sampling)
                )
                answers.append(answer)
                turns = [*turns, Message("assistant", answer.text), Message("user", question)]
            assert answers[-1].reused_tokens > 0
            found.append(answers)
    assert_all_same(found[1], found[0])
    assert [each.reused_tokens for each in found[0]] == [each.reused_tokens for each in found[1]]


def test_recorded_rounds_give_the_same_answers(engine, expected, runtime_device):
    with LLMInferenceRuntime(engine, runtime_device, prefix_cache_bytes=0, drafting=LOOKUP) as runtime:
        runtime.capture_decoding_cuda_graph()
        for size in (4, 2):
            assert_all_same(runtime.handle_request(BATCH[:size]), expected[:size])


@pytest.mark.only_on("cpu", reason="this test brings its own device")
def test_rounds_of_hybrids_are_queued_and_recorded(engine, expected):
    with (
        queueing(),
        LLMInferenceRuntime(engine, WatchedDevice(), prefix_cache_bytes=0, drafting=LOOKUP) as runtime,
    ):
        assert runtime.capture_decoding_cuda_graph() is True
        runtime.pipeline.device.calls.clear()
        assert_all_same(runtime.handle_request(BATCH), expected)
        assert runtime.pipeline.device.calls["launch"] > 10


@pytest.mark.only_on("cpu", reason="this test brings its own device")
def test_recorded_verifications_with_grammars_commit_the_states_of_the_path(engine, plain):
    batch = [request("abc abc abc", regex="(abc? |d)*e", max_tokens=60), request("abc abc", max_tokens=40)]
    expected = plain.handle_request(batch)
    with (
        queueing(),
        LLMInferenceRuntime(engine, WatchedDevice(), prefix_cache_bytes=0, drafting=LOOKUP) as runtime,
    ):
        assert runtime.capture_decoding_cuda_graph() is True
        assert_all_same(runtime.handle_request(batch), expected)
        assert len(runtime.pipeline.method.recorded_verifications) > 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ((4, 4, 8, "eagle"), "drafting_top_k 4: a model with recurrent layers verifies chains, whose"),
        ((1, 8, 9, "lookup"), "verify_tree_size 9: this engine verifies at most 8 tokens"),
        ((1, 3, 4, "eagle"), "this engine has no draft head"),
    ],
)
def test_what_a_hybrid_cannot_draft_is_refused(engine, settings, words):
    with pytest.raises(ValueError, match=words):
        check_drafting(SpecDecodeDraftingConfig(*settings), EngineConfig.load(engine), on_cpu=True)


def test_an_engine_without_the_graph_for_verifications_is_refused(engine):
    config = EngineConfig.load(engine)
    files = tuple(entry for entry in config.files if "verify" not in entry.path)
    with pytest.raises(ValueError, match=r"drafting lookup: llm/verify\.onnx is missing: export again"):
        check_drafting(LOOKUP, dataclasses.replace(config, files=files), on_cpu=True)


@pytest.mark.parametrize("steps", draws((1, 5), (1, 5, 7)))
def test_a_draft_head_of_a_hybrid_leaves_the_answers_as_they_are(head_engine, runtime_device, steps):
    config = SpecDecodeDraftingConfig(1, steps, steps + 1, falls_back=False)
    with LLMInferenceRuntime(head_engine, runtime_device, prefix_cache_bytes=0) as runtime:
        expected = runtime.handle_request(BATCH)
    with LLMInferenceRuntime(head_engine, runtime_device, prefix_cache_bytes=0, drafting=config) as runtime:
        assert_all_same(runtime.handle_request(BATCH), expected)
        script(runtime, steps, BATCH, expected)
        assert_all_same(runtime.handle_request(BATCH), expected)
        assert not runtime.pipeline.drafter.failed
        assert runtime.spec_decode_generation_metrics.tokens_per_verification > 1.2


def watch_drafts(runtime, monkeypatch) -> list[list[int]]:
    """Return a list that gets the tokens of each draft of row 0."""
    drafts, drafter = [], runtime.pipeline.drafter.drafter
    propose = drafter.propose

    def watched(tree) -> None:
        propose(tree)
        drafts.append(runtime.pipeline.device.download(tree.tokens)[0].tolist())

    monkeypatch.setattr(drafter, "propose", watched)
    return drafts


def test_a_head_drafts_the_same_after_cut_prompts_and_reused_states(head_engine, runtime_device, monkeypatch):
    """The second prompt is cut where the first one differs.

    The third one reuses the state after the cut.
    """
    asked = [request(text, max_tokens=20, system_prompt=LONG) for text in ("go", "turn left", "stop")]
    found = []
    for options in ({"prefix_cache_bytes": 0}, {}):
        with LLMInferenceRuntime(head_engine, runtime_device, drafting=EAGLE, **options) as runtime:
            drafts = watch_drafts(runtime, monkeypatch)
            answers = [runtime.handle_request(one) for one in asked]
            if not options:
                assert [answer.reused_tokens for answer in answers] == [0, 0, 64]
            found.append((drafts, answers))
    assert found[0][0] == found[1][0]
    assert_all_same(found[0][1], found[1][1])


def test_a_head_drafts_the_same_after_a_saved_prompt_and_a_stored_turn(
    head_engine, runtime_device, monkeypatch
):
    found = []
    for caches in (False, True):
        options = {} if caches else {"prefix_cache_bytes": 0}
        with LLMInferenceRuntime(head_engine, runtime_device, drafting=EAGLE, **options) as runtime:
            saved = runtime.gen_and_save_system_prompt_kv_cache(SYSTEM) if caches else 0
            drafts = watch_drafts(runtime, monkeypatch)
            answers = [runtime.handle_request(request("go", max_tokens=20, system_prompt=SYSTEM))]
            turns = [Message("user", "what do you see?")]
            for question in ("go", "stop"):
                one = LLMGenerationRequest(messages=turns, sampling=request(max_tokens=8).sampling)
                answers.append(runtime.handle_request(one))
                turns = [*turns, Message("assistant", answers[-1].text), Message("user", question)]
            if caches:
                assert answers[0].reused_tokens == saved - 1
                assert answers[2].reused_tokens > answers[1].prompt_tokens
            found.append((drafts, answers))
    assert found[0][0] == found[1][0]
    assert_all_same(found[0][1], found[1][1])


def test_a_head_drafts_chains_for_hybrids_by_default_on_every_device(head_engine):
    config = EngineConfig.load(head_engine)
    for on_cpu in (True, False):
        chosen = drafting_config("auto", config, on_cpu)
        assert chosen.is_chain
        check_drafting(chosen, config, on_cpu)
