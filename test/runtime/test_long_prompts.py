# SPDX-License-Identifier: Apache-2.0
"""Prompts longer than one run of the engine are computed in several."""

from __future__ import annotations

import dataclasses
import re
import threading

import numpy as np
import pytest

from edgellm_ros.builder import export
from edgellm_ros.runtime import assemble
from edgellm_ros.runtime.decoding.speculative.drafting_config import SpecDecodeDraftingConfig
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.hybrid_checkpoints import write_nemotron_h_checkpoint, write_qwen3_5_checkpoint
from fixtures.random_head import base_config, write_random_head
from fixtures.requests_for_tests import IMAGE, SOUND, assert_same_answer, request

pytestmark = pytest.mark.only_on("cpu", reason="a GPU gives numbers up to rounding")
SHORT = 48  # tokens of a run
# A fallback goes by times: then rounds, and the last bits of drafted rows, differ from run to run.
LOOKUP = SpecDecodeDraftingConfig(1, 7, 8, "lookup", falls_back=False)
EAGLE = SpecDecodeDraftingConfig(3, 3, 10, falls_back=False)
DRAFTING = [None, LOOKUP, EAGLE]
TEXT = "go to the red box and then turn left at the door "


@pytest.fixture(scope="module")
def head(tiny_checkpoint, tmp_path_factory):
    """A draft head with random weights."""
    return write_random_head(tmp_path_factory.mktemp("head"), base_config(tiny_checkpoint))


@pytest.fixture(scope="module")
def engines(tiny_checkpoint, head, tmp_path_factory):
    """Engines with a draft head: one for whole prompts, one for SHORT tokens a run."""
    root = tmp_path_factory.mktemp("engines")
    for name, tokens in (("whole", 320), ("parts", SHORT)):
        limits = {"max_batch_size": 3, "max_input_len": tokens}
        export(tiny_checkpoint, root / name, draft=head, hidden_state_layers=(1,), **limits)
    return root / "whole", root / "parts"


BATCHES = {
    "one": [request(TEXT * 4, logprobs=3)],
    "image and sound": [request(TEXT * 3, images=(IMAGE,), audio=(SOUND,), action_samples=1)],
    "long and short": [request(TEXT * 5), request("stop"), request(TEXT * 2)],
}


@pytest.mark.parametrize("pads", [False, True], ids=["exact", "padded"])
@pytest.mark.parametrize("drafting", DRAFTING, ids=["off", "lookup", "eagle"])
@pytest.mark.parametrize("batch", BATCHES)
def test_answers_have_the_bits_of_whole_prompts(engines, batch, drafting, pads, monkeypatch):
    monkeypatch.setattr(assemble, "pads_prompts", lambda device: pads)
    with (
        LLMInferenceRuntime(engines[0], drafting=drafting) as whole,
        LLMInferenceRuntime(engines[1], drafting=drafting) as parts,
    ):
        for _ in range(2):  # the second time with reused prefixes
            answers = parts.handle_request(BATCHES[batch])
            assert max(answer.prompt_tokens for answer in answers) > 2 * SHORT
            for found, expected in zip(answers, whole.handle_request(BATCHES[batch]), strict=True):
                assert_same_answer(found, expected)
        rounds = [each.spec_decode_generation_metrics.total_runs for each in (parts, whole)]
        assert rounds[0] == rounds[1]  # the head, too, has seen the same


@pytest.mark.slow
@pytest.mark.parametrize("write", [write_nemotron_h_checkpoint, write_qwen3_5_checkpoint])
def test_a_recurrent_state_goes_from_run_to_run(write, tmp_path):
    checkpoint = write(tmp_path / "checkpoint", 3)
    export(checkpoint, tmp_path / "whole")
    export(checkpoint, tmp_path / "parts", max_input_len=64)  # runs of a whole number of chunks
    one = request(TEXT * 4, logprobs=3)
    with (
        LLMInferenceRuntime(tmp_path / "whole", drafting=None) as whole,
        LLMInferenceRuntime(tmp_path / "parts", drafting=None) as parts,
    ):
        for _ in range(2):
            found, expected = parts.handle_request(one), whole.handle_request(one)
            assert found.prompt_tokens > 2 * 64
            assert found.token_ids == expected.token_ids
            values = [
                [[value for _, value in entry] for entry in each.logprobs] for each in (found, expected)
            ]
            np.testing.assert_allclose(*values, atol=1e-4)


