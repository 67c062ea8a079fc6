# SPDX-License-Identifier: Apache-2.0
"""Hidden states of decode steps: in answers, and of the runner's steps."""

import dataclasses

import numpy as np
import pytest

from edgellm_ros.builder import export
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.runtime.decoding.speculative.drafting_config import SpecDecodeDraftingConfig
from edgellm_ros.runtime.engines.prompt_inputs import PromptRun, upload_prompts
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.on_device import assert_same_up_to_rounding, put
from fixtures.requests_for_tests import IMAGE, assert_close, assert_same_answer, request

LAYERS = (1, 3)  # of three
HIDDEN, VOCABULARY = 48, 302
LOOKUP = SpecDecodeDraftingConfig(1, 7, 8, "lookup", falls_back=False)  # a GPU may be faster without
WANTED = {"output_hidden_states": True, "logprobs": 50, "max_tokens": 12}


@pytest.fixture(scope="module")
def engine(tiny_checkpoint, tmp_path_factory):
    directory = tmp_path_factory.mktemp("token_states")
    export(tiny_checkpoint, directory, hidden_state_layers=LAYERS, lm_head_input=True, max_batch_size=3)
    return directory


@pytest.fixture(scope="module")
def opened(engine, device):
    with LLMInferenceRuntime(engine, device) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def head(opened, device) -> np.ndarray:
    """The LM head [H,V]."""
    return device.download(opened.pipeline.runner._runs.shared["lm_head.weight"])


def assert_states_gave_the_tokens(answer, head) -> None:
    """Compare the last layer's log-probabilities with those of the answer."""
    states = answer.hidden_states[LAYERS[-1]].astype(np.float64)
    assert states.shape == (len(answer.token_ids), HIDDEN)
    logits = states @ head
    logits -= logits.max(axis=1, keepdims=True)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for place, entries in enumerate(answer.logprobs):
        for token, value in entries:
            assert value == pytest.approx(expected[place, token], abs=1e-4)


def test_an_answer_has_the_states_from_which_its_tokens_were_sampled(opened, head):
    answer = opened.handle_request(request("what do you see?", images=(IMAGE,), **WANTED))
    assert len(answer.token_ids) > 3
    assert sorted(answer.hidden_states) == list(LAYERS)
    assert_states_gave_the_tokens(answer, head)


def test_the_first_state_is_that_of_the_prompt_s_last_token(opened, device):
    answer = opened.handle_request(request("hello there", **WANTED), output_thinker_embeddings=True)
    for layer in LAYERS:
        prompt = device.download(opened.base_model_hidden_states(layer))[0, -1]
        np.testing.assert_array_equal(answer.hidden_states[layer][0], prompt)


def test_requests_of_a_batch_have_their_own_states(opened, head):
    batch = [request(prompt, **WANTED) for prompt in ("hello there", "stop", "go to the red box")]
    batch[1] = request("stop", max_tokens=5)
    answers = opened.handle_request(batch)
    assert answers[1].hidden_states is None
    for one, answer in zip(batch[::2], answers[::2], strict=True):
        alone = opened.handle_request(one)
        assert_same_answer(answer, alone)
        assert_states_gave_the_tokens(answer, head)
        for layer in LAYERS:
            assert_same_up_to_rounding(answer.hidden_states[layer], alone.hidden_states[layer])


def test_states_do_not_change_answers(opened):
    one = request("what do you see?", **WANTED, temperature=1.3, seed=4)
    other = dataclasses.replace(one, output_hidden_states=False)
    assert_same_answer(opened.handle_request(one), opened.handle_request(other))


def test_recorded_steps_have_the_same_states(engine, device, opened):
    one = request("turn left", **WANTED)
    expected = opened.handle_request(one)
    with LLMInferenceRuntime(engine, device) as runtime:
        runtime.capture_decoding_cuda_graph()
        answer = runtime.handle_request(one)
    for layer in LAYERS:
        assert_same_up_to_rounding(answer.hidden_states[layer], expected.hidden_states[layer])


def test_a_grammar_s_steps_have_states_too(opened, head):
    answer = opened.handle_request(request("hello", regex="[a-z]{8}", **WANTED))
    logits = answer.hidden_states[LAYERS[-1]] @ head
    assert len(logits) == len(answer.token_ids)
    for place, entries in enumerate(answer.logprobs):
        tokens, values = zip(*entries, strict=True)
        # among the tokens that the grammar allows, so up to a constant
        differences = np.array(values) - logits[place, list(tokens)]
        np.testing.assert_allclose(differences, differences[0], atol=1e-4)


