# SPDX-License-Identifier: Apache-2.0
"""Hidden states, token ids and embedding table of the last request."""

import threading

import numpy as np
import pytest
from safetensors.numpy import load_file

from edgellm_ros.builder import export
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.on_device import assert_same_up_to_rounding
from fixtures.requests_for_tests import IMAGE, OTHER_IMAGE, assert_same_answer, request

LAST = 3  # number of layers of the tiny model


@pytest.fixture(scope="module")
def open_runtime(tiny_checkpoint, tmp_path_factory, device):
    """A runtime whose engine has the hidden states of layers 1 and LAST as outputs."""
    engine = tmp_path_factory.mktemp("hidden_states")
    export(tiny_checkpoint, engine, hidden_state_layers=(1, LAST))
    with LLMInferenceRuntime(engine, device) as runtime:
        yield runtime


def checkpoint_tensor(checkpoint, name) -> np.ndarray:
    (tensor,) = [
        load_file(path)[name] for path in checkpoint.glob("*.safetensors") if name in load_file(path)
    ]
    return tensor.astype(np.float32)


def test_layer_0_of_text_is_its_embedding(open_runtime, device):
    open_runtime.handle_request(request("what do you see?"), output_thinker_embeddings=True)
    (token_ids,) = open_runtime.base_model_input_token_ids
    found = device.download(open_runtime.base_model_hidden_states(0))
    np.testing.assert_array_equal(found, device.download(open_runtime.embedding_table)[token_ids][None])


def test_layer_0_of_an_image_is_the_encoder_s_output(open_runtime, device):
    seen = []
    for image in (IMAGE, OTHER_IMAGE):
        open_runtime.handle_request(request(images=(image,)), output_thinker_embeddings=True)
        (token_ids,) = open_runtime.base_model_input_token_ids
        places = np.array(token_ids) == open_runtime.config.special_tokens.image_token_id
        embeds = device.download(open_runtime.base_model_hidden_states(0))[0]
        words = np.array(token_ids)[~places]
        np.testing.assert_array_equal(embeds[~places], device.download(open_runtime.embedding_table)[words])
        seen.append(embeds[places])
    assert seen[0].shape == (12, 48)
    assert np.abs(seen[0][:12] - seen[1][:12]).min() > 0


def test_the_last_layer_s_hidden_states_give_the_logits(open_runtime, tiny_checkpoint, device):
    one = request(images=(IMAGE,), logprobs=50)
    answer = open_runtime.handle_request(one, output_thinker_embeddings=True)
    last = device.download(open_runtime.base_model_hidden_states(LAST))[0, -1]
    logits = checkpoint_tensor(tiny_checkpoint, "lm_head.weight") @ last
    expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    for token, value in answer.logprobs[0]:
        assert value == pytest.approx(expected[token], abs=1e-5)


def test_hidden_states_do_not_change_answers(open_runtime, runtime):
    for one in (request(images=(IMAGE,)), request("stop", temperature=1.3, seed=5, logprobs=2)):
        expected = runtime.handle_request(one)
        assert_same_answer(open_runtime.handle_request(one), expected)
        assert_same_answer(open_runtime.handle_request(one, output_thinker_embeddings=True), expected)


def test_hidden_states_do_not_change_during_decoding(open_runtime, device):
    kept = {}

    def keep(progress):
        if progress.stage == "decode" and progress.step == 0:
            kept.update(
                {layer: device.download(open_runtime.base_model_hidden_states(layer)) for layer in (0, 1, 3)}
            )

    one = request("what do you see?", max_tokens=20, on_progress=keep)
    answer = open_runtime.handle_request(one, output_thinker_embeddings=True)
    assert len(answer.token_ids) > 5
    for layer in (0, 1, 3):
        np.testing.assert_array_equal(
            device.download(open_runtime.base_model_hidden_states(layer)), kept[layer]
        )