@pytest.mark.parametrize("drafting", DRAFTING, ids=["off", "lookup", "eagle"])
def test_a_cancelled_prompt_ends_after_its_run_and_nothing_of_it_is_stored(engines, drafting):
    with LLMInferenceRuntime(engines[1], drafting=drafting) as runtime:
        cancel, seen, lengths = threading.Event(), [], []
        runtime.pipeline.runner.prefill_executor.observe(
            lambda tensors: lengths.append(tensors["inputs_embeds"].shape[1])
        )

        def listen(progress):
            seen.append((progress.stage, progress.step))
            if progress.step == 1:
                cancel.set()

        one = request(TEXT * 4, output_hidden_states=True)
        answer = runtime.handle_request(dataclasses.replace(one, on_progress=listen, cancel=cancel))
        assert (answer.finish_reason, answer.token_ids, answer.text) == ("cancelled", [], "")
        assert seen == [("prefill", 0), ("prefill", 1)]
        assert len(lengths) == 1  # of more than 4
        again = runtime.handle_request(one)
        assert again.reused_tokens == 0
        with LLMInferenceRuntime(engines[0], drafting=drafting) as whole:
            assert_same_answer(again, whole.handle_request(one))


def test_a_prompt_goes_on_while_another_of_the_batch_is_not_cancelled(engines):
    with LLMInferenceRuntime(engines[1], drafting=None) as runtime:
        cancel = threading.Event()
        listening = {"on_progress": lambda now: now.step == 1 and cancel.set(), "cancel": cancel}
        expected = runtime.handle_request(request(TEXT * 3))
        answers = runtime.handle_request(
            [request(TEXT * 3), dataclasses.replace(request(TEXT * 4), **listening)]
        )
        assert answers[1].finish_reason == "cancelled"
        assert answers[0].token_ids == expected.token_ids


def test_a_prompt_may_fill_the_kv_cache_but_for_one_token(engines):
    with LLMInferenceRuntime(engines[1]) as runtime:
        capacity = runtime.config.max_kv_cache_capacity
        missing = capacity - 1 - len(runtime.pipeline.prepare([request("x")], 0)[0].token_ids)
        full = request("x" * (1 + missing), max_tokens=9)
        answer = runtime.handle_request(full)
        assert (answer.prompt_tokens, len(answer.token_ids)) == (capacity - 1, 1)
        expected = f"the prompt has {capacity} tokens; this engine takes at most {capacity - 1} (max_kv"
        with pytest.raises(ValueError, match=re.escape(expected)):
            runtime.handle_request(request("x" * (2 + missing)))


def test_images_and_sounds_must_fit_in_one_run(engines):
    with LLMInferenceRuntime(engines[1]) as runtime:
        expected = r"the images, videos and sounds of the prompt are \d+ tokens; this engine takes at most 48"
        with pytest.raises(ValueError, match=expected):
            runtime.handle_request(request(images=(IMAGE,) * 8))


def test_hidden_states_are_kept_of_one_run_only(engines):
    with LLMInferenceRuntime(engines[1]) as runtime:
        expected = r"the prompt has \d+ tokens; hidden states are kept of at most 48 \(max_input_len\)"
        with pytest.raises(ValueError, match=expected):
            runtime.handle_request(request(TEXT * 4), output_thinker_embeddings=True)
        assert runtime.handle_request(request("stop"), output_thinker_embeddings=True).text is not None
