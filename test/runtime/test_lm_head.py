# SPDX-License-Identifier: Apache-2.0
"""Engines that answer with some tokens only, and engines whose last matrix is exchanged at run time."""

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
    """Exports a checkpoint to a directory, with options, and opens it."""

    def make(checkpoint, directory, **options) -> LLMInferenceRuntime:
        export(checkpoint, directory, **options)
        return LLMInferenceRuntime(directory, runtime_device)

    return make


@pytest.fixture(scope="module")
def letters(tiny_engine) -> list[int]:
    """The stop tokens, and every other token from 40 on."""
    config = EngineConfig.load(tiny_engine)
    return sorted({*range(40, 240, 2), *config.stop_token_ids})


@pytest.fixture(scope="module")
def reduced(tiny_checkpoint, letters, tmp_path_factory, exported):
    directory = tmp_path_factory.mktemp("reduced")
    path = write_map(directory / "map.safetensors", np.array(letters[::-1], np.int32))
    with exported(tiny_checkpoint, directory / "engine", vocab_map=path) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def exchangeable(tiny_checkpoint, tmp_path_factory, exported):
    with exported(tiny_checkpoint, tmp_path_factory.mktemp("exchange"), lm_head_input=True) as runtime:
        yield runtime


class TestReducedVocabulary:
    def test_a_map_of_all_tokens_changes_nothing(self, tiny_checkpoint, tmp_path, runtime, exported):
        path = write_map(tmp_path / "map.safetensors", np.arange(runtime.config.llm.vocab_size))
        with exported(tiny_checkpoint, tmp_path / "engine", vocab_map=path) as other:
            for one in REQUESTS:
                assert_same_answer(other.handle_request(one), runtime.handle_request(one))

    def test_the_likeliest_of_its_tokens_is_taken(self, reduced, runtime, letters):
        prompts = ["go to the red box", "what do you see?", "stop", "abc"]
        for prompt in prompts:
            likeliest = runtime.handle_request(request(prompt, logprobs=50)).logprobs[0]
            allowed = [token for token, _ in likeliest if token in letters]
            assert reduced.handle_request(request(prompt)).token_ids[0] == allowed[0]

    def test_only_its_tokens_are_drawn_and_reported(self, reduced, letters):
        drawn = set()
        for seed in range(5):
            answer = reduced.handle_request(request("abc", temperature=2.0, seed=seed, logprobs=5))
            drawn |= set(answer.token_ids)
            for token, entries in zip(answer.token_ids, answer.logprobs, strict=True):
                assert token in dict(entries)
                assert set(dict(entries)) <= set(letters)
        assert drawn <= set(letters)
        assert len(drawn) > 20

    def test_the_repetition_penalty_knows_the_prompt_and_the_answer(self, reduced):
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

    def test_the_config_tells_both_sizes(self, reduced, letters):
        llm = reduced.config.llm
        assert (llm.vocab_size, llm.reduced_vocab_size, llm.output_vocab_size) == (
            302,
            len(letters),
            len(letters),
        )
        assert reduced.pipeline.runner.config.output_vocab_size == len(letters)

    def test_more_log_probabilities_than_tokens_are_refused(
        self, tiny_checkpoint, tmp_path, runtime, exported
    ):
        path = write_map(tmp_path / "map.safetensors", runtime.config.stop_token_ids)
        with exported(tiny_checkpoint, tmp_path / "engine", vocab_map=path) as other:
            count = len(runtime.config.stop_token_ids)
            assert len(other.handle_request(request(logprobs=count)).logprobs[0]) == count
            with pytest.raises(ValueError, match=f"exceeds the vocabulary of {count} tokens"):
                other.handle_request(request(logprobs=count + 1))

    def test_a_map_that_does_not_fit_is_named_at_loading(
        self, tiny_checkpoint, letters, tmp_path, runtime_device
    ):
        engine = tmp_path / "engine"
        export(tiny_checkpoint, engine, vocab_map=write_map(tmp_path / "map.safetensors", letters))
        for ids, message in [
            (letters[1:], rf"expected a tensor 'vocab_map' \[{len(letters)}\], found"),
            ([*letters[:-1], 400], "must be rising token ids below 302"),
            ([letters[1], *letters[1:]], "must be rising token ids below 302"),
        ]:
            save_file({"vocab_map": np.array(ids)}, engine / "vocab_map.safetensors")
            data = json.loads((engine / "config.json").read_text())
            paths = [entry["path"] for entry in data["files"]]
            data["files"] = [vars(entry) for entry in list_files(engine, paths)]
            (engine / "config.json").write_text(json.dumps(data))
            with pytest.raises(ValueError, match=message):
                LLMInferenceRuntime(engine, runtime_device)


