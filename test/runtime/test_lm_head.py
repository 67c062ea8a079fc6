# SPDX-License-Identifier: Apache-2.0
"""Engines with a reduced vocabulary or an LM head that is replaced at run time."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgellm_ros.builder import export
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.engine_directory.files import list_files
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.requests_for_tests import IMAGE, OTHER_IMAGE, assert_same_answer, request

MATRIX = "lm_head.weight"
REQUESTS = [
    request(images=(IMAGE,), max_tokens=20, logprobs=2),
    request("what do you see?", temperature=1.2, top_k=40, seed=3, max_tokens=15),
    request("", images=(OTHER_IMAGE,), temperature=0.8, top_p=0.9, seed=4, repetition_penalty=1.3),
    request("stop", system_prompt="be brief", min_p=0.05, temperature=1.5, logprobs=4),
]


def write_map(path, ids):
    save_file({"vocab_map": np.asarray(ids)}, path)
    return path


@pytest.fixture(scope="module")
def exported(runtime_device):
    """Function that exports a checkpoint to a directory, with options, and opens it."""

    def make(checkpoint, directory, **options) -> LLMInferenceRuntime:
        export(checkpoint, directory, **options)
        return LLMInferenceRuntime(directory, runtime_device)

    return make


@pytest.fixture(scope="module")
def map_ids(tiny_engine) -> list[int]:
    """The stop tokens, and every second token from 40 to 238."""
    config = EngineConfig.load(tiny_engine)
    return sorted({*range(40, 240, 2), *config.stop_token_ids})


@pytest.fixture(scope="module")
def reduced(tiny_checkpoint, map_ids, tmp_path_factory, exported):
    directory = tmp_path_factory.mktemp("reduced")
    path = write_map(directory / "map.safetensors", np.array(map_ids[::-1], np.int32))
    with exported(tiny_checkpoint, directory / "engine", vocab_map=path) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def replaceable(tiny_checkpoint, tmp_path_factory, exported):
    with exported(tiny_checkpoint, tmp_path_factory.mktemp("lm_head"), lm_head_input=True) as runtime:
        yield runtime


class TestReducedVocabulary:
    @pytest.mark.slow
    def test_a_map_of_all_tokens_changes_nothing(self, tiny_checkpoint, tmp_path, runtime, exported):
        path = write_map(tmp_path / "map.safetensors", np.arange(runtime.config.llm.vocab_size))
        with exported(tiny_checkpoint, tmp_path / "engine", vocab_map=path) as other:
            for one in REQUESTS:
                assert_same_answer(other.handle_request(one), runtime.handle_request(one))

    def test_greedy_decoding_takes_the_likeliest_token_of_the_map(self, reduced, runtime, map_ids):
        prompts = ["go to the red box", "what do you see?", "stop", "abc"]
        for prompt in prompts:
            likeliest = runtime.handle_request(request(prompt, logprobs=50)).logprobs[0]
            allowed = [token for token, _ in likeliest if token in map_ids]
            assert reduced.handle_request(request(prompt)).token_ids[0] == allowed[0]

    def test_only_tokens_of_the_map_are_sampled_and_reported(self, reduced, map_ids):
        sampled = set()
        for seed in range(5):
            answer = reduced.handle_request(request("abc", temperature=2.0, seed=seed, logprobs=5))
            sampled |= set(answer.token_ids)
            for token, entries in zip(answer.token_ids, answer.logprobs, strict=True):
                assert token in dict(entries)
                assert set(dict(entries)) <= set(map_ids)
        assert sampled <= set(map_ids)
        assert len(sampled) > 20

    def test_the_repetition_penalty_covers_prompt_and_answer(self, reduced):
        answer = reduced.handle_request(request("hjln", repetition_penalty=1e6, max_tokens=40))
        prompt = reduced.base_model_input_token_ids[0]
        assert len(set(answer.token_ids)) == len(answer.token_ids) > 10
        assert not set(answer.token_ids) & set(prompt)

    def test_answers_do_not_depend_on_the_batch(self, reduced):
        alone = [reduced.handle_request(one) for one in REQUESTS]
        for chosen in itertools.islice(itertools.permutations(range(4), 3), 0, None, 5):
            answers = reduced.handle_request([REQUESTS[index] for index in chosen])
            for index, answer in zip(chosen, answers, strict=True):
                assert_same_answer(answer, alone[index])

    def test_the_config_has_both_vocabulary_sizes(self, reduced, map_ids):
        llm = reduced.config.llm
        assert (llm.vocab_size, llm.reduced_vocab_size, llm.output_vocab_size) == (
            302,
            len(map_ids),
            len(map_ids),
        )
        assert reduced.pipeline.runner.config.output_vocab_size == len(map_ids)

    @pytest.mark.slow
    def test_more_log_probabilities_than_tokens_are_refused(
        self, tiny_checkpoint, tmp_path, runtime, exported
    ):
        path = write_map(tmp_path / "map.safetensors", runtime.config.stop_token_ids)
        with exported(tiny_checkpoint, tmp_path / "engine", vocab_map=path) as other:
            count = len(runtime.config.stop_token_ids)
            assert len(other.handle_request(request(logprobs=count)).logprobs[0]) == count
            with pytest.raises(ValueError, match=f"exceeds the vocabulary of {count} tokens"):
                other.handle_request(request(logprobs=count + 1))

    def test_a_map_that_does_not_fit_is_an_error_at_loading(
        self, tiny_checkpoint, map_ids, tmp_path, runtime_device
    ):
        engine = tmp_path / "engine"
        export(tiny_checkpoint, engine, vocab_map=write_map(tmp_path / "map.safetensors", map_ids))
        for ids, message in [
            (map_ids[1:], rf"expected a tensor 'vocab_map' \[{len(map_ids)}\], found"),
            ([*map_ids[:-1], 400], "must be rising token ids below 302"),
            ([map_ids[1], *map_ids[1:]], "must be rising token ids below 302"),
        ]:
            save_file({"vocab_map": np.array(ids)}, engine / "vocab_map.safetensors")
            data = json.loads((engine / "config.json").read_text())
            paths = [entry["path"] for entry in data["files"]]
            data["files"] = [vars(entry) for entry in list_files(engine, paths)]
            (engine / "config.json").write_text(json.dumps(data))
            with pytest.raises(ValueError, match=message):
                LLMInferenceRuntime(engine, runtime_device)


class TestReplacedLMHead:
    def test_the_checkpoint_s_lm_head_is_used_at_first(self, replaceable, runtime):
        for one in REQUESTS:
            found, expected = replaceable.handle_request(one), runtime.handle_request(one)
            assert found.token_ids == expected.token_ids
            if expected.logprobs:
                values = [[value for _, value in entries] for entries in expected.logprobs]
                for entries, row in zip(found.logprobs, values, strict=True):
                    np.testing.assert_allclose([value for _, value in entries], row, atol=1e-5)

    def test_answers_do_not_depend_on_the_batch(self, replaceable):
        alone = [replaceable.handle_request(one) for one in REQUESTS]
        for size in (2, 3, 4):
            for chosen in itertools.islice(itertools.permutations(range(4), size), 0, None, 5):
                answers = replaceable.handle_request([REQUESTS[index] for index in chosen])
                for index, answer in zip(chosen, answers, strict=True):
                    assert_same_answer(answer, alone[index])

    def test_another_lm_head_gives_other_logits(self, replaceable, tiny_checkpoint):
        one = dataclasses.replace(
            REQUESTS[0], sampling=dataclasses.replace(REQUESTS[0].sampling, max_tokens=1)
        )
        before = replaceable.handle_request(one)
        tensors = [load_file(path) for path in tiny_checkpoint.glob("*.safetensors")]
        (matrix,) = [found[MATRIX].astype(np.float32).T for found in tensors if MATRIX in found]
        order = np.random.default_rng(0).permutation(matrix.shape[1])
        replaceable.set_lm_head_weights(MATRIX, matrix[:, order])
        try:
            after = replaceable.handle_request(one)
        finally:
            replaceable.set_lm_head_weights(MATRIX, matrix)
        assert order[after.token_ids].tolist() == before.token_ids
        assert after.logprobs[0][0][1] == pytest.approx(before.logprobs[0][0][1], abs=1e-5)
        assert_same_answer(replaceable.handle_request(one), before)

    def test_an_lm_head_of_another_shape_is_refused_and_the_old_one_stays(self, replaceable):
        before = replaceable.handle_request(REQUESTS[0])
        with pytest.raises(EngineError, match=r"must be \[48, 302\], got \[302, 48\]"):
            replaceable.set_lm_head_weights(MATRIX, np.zeros((302, 48), np.float32))
        assert_same_answer(replaceable.handle_request(REQUESTS[0]), before)

    def test_an_unknown_extra_input_is_refused(self, replaceable):
        with pytest.raises(EngineError, match="no extra input 'rope_cos'"):
            replaceable.set_lm_head_weights("rope_cos", np.zeros((1, 1, 8), np.float32))

    def test_an_engine_without_lm_head_input_says_how_to_get_it(self, runtime):
        with pytest.raises(
            EngineError, match=r"no extra input 'lm_head.weight' \(export with lm_head_input\)"
        ):
            runtime.set_lm_head_weights(MATRIX, np.zeros((48, 302), np.float32))

    def test_a_replaced_lm_head_works_with_a_reduced_vocabulary(
        self, tiny_checkpoint, map_ids, reduced, tmp_path, exported
    ):
        path = write_map(tmp_path / "map.safetensors", map_ids)
        options = {"vocab_map": path, "lm_head_input": True}
        with exported(tiny_checkpoint, tmp_path / "engine", **options) as both:
            for one in REQUESTS:
                assert both.handle_request(one).token_ids == reduced.handle_request(one).token_ids
