# SPDX-License-Identifier: Apache-2.0
"""Reused prefixes change no answer of hybrids, wherever the states were saved."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from edgellm_ros.builder import export
from edgellm_ros.builder.lowering.standard.recurrent import CHUNK
from edgellm_ros.runtime.conversation import Message
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.prefix.prefix_cache import PAGE
from edgellm_ros.runtime.prefix.state_snapshots import SPACING
from edgellm_ros.runtime.prompt.buckets import pads_prompts
from edgellm_ros.runtime.prompt.rope import plain_rope_index
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams
from fixtures.hybrid_checkpoints import write_nemotron_h_checkpoint, write_qwen3_5_checkpoint

pytestmark = pytest.mark.slow
WRITERS = {"nemotron_h": write_nemotron_h_checkpoint, "qwen3_5": write_qwen3_5_checkpoint}
LENGTHS = (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK)
SYSTEM = "you are a small robot on a floor with coloured solids, and you answer in few words. "
ROUNDING = 2e-4  # of a state or a logit of up to 10, with other chunks


@pytest.fixture(scope="module", params=WRITERS)
def engine(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = WRITERS[request.param](folder / "checkpoint")
    export(checkpoint, folder / "engine", max_input_len=800, max_kv_cache_capacity=840)
    return folder / "engine"


@pytest.fixture(scope="module")
def recomputing(engine, runtime_device):
    with LLMInferenceRuntime(engine, runtime_device, prefix_cache_bytes=0) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def caching(engine, runtime_device):
    with LLMInferenceRuntime(engine, runtime_device) as runtime:
        yield runtime


@pytest.fixture
def reusing(caching):
    """A runtime with an empty prefix cache."""
    caching.clear_prefix_cache()
    return caching


def ask(prompt: str, max_tokens: int = 5, system_prompt: str = SYSTEM) -> LLMGenerationRequest:
    return LLMGenerationRequest(prompt, system_prompt, sampling=SamplingParams(max_tokens=max_tokens))


def tokens(responses) -> list[list[int]]:
    return [response.token_ids for response in responses]


def shared_tokens(runtime, *requests: LLMGenerationRequest) -> int:
    """Return how many tokens the prompts of requests begin with together."""
    prompts = [each.token_ids for each in runtime.pipeline.preparer.prepare(requests, 0)]
    return next(i for i, ids in enumerate(zip(*prompts, strict=False)) if len(set(ids)) > 1)


def compute(runtime, *prompts: list[int]) -> tuple[list[int], np.ndarray, list[np.ndarray]]:
    """Prefill a batch of token ids; return reused tokens, logits and states.

    Logits are [B,V], states are [L,B,n] of each kind.
    """
    pipeline, device = runtime.pipeline, runtime.pipeline.device
    sequences = pipeline.prepare([ask("x")] * len(prompts), 0)
    for sequence, ids in zip(sequences, prompts, strict=True):
        sequence.token_ids, sequence.positions = ids, plain_rope_index(len(ids))
    pipeline.reuse.match(sequences)
    pipeline.prefill(sequences)
    logits = device.download(pipeline.logits)[: len(prompts), 0]
    states = [device.download(tensor)[:, : len(prompts)] for tensor in pipeline.runner.recurrent.committed]
    pipeline.store_prefixes(sequences)
    pipeline.batch.evict(sequences)
    return [sequence.reused_tokens for sequence in sequences], logits, states


def assert_same(found, expected) -> None:
    np.testing.assert_allclose(found[1], expected[1], atol=ROUNDING, rtol=0)
    for state, wanted in zip(found[2], expected[2], strict=True):
        np.testing.assert_allclose(state, wanted, atol=ROUNDING, rtol=0)


def random_ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


@pytest.mark.parametrize("reused", LENGTHS)
def test_state_and_logits_after_a_reused_prefix_are_those_of_the_whole_prompt(reusing, recomputing, reused):
    ids = random_ids(reused + max(LENGTHS))
    least = PAGE if pads_prompts(reusing.pipeline.device) else 0  # padded prompts reuse no less
    compute(reusing, ids[:reused])
    for new in LENGTHS:
        found = compute(reusing, ids[:reused] + random_ids(new, seed=new))
        assert found[0] == [reused if reused >= least else 0]
        assert_same(found, compute(recomputing, ids[:reused] + random_ids(new, seed=new)))


@pytest.mark.parametrize("first", LENGTHS)
def test_a_prompt_that_is_cut_has_the_state_and_logits_of_the_whole_prompt(reusing, recomputing, first):
    ids = random_ids(2 * PAGE + first)
    compute(reusing, ids)
    other = [*ids[: 2 * PAGE], *random_ids(first, seed=9)]
    found = compute(reusing, other)  # saves a state where it leaves the first prompt
    assert found[0] == [0]
    assert_same(found, compute(recomputing, other))
    third = [*ids[: 2 * PAGE], *random_ids(first, seed=10)]
    found = compute(reusing, third)
    assert found[0] == [2 * PAGE]
    assert_same(found, compute(recomputing, third))


def test_prompts_of_a_batch_with_different_cuts_are_as_alone(reusing, recomputing):
    ids = random_ids(300)
    compute(reusing, ids)
    batch = [
        [*ids[:200], *random_ids(90, seed=1)],
        random_ids(70, seed=2),
        [*ids[:100], *random_ids(3, seed=3)],
        random_ids(1, seed=4),
    ]
    found = compute(reusing, *batch)
    for row, prompt in enumerate(batch):
        alone = compute(recomputing, prompt)
        one = found[0], found[1][[row]], [state[:, [row]] for state in found[2]]
        assert_same(one, alone)
    others = compute(reusing, [*ids[:200], 5], [*ids[:100], 5])
    assert others[0] == [192, 96]  # where the first and the third were cut


def test_a_batch_that_has_no_slots_for_its_cuts_is_not_cut(reusing, recomputing):
    ids = random_ids(799)
    compute(reusing, ids)
    batch = [[*ids[:700], *random_ids(90, seed=1)], random_ids(400, seed=2)]  # 400 tokens after 672
    found = compute(reusing, *batch)
    assert_same(found, compute(recomputing, *batch))
    assert compute(reusing, [*ids[:700], 5])[0] == [512]  # of the first prompt


def test_the_third_prompt_with_a_beginning_reuses_it_though_none_ended_there(reusing, recomputing):
    batch = [ask("what do you see?"), ask("go to the red box"), ask("turn around now")]
    answers = [reusing.handle_request(one) for one in batch]
    shared = shared_tokens(reusing, *batch)
    assert [answer.reused_tokens for answer in answers] == [0, 0, shared // PAGE * PAGE]
    assert shared >= PAGE
    assert tokens(answers) == tokens(map(recomputing.handle_request, batch))


def test_a_second_prompt_reuses_a_long_beginning_that_the_first_did_not_end_at(reusing, recomputing):
    system = "go to the red box and turn left at the door, then wait " * 10
    first, second = ask("what do you see?" * 9, 5, system), ask("go " * 40, 5, system)
    assert shared_tokens(reusing, first, second) > SPACING
    answers = [reusing.handle_request(one) for one in (first, second)]
    assert [answer.reused_tokens for answer in answers] == [0, SPACING]
    assert tokens(answers) == tokens(map(recomputing.handle_request, (first, second)))


def test_the_next_turn_computes_its_new_tokens_only(reusing, recomputing):
    messages, stored = [Message("system", SYSTEM)], 0  # tokens of the conversation before the next words
    for turn in range(4):
        messages.append(Message("user", f"question {turn}, and what else?"))
        one = LLMGenerationRequest(messages=messages, sampling=SamplingParams(max_tokens=5))
        answer = reusing.handle_request(one)
        assert answer.token_ids == recomputing.handle_request(one).token_ids
        assert answer.reused_tokens == stored
        messages.append(Message("assistant", answer.text))
        following = [LLMGenerationRequest(messages=[*messages, Message("user", word)]) for word in "xy"]
        stored = shared_tokens(reusing, *following)


@pytest.mark.parametrize("seed", range(2))
def test_random_batches_in_a_cache_that_is_too_small_are_answered_the_same(
    engine, recomputing, runtime_device, seed
):
    rng = np.random.default_rng(seed)
    systems = [SYSTEM * count for count in (1, 2, 3)]
    prompts = ["go", "go to the red box", "turn around at the door " * 5, "wait"]
    requests = [ask(prompt, 3 + len(prompt) % 5, system) for prompt in prompts for system in systems]
    expected: dict[int, list[int]] = {}
    reused = 0
    row = recomputing.pipeline.runner
    budget = (row.kv_cache.nbytes + row.recurrent.nbytes) * 3 // 4  # three states
    with LLMInferenceRuntime(engine, runtime_device, prefix_cache_bytes=budget) as runtime:
        assert runtime.pipeline.reuse.states.places == 3
        for _ in range(8):
            chosen = rng.choice(len(requests), rng.integers(1, 5), replace=False)
            answers = runtime.handle_request([requests[index] for index in chosen])
            for index, answer in zip(chosen, answers, strict=True):
                if index not in expected:
                    expected[index] = recomputing.handle_request(requests[index]).token_ids
                assert answer.token_ids == expected[index]
                reused += answer.reused_tokens
    assert reused > 0


def test_a_request_for_hidden_states_is_not_cut(reusing, recomputing):
    for prompt in ("what do you see?", "go to the red box", "turn around now"):
        reusing.handle_request(ask(prompt), output_thinker_embeddings=True)
        recomputing.handle_request(ask(prompt), output_thinker_embeddings=True)
        found, expected = (
            runtime.pipeline.device.download(runtime.base_model_hidden_states(0))
            for runtime in (reusing, recomputing)
        )
        np.testing.assert_array_equal(found, expected)


class TestOnDisk:
    def test_another_process_reuses_a_saved_system_prompt(
        self, reusing, recomputing, engine, tmp_path, runtime_device
    ):
        saved = reusing.gen_and_save_system_prompt_kv_cache(SYSTEM)
        reusing.save_prefix_cache(tmp_path / "prompts")
        with LLMInferenceRuntime(engine, runtime_device) as runtime:
            runtime.load_prefix_cache(tmp_path / "prompts")
            answer = runtime.handle_request(ask("go"))
            assert answer.reused_tokens == saved
            assert answer.token_ids == recomputing.handle_request(ask("go")).token_ids

    def test_a_smaller_cache_loads_the_states_that_were_used_last(
        self, reusing, recomputing, engine, tmp_path, runtime_device
    ):
        first = reusing.gen_and_save_system_prompt_kv_cache(SYSTEM)
        reusing.gen_and_save_system_prompt_kv_cache("another " + SYSTEM)
        assert reusing.handle_request(ask("go")).reused_tokens == first
        reusing.save_prefix_cache(tmp_path / "prompts")
        row = recomputing.pipeline.runner
        budget = (row.kv_cache.nbytes + row.recurrent.nbytes) // 2  # two states
        with LLMInferenceRuntime(engine, runtime_device, prefix_cache_bytes=budget) as runtime:
            runtime.load_prefix_cache(tmp_path / "prompts")
            states = runtime.pipeline.reuse.states
            assert len(states) == states.places == 2
            assert runtime.handle_request(ask("wait")).reused_tokens == first

    @pytest.mark.parametrize("change", ["page", "values"])
    def test_a_damaged_state_is_refused(self, reusing, tmp_path, change):
        reusing.gen_and_save_system_prompt_kv_cache(SYSTEM)
        path = tmp_path / "prompts"
        reusing.save_prefix_cache(path)
        tensors = load_file(path)
        with safe_open(path, framework="numpy") as file:
            description = json.loads(file.metadata()["prefix_cache"])
        if change == "page":
            description["states"][0]["page"] = 99
        else:
            tensors["state_1"] = tensors["state_1"] + 1
        save_file(tensors, path, {"prefix_cache": json.dumps(description)})
        stored = len(reusing.pipeline.reuse.states)
        with pytest.raises(ValueError, match=r"prompts: damaged: "):
            reusing.load_prefix_cache(path)
        assert len(reusing.pipeline.reuse.states) == stored > 0


def test_a_saved_system_prompt_and_its_state_stay_until_released(reusing, recomputing):
    count = reusing.gen_and_save_system_prompt_kv_cache(SYSTEM)
    for seed in range(8):  # more prompts than the pool has states
        compute(reusing, random_ids(300, seed))
    answer = reusing.handle_request(ask("what do you see?"))
    assert answer.reused_tokens == count
    assert answer.token_ids == recomputing.handle_request(ask("what do you see?")).token_ids
    reusing.release_system_prompt_kv_cache(SYSTEM)
    for seed in range(8):
        compute(reusing, random_ids(300, seed))
    assert reusing.handle_request(ask("where are you?")).reused_tokens == 0