class TestExchangedMatrix:
    def test_the_checkpoint_s_own_is_there_from_the_start(self, exchangeable, runtime):
        for one in REQUESTS:
            found, expected = exchangeable.handle_request(one), runtime.handle_request(one)
            assert found.token_ids == expected.token_ids
            if expected.logprobs:
                values = [[value for _, value in entries] for entries in expected.logprobs]
                for entries, row in zip(found.logprobs, values, strict=True):
                    np.testing.assert_allclose([value for _, value in entries], row, atol=1e-5)

    def test_answers_do_not_depend_on_the_batch(self, exchangeable):
        alone = [exchangeable.handle_request(one) for one in REQUESTS]
        for size in (2, 3, 4):
            for chosen in itertools.islice(itertools.permutations(range(4), size), 0, None, 5):
                answers = exchangeable.handle_request([REQUESTS[index] for index in chosen])
                for index, answer in zip(chosen, answers, strict=True):
                    assert_same_answer(answer, alone[index])

    def test_another_matrix_makes_other_logits(self, exchangeable, tiny_checkpoint):
        one = dataclasses.replace(
            REQUESTS[0], sampling=dataclasses.replace(REQUESTS[0].sampling, max_tokens=1)
        )
        before = exchangeable.handle_request(one)
        tensors = [load_file(path) for path in tiny_checkpoint.glob("*.safetensors")]
        (matrix,) = [found[MATRIX].astype(np.float32).T for found in tensors if MATRIX in found]
        order = np.random.default_rng(0).permutation(matrix.shape[1])
        exchangeable.set_lm_head_weights(MATRIX, matrix[:, order])
        try:
            after = exchangeable.handle_request(one)
        finally:
            exchangeable.set_lm_head_weights(MATRIX, matrix)
        assert order[after.token_ids].tolist() == before.token_ids
        assert after.logprobs[0][0][1] == pytest.approx(before.logprobs[0][0][1], abs=1e-5)
        assert_same_answer(exchangeable.handle_request(one), before)

    def test_a_matrix_of_another_shape_is_refused_and_the_old_one_stays(self, exchangeable):
        before = exchangeable.handle_request(REQUESTS[0])
        with pytest.raises(EngineError, match=r"must be \[48, 302\], got \[302, 48\]"):
            exchangeable.set_lm_head_weights(MATRIX, np.zeros((302, 48), np.float32))
        assert_same_answer(exchangeable.handle_request(REQUESTS[0]), before)

    def test_an_input_that_is_no_extra_one_is_refused(self, exchangeable):
        with pytest.raises(EngineError, match="no extra input 'rope_cos'"):
            exchangeable.set_lm_head_weights("rope_cos", np.zeros((1, 1, 8), np.float32))

    def test_an_engine_without_such_an_input_says_how_to_get_one(self, runtime):
        with pytest.raises(
            EngineError, match=r"no extra input 'lm_head.weight' \(export with lm_head_input\)"
        ):
            runtime.set_lm_head_weights(MATRIX, np.zeros((48, 302), np.float32))

    def test_it_goes_together_with_a_reduced_vocabulary(
        self, tiny_checkpoint, letters, reduced, tmp_path, exported
    ):
        path = write_map(tmp_path / "map.safetensors", letters)
        options = {"vocab_map": path, "lm_head_input": True}
        with exported(tiny_checkpoint, tmp_path / "engine", **options) as both:
            for one in REQUESTS:
                assert both.handle_request(one).token_ids == reduced.handle_request(one).token_ids
