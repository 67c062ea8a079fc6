# SPDX-License-Identifier: Apache-2.0
"""Several LM heads on the device.

A head is chosen by each request, by a switch, or by each step of the runner.
"""

import dataclasses

import numpy as np
import pytest

from edgellm_ros.builder import export
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures import on_device
from fixtures.on_device import assert_same_up_to_rounding, put
from fixtures.requests_for_tests import assert_same_answer, assert_same_with_drafting, request
from fixtures.tiny_adapter import write_adapter

MATRIX = "lm_head.weight"
SHAPE = 48, 302
HEADS = {
    name: np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32)
    for seed, name in enumerate(("first", "second"))
}
WORDS = {"max_tokens": 10, "repetition_penalty": 1.2, "logprobs": 2}


@pytest.fixture(scope="module")
def engine(tiny_checkpoint, tmp_path_factory):
    """An engine for three sequences with LoRA inputs and the LM head as an input."""
    directory = tmp_path_factory.mktemp("heads")
    export(tiny_checkpoint, directory, max_batch_size=3, max_lora_rank=8, lm_head_input=True)
    write_adapter(directory / "lora" / "a", tiny_checkpoint, seed=1, r=4)
    return directory


def opened(engine, device, **options) -> LLMInferenceRuntime:
    runtime = LLMInferenceRuntime(engine, device, **options)
    for name, weights in HEADS.items():
        runtime.add_lm_head(name, weights)
    return runtime


@pytest.fixture(scope="module")
def heads(engine, device):
    with opened(engine, device) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def replaced(engine, device):
    """Function that answers with a head in the place of the base head."""

    def answer(one, name):
        with LLMInferenceRuntime(engine, device) as runtime:
            if name:
                runtime.set_lm_head_weights(MATRIX, HEADS[name])
            return runtime.handle_request(one)

    return answer


def test_a_request_chooses_its_head_by_name(heads, replaced):
    one, found = request(**WORDS), {}
    for name in ("", *HEADS):
        answer = heads.handle_request(dataclasses.replace(one, lm_head=name))
        assert answer.lm_head == name
        assert_same_answer(answer, replaced(one, name))
        found[tuple(answer.token_ids)] = name
    assert len(found) == 3


def test_requests_of_a_batch_have_their_own_heads(heads):
    batch = [request("stop", lm_head=name, **WORDS) for name in ("second", "base", "first")]
    alone = [heads.handle_request(one) for one in batch]
    for answer, expected in zip(heads.handle_request(batch), alone, strict=True):
        assert_same_answer(answer, expected)


def test_a_head_goes_with_an_adapter(heads, replaced):
    one = request(lora="a", **WORDS)
    answers = heads.handle_request([dataclasses.replace(one, lm_head=name) for name in ("", "first")])
    for answer, name in zip(answers, ("", "first"), strict=True):
        assert (answer.lora, answer.lm_head) == ("a", name)
        assert_same_answer(answer, replaced(one, name))


def test_a_switch_is_for_requests_that_name_no_head_and_base_restores(heads):
    one = request(**WORDS)
    base, first = (heads.handle_request(dataclasses.replace(one, lm_head=name)) for name in ("base", "first"))
    heads.switch_lm_head("first")
    try:
        assert heads.active_lm_head == "first"
        assert_same_answer(heads.handle_request(one), first)
        assert_same_answer(heads.handle_request(dataclasses.replace(one, lm_head="base")), base)
    finally:
        heads.switch_lm_head("base")
    assert heads.active_lm_head == ""
    assert_same_answer(heads.handle_request(one), base)


def test_a_choice_uploads_no_weights(heads, monkeypatch):
    uploaded, device = [], heads.pipeline.device
    upload = type(device).upload

    def watched(target, source):
        uploaded.append(source.nbytes)
        upload(device, target, source)

    monkeypatch.setattr(device, "upload", watched)
    heads.handle_request([request(lm_head=name, **WORDS) for name in ("first", "second", "base")])
    assert 0 < max(uploaded) < HEADS["first"].nbytes


def test_a_prompt_s_stored_rows_serve_all_heads(heads):
    prompt = "a prompt whose KV rows do not depend on the head"
    first = heads.handle_request(request(prompt, lm_head="first", **WORDS))
    second = heads.handle_request(request(prompt, lm_head="second", **WORDS))
    assert first.reused_tokens < second.reused_tokens
    assert first.token_ids != second.token_ids