def test_hidden_states_have_a_row_for_each_prompt_of_a_batch(open_runtime, device):
    prompts = [request("hello there"), request(images=(IMAGE,))]
    alone = []
    for one in prompts:
        open_runtime.handle_request(one, output_thinker_embeddings=True)
        ids = open_runtime.base_model_input_token_ids[0]
        assert open_runtime.base_model_prefill_length == len(ids)
        alone.append((ids, device.download(open_runtime.base_model_hidden_states(1))[0]))
    open_runtime.handle_request(prompts, output_thinker_embeddings=True)
    together = device.download(open_runtime.base_model_hidden_states(1))
    assert open_runtime.base_model_prefill_length == max(len(ids) for ids, _ in alone) == together.shape[1]
    for row, (ids, states) in enumerate(alone):
        assert open_runtime.base_model_input_token_ids[row] == ids
        assert_same_up_to_rounding(together[row, : len(ids)], states)


def test_hidden_states_are_none_unless_the_last_request_kept_them(open_runtime):
    open_runtime.handle_request(request(), output_thinker_embeddings=True)
    assert open_runtime.base_model_hidden_states(1) is not None
    open_runtime.handle_request(request("hello"))
    assert open_runtime.base_model_hidden_states(0) is None
    assert open_runtime.base_model_hidden_states(1) is None
    assert open_runtime.base_model_prefill_length == 0
    assert len(open_runtime.base_model_input_token_ids) == 1


def test_a_refused_or_cancelled_request_leaves_no_hidden_states(open_runtime):
    cancel = threading.Event()
    cancel.set()
    for bad in (request("word " * 1000), request(cancel=cancel)):
        open_runtime.handle_request(request(), output_thinker_embeddings=True)
        try:
            open_runtime.handle_request(bad, output_thinker_embeddings=True)
        except ValueError:
            assert bad.cancel is None
        assert open_runtime.base_model_hidden_states(0) is None
        assert open_runtime.base_model_input_token_ids == []


def test_an_engine_without_hidden_state_outputs_has_layer_0_only(runtime):
    runtime.handle_request(request(), output_thinker_embeddings=True)
    assert runtime.base_model_hidden_states(0) is not None
    assert runtime.base_model_hidden_states(1) is None
    bindings = runtime.pipeline.runner._prefill.executor.bindings
    assert not any(name.startswith("hidden_states") for name in bindings)


def test_hidden_states_of_a_layer_without_output_are_none(open_runtime):
    open_runtime.handle_request(request(), output_thinker_embeddings=True)
    assert open_runtime.base_model_hidden_states(2) is None
    assert open_runtime.base_model_hidden_states(-1) is None


def test_an_engine_with_lora_inputs_has_the_same_hidden_states(
    open_runtime, tiny_checkpoint, tmp_path, device
):
    options = {"hidden_state_layers": (1, LAST), "max_lora_rank": 4, "lm_head_input": True}
    export(tiny_checkpoint, tmp_path, **options)
    requests = [request("hello there"), request(images=(IMAGE,))]
    open_runtime.handle_request(requests, output_thinker_embeddings=True)
    with LLMInferenceRuntime(tmp_path, device) as other:
        other.handle_request(requests, output_thinker_embeddings=True)
        for layer in (0, 1, LAST):
            expected = device.download(open_runtime.base_model_hidden_states(layer))
            assert_same_up_to_rounding(device.download(other.base_model_hidden_states(layer)), expected)


@pytest.mark.only_on("cpu", reason="NumPy reads the host's memory")
def test_other_libraries_read_hidden_states_and_embeddings(open_runtime, device):
    open_runtime.handle_request(request("hello there"), output_thinker_embeddings=True)
    for tensor in (open_runtime.embedding_table, open_runtime.base_model_hidden_states(LAST)):
        found = np.from_dlpack(tensor)
        np.testing.assert_array_equal(found, device.download(tensor))
        assert found.__array_interface__["data"][0] == tensor.pointer


def test_the_embedding_table_is_the_checkpoint_s(runtime, tiny_checkpoint, device):
    expected = checkpoint_tensor(tiny_checkpoint, "model.embed_tokens.weight")
    np.testing.assert_array_equal(device.download(runtime.embedding_table), expected)