@pytest.mark.slow
def test_drafting_gives_the_same_states(engine, device, opened, head):
    batch = [request("abc abc abc abc", **WANTED | {"max_tokens": 25}), request("stop", max_tokens=9)]
    expected = opened.handle_request(batch)[0]
    with LLMInferenceRuntime(engine, device, drafting=LOOKUP) as runtime:
        answer = runtime.handle_request(batch)[0]
        assert runtime.spec_decode_generation_metrics.total_runs > 0
    assert answer.token_ids == expected.token_ids
    assert_states_gave_the_tokens(answer, head)
    for layer in LAYERS:
        assert_close(answer.hidden_states[layer], expected.hidden_states[layer])


def test_an_engine_without_hidden_states_says_how_to_get_them(runtime):
    with pytest.raises(ValueError, match=r"no hidden states, .* export it with --hidden-states"):
        runtime.handle_request(request(output_hidden_states=True))
    with pytest.raises(ValueError, match="output_hidden_states must be True or False, got 1"):
        request(output_hidden_states=1)


class TestRunner:
    """Steps of the runner over the same inputs as one prefill."""

    @pytest.fixture
    def runner(self, opened):
        return opened.pipeline.runner

    def prefill(self, runner, device, inputs) -> list[np.ndarray]:
        """Prefill inputs [B,S,H]; return the states [B,S,H] of each layer."""
        batch, tokens, _ = inputs.shape
        for row in range(batch):
            runner.kv_cache.clear_row(row)
        logits = device.empty((batch, 1, VOCABULARY), np.float32)
        positions = np.broadcast_to(np.arange(tokens, dtype=np.float32), (batch, 3, tokens))
        deepstack = [device.zeros(inputs.shape, np.float32) for _ in range(2)]
        states = [device.empty(inputs.shape, np.float32) for _ in LAYERS]
        runner.execute_prefill_step(
            put(device, inputs),
            upload_prompts(device, [tokens] * batch, positions),
            PromptRun(tokens, range(batch), (), first=(True,) * batch),
            deepstack_embeds=deepstack,
            output_logits=logits,
            output_hidden_states=states,
        )
        return [device.download(each) for each in states]

    @pytest.mark.parametrize("given", [True, False])
    def test_states_of_several_steps_are_those_of_one_prefill(self, runner, device, given):
        from types import SimpleNamespace

        inputs = np.random.default_rng(0).standard_normal((2, 9, HIDDEN)).astype(np.float32)
        sequences = [SimpleNamespace(kv_length=0, rope_delta=0) for _ in range(2)]
        for row, sequence in enumerate(sequences):
            runner.kv_cache.open(row, sequence)
        whole = self.prefill(runner, device, inputs)
        for row in range(2):
            runner.kv_cache.close(row)
            runner.kv_cache.open(row, sequences[row])
        self.prefill(runner, device, inputs[:, :5])
        for token in range(5, 9):
            for sequence in sequences:
                sequence.kv_length = token
            logits = device.empty((2, 1, VOCABULARY), np.float32)
            states = [device.empty((2, 1, HIDDEN), np.float32) for _ in LAYERS] if given else []
            embeds = put(device, inputs[:, token : token + 1])
            runner.execute_vanilla_decoding_step(embeds, logits, output_hidden_states=states)
            runner.kv_cache.commit(put(device, np.ones(2, np.int64)))
            for layer, each in enumerate(states or runner.step_hidden_states(2, 1, runner.state_layers)):
                np.testing.assert_allclose(device.download(each)[:, 0], whole[layer][:, token], atol=1e-5)
        for row in range(2):
            runner.kv_cache.close(row)

    def test_another_number_of_tensors_is_refused(self, runner, device):
        embeds, logits = (device.zeros((1, 1, size), np.float32) for size in (HIDDEN, VOCABULARY))
        with pytest.raises(EngineError, match=r"2 tensors of hidden states \(layers 1, 3\), got 1"):
            runner.execute_vanilla_decoding_step(embeds, logits, output_hidden_states=[embeds])


def test_the_config_names_the_layers_of_the_states(engine):
    assert EngineConfig.load(engine).hidden_state_layers == LAYERS