def test_names_that_do_not_fit_are_refused(heads):
    assert heads.lm_head_names() == ["first", "second"]
    with pytest.raises(ValueError, match="unknown LM head 'third'; added: first, second"):
        heads.handle_request(request(lm_head="third"))
    with pytest.raises(ValueError, match="unknown LM head 'third'; added: first, second"):
        heads.switch_lm_head("third")
    with pytest.raises(ValueError, match="LM head 'first' is there already"):
        heads.add_lm_head("first", HEADS["first"])
    for name in ("", "base", "a b"):
        with pytest.raises(ValueError, match="must consist of letters"):
            heads.add_lm_head(name, HEADS["first"])
    with pytest.raises(ValueError, match="lm_head must be a string, got 5"):
        request(lm_head=5)


def test_weights_that_do_not_fit_are_refused(heads, runtime):
    with pytest.raises(EngineError, match=r"must be \[48, 302\], got \[302, 48\]"):
        heads.add_lm_head("third", HEADS["first"].T)
    with pytest.raises(EngineError, match="an LM head must be an array, got list"):
        heads.add_lm_head("third", [1, 2])
    with pytest.raises(EngineError, match=r"no input for an LM head \(export with lm_head_input\)"):
        runtime.add_lm_head("first", HEADS["first"])
    assert heads.lm_head_names() == ["first", "second"]


def test_a_removed_head_is_gone_and_the_active_one_stays(heads):
    heads.add_lm_head("late", HEADS["first"])
    heads.switch_lm_head("late")
    with pytest.raises(ValueError, match="LM head 'late' is active: switch to another"):
        heads.remove_lm_head("late")
    heads.switch_lm_head("")
    heads.handle_request(request(lm_head="late", **WORDS))
    heads.remove_lm_head("late")
    with pytest.raises(ValueError, match="unknown LM head 'late'"):
        heads.handle_request(request(lm_head="late"))
    with pytest.raises(ValueError, match="the base LM head cannot be removed"):
        heads.remove_lm_head("base")


@pytest.mark.only_on("cuda", "tensorrt-double", reason="the host's arrays are copied")
def test_weights_on_the_device_are_used_in_place(heads, device):
    weights = put(device, HEADS["second"])
    heads.add_lm_head("placed", weights)
    try:
        assert heads.pipeline.runner.lm_heads.apply(heads.pipeline.loras.base, "placed").head is weights
        answers = [heads.handle_request(request(lm_head=name, **WORDS)) for name in ("placed", "second")]
        assert_same_answer(*answers)
        with pytest.raises(EngineError, match="must be float32 on the device, got float16"):
            heads.add_lm_head("half", put(device, HEADS["second"].astype(np.float16)))
    finally:
        heads.remove_lm_head("placed")


def test_weights_on_the_device_replace_the_base_head(engine, device, replaced):
    one = request(**WORDS)
    with LLMInferenceRuntime(engine, device) as runtime:
        weights = put(device, HEADS["first"])
        runtime.set_lm_head_weights(MATRIX, weights)
        device.fill_zero(weights)  # the caller may change its array
        assert_same_answer(runtime.handle_request(one), replaced(one, "first"))


def test_recorded_steps_are_those_of_the_chosen_head(engine, device, heads):
    with opened(engine, device) as runtime:
        runtime.capture_decoding_cuda_graph()
        for _ in range(2):  # the first time records, the second replays
            for name in ("first", "base", "second"):
                one = request(lm_head=name, **WORDS)
                assert_same_answer(runtime.handle_request(one), heads.handle_request(one))
        recorded = runtime.pipeline.vanilla.recorded
        before = len(recorded)
        runtime.remove_lm_head("second")
        assert len(recorded) == before - (on_device.chosen != "cpu")


@pytest.mark.slow
def test_drafted_tokens_are_verified_with_the_chosen_head(engine, device, heads):
    batch = [request("abc abc abc abc", max_tokens=20, lm_head=name) for name in ("second", "", "first")]
    expected = heads.handle_request(batch)
    with opened(engine, device, drafting="lookup") as runtime:
        for answer, one in zip(runtime.handle_request(batch), expected, strict=True):
            assert_same_with_drafting(answer, one)


def test_a_step_of_the_runner_chooses_its_head(heads, device):
    """One step over the same inputs, with a different head each time."""
    runner = heads.pipeline.runner
    heads.handle_request(request(max_tokens=1))
    embeds = put(device, np.random.default_rng(5).standard_normal((2, 1, 48)), np.float32)
    base = runner.loras.base
    found = {}
    for names in (("first", "first"), ("second", "second"), ("base", "base"), ("second", "first")):
        logits = device.empty((2, 1, SHAPE[1]), np.float32)
        adapters = [runner.lm_heads.apply(base, name) for name in names]
        runner.execute_vanilla_decoding_step(embeds, logits, adapters)
        found[names] = device.download(logits)[:, 0]
    assert_same_up_to_rounding(found["second", "first"][0], found["second", "second"][0])
    assert_same_up_to_rounding(found["second", "first"][1], found["first", "first"][1])
    assert np.abs(found["base", "base"] - found["first", "first"]).max() > 0.1
