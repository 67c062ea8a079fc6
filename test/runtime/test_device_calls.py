# SPDX-License-Identifier: Apache-2.0
"""The calls of the device for a repeated prompt: each costs the host time."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest

from doubles.deferred_runtime import WatchedDevice, queueing
from edgellm_ros.builder import export
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.runtime.decoding.speculative.drafting_config import SpecDecodeDraftingConfig
from edgellm_ros.runtime.engines.draft_engine_runner import DraftEngineRunner
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.prefill import Prefill
from edgellm_ros.runtime.prefix.prefix_cache import PAGE
from fixtures.hybrid_checkpoints import write_qwen3_5_checkpoint
from fixtures.random_head import base_config, write_random_head
from fixtures.requests_for_tests import IMAGE, OTHER_IMAGE, SOUND, assert_same_with_drafting, request

pytestmark = pytest.mark.only_on("cpu", reason="these tests bring their own device")
EAGLE = SpecDecodeDraftingConfig(3, 3, 10, falls_back=False)
LOOKUP = SpecDecodeDraftingConfig(1, 7, 8, "lookup", falls_back=False)
DRAFTING = pytest.mark.parametrize("drafting", [None, EAGLE, LOOKUP], ids=["off", "eagle", "lookup"])
TEXT = "go to the red box and then turn left at the door "


@pytest.fixture(scope="module", autouse=True)
def _queueing():
    with queueing():
        yield


@pytest.fixture(scope="module")
def engine(tiny_checkpoint, tmp_path_factory):
    """An engine with a draft head whose runs have at most 48 tokens."""
    root = tmp_path_factory.mktemp("calls")
    head = write_random_head(root / "head", base_config(tiny_checkpoint))
    export(tiny_checkpoint, root / "engine", draft=head, max_batch_size=3, max_input_len=48)
    return root / "engine"


def calls(runtime: LLMInferenceRuntime, *batch) -> Counter[str]:
    """Answer a batch for the third time; return the device's calls without marks."""
    for _ in range(2):
        runtime.handle_request(list(batch))
    counted = runtime.pipeline.device.calls
    counted.clear()
    runtime.handle_request(list(batch))
    counted["queued"] -= counted.pop("mark")
    return counted


FIRST_TOKEN = request(max_tokens=1)
# lookup drafts from the token ids of the whole prompt, which are an upload of their own
UPLOADS = {None: 1, EAGLE: 1, LOOKUP: 2}
CLOSES = {None: 2, EAGLE: 3, LOOKUP: 2}  # calls that end a row


@DRAFTING
def test_a_repeated_prompt_is_one_upload_and_one_graph_and_its_token_another(engine, drafting):
    with LLMInferenceRuntime(engine, WatchedDevice(), drafting=drafting, prefix_cache_bytes=0) as runtime:
        found = calls(runtime, FIRST_TOKEN)
        uploads = UPLOADS[drafting]
        assert (found["upload"], found["launch"], found["copy_to_host"]) == (uploads, 2, 1)
        of_a_row = 1 + CLOSES[drafting]  # its sampling parameters, its end
        assert found["queued"] == uploads + 2 + 1 + of_a_row


def test_prompts_of_a_batch_differ_by_the_sampling_parameters_of_their_rows(engine):
    with LLMInferenceRuntime(engine, WatchedDevice(), drafting=EAGLE, prefix_cache_bytes=0) as runtime:
        assert calls(runtime, *[FIRST_TOKEN] * 3)["queued"] == 1 + 2 + 1 + 3 * (1 + CLOSES[EAGLE])


def test_a_repetition_penalty_takes_an_upload_of_the_tokens_seen(engine):
    with LLMInferenceRuntime(engine, WatchedDevice(), drafting=EAGLE, prefix_cache_bytes=0) as runtime:
        penalised = request(max_tokens=1, repetition_penalty=1.3)
        assert calls(runtime, penalised)["upload"] == 2


def test_the_states_of_a_hybrid_take_no_calls_of_their_own(tmp_path):
    export(write_qwen3_5_checkpoint(tmp_path / "checkpoint", 3), tmp_path / "engine")
    options = {"drafting": None, "prefix_cache_bytes": 0}
    with LLMInferenceRuntime(tmp_path / "engine", WatchedDevice(), **options) as runtime:
        assert calls(runtime, FIRST_TOKEN)["queued"] == 1 + 2 + 1 + 1 + CLOSES[None]


@pytest.mark.parametrize("drafting", [None, EAGLE], ids=["off", "eagle"])
@pytest.mark.parametrize("pages", [1, 3])
def test_a_prefix_of_any_length_is_stored_with_one_upload(engine, drafting, pages):
    texts = iter([TEXT[letter:] + TEXT * pages for letter in range(2, 9)])
    with LLMInferenceRuntime(engine, WatchedDevice(), drafting=drafting) as runtime:
        device, prefixes = runtime.pipeline.device, runtime.pipeline.prefixes
        for text in (next(texts), next(texts)):
            runtime.handle_request(request(text, max_tokens=1))
        device.calls.clear()
        before = prefixes.used_bytes
        sequences = runtime.pipeline.prepare([request(next(texts), max_tokens=1)], 0)
        runtime.pipeline.reuse.match(sequences)
        runtime.pipeline.prefill(sequences)
        device.calls.clear()
        runtime.pipeline.store_prefixes(sequences)
        assert prefixes.used_bytes - before >= pages * prefixes.page_bytes
        assert device.calls["queued"] == 1 + (1 if drafting is None else 2)
        runtime.pipeline.batch.evict(sequences)


BATCHES = {
    "short": [request("stop", max_tokens=6)],
    "long": [request(TEXT * 4, max_tokens=9, logprobs=2)],
    "image and sound": [request(TEXT * 2, images=(IMAGE,), audio=(SOUND,), max_tokens=9)],
    "long and short": [request(TEXT * 3, max_tokens=9), request("stop", max_tokens=6), request(TEXT)],
    "penalty": [request(TEXT, max_tokens=9, repetition_penalty=1.3), request("stop", max_tokens=9)],
    "another image": [request(TEXT * 2, images=(OTHER_IMAGE,), max_tokens=9)],
}


@DRAFTING
@pytest.mark.parametrize("prefix_cache_bytes", [0, None], ids=["no reuse", "reuse"])
def test_replayed_prompts_are_answered_as_on_the_cpu(engine, drafting, prefix_cache_bytes):
    options = {"drafting": drafting, "prefix_cache_bytes": prefix_cache_bytes}
    order = np.random.default_rng(0)
    with (
        LLMInferenceRuntime(engine, WatchedDevice(), **options) as runtime,
        LLMInferenceRuntime(engine, "cpu", drafting=None, prefix_cache_bytes=0) as plain,
    ):
        expected = {name: [plain.handle_request(one) for one in batch] for name, batch in BATCHES.items()}
        for _ in range(4):
            for name in order.permutation(list(BATCHES)):
                answers = runtime.handle_request(BATCHES[name])
                for found, other in zip(answers, expected[name], strict=True):
                    other = dataclasses.replace(other, reused_tokens=found.reused_tokens)
                    assert_same_with_drafting(found, other)
        assert len(runtime.pipeline.prefills.recorded) > 3


def head_rows(runtime: LLMInferenceRuntime, one) -> list[np.ndarray]:
    """Prefill a prompt; return the draft head's rows of all but its last token."""
    tokens = runtime.handle_request(one).prompt_tokens
    caches = runtime.pipeline.drafter.kv_cache.bindings(range(1))
    rows = [runtime.pipeline.device.download(caches[name]) for name in ("key_cache_0", "value_cache_0")]
    return [each[:, :, : tokens - 1] for each in rows]


@pytest.mark.parametrize("prefix_cache_bytes", [0, None], ids=["no reuse", "reuse"])
def test_replayed_prompts_give_the_draft_head_the_rows_of_the_cpu(engine, prefix_cache_bytes):
    """Prompts in parts, and parts behind a reused prefix, with runs of the same sizes."""
    options = {"drafting": EAGLE, "prefix_cache_bytes": prefix_cache_bytes}
    texts = [TEXT * 4, *(TEXT * 2 + letter * count for letter in "abcd" for count in (30, 90))]
    with (
        LLMInferenceRuntime(engine, WatchedDevice(), **options) as runtime,
        LLMInferenceRuntime(engine, "cpu", **options) as plain,
    ):
        for text in texts * 3:
            one = request(text, max_tokens=1)
            for found, expected in zip(head_rows(runtime, one), head_rows(plain, one), strict=True):
                np.testing.assert_array_equal(found, expected)


def test_prompts_recorded_after_vanilla_steps_give_the_draft_head_their_states(engine):
    states = []
    for begins_with_vanilla_steps in (False, True):
        options = {"drafting": EAGLE, "prefix_cache_bytes": 0, "cuda_graphs": False}
        with LLMInferenceRuntime(engine, WatchedDevice(), **options) as runtime:
            if begins_with_vanilla_steps:
                runtime.handle_request(request(max_tokens=8, disable_spec_decode=True))
            assert runtime.capture_decoding_cuda_graph() is True
            runtime.handle_request(FIRST_TOKEN)
            pipeline = runtime.pipeline
            states.append(pipeline.device.download(pipeline.drafter.drafter._pending.states)[0, 0])
    assert np.abs(states[0]).max() > 0
    np.testing.assert_array_equal(*states)


def test_a_draft_head_that_fails_in_advance_still_drafts(engine, monkeypatch, caplog):
    def fail(runner, *arguments):
        raise EngineError("out of memory")

    def warm_up(prefill, device):
        with monkeypatch.context() as patch:
            patch.setattr(DraftEngineRunner, "execute_prompts", fail)
            original(prefill, device)

    original = Prefill.warm_up
    monkeypatch.setattr(Prefill, "warm_up", warm_up)
    with LLMInferenceRuntime(engine, WatchedDevice(), drafting=EAGLE, prefix_cache_bytes=0) as runtime:
        assert "tokens are not run in advance: out of memory" in caplog.text
        assert not runtime.pipeline.drafter.failed
        runtime.handle_request(request(max_tokens=8))
        assert runtime.spec_decode_generation_metrics.total_runs > 0


def test_a_prefix_is_reused_from_a_page_on(engine):
    """Fewer rows take longer to copy than to compute with the padding."""
    with LLMInferenceRuntime(engine, WatchedDevice(), drafting=EAGLE) as runtime:
        runtime.handle_request(request("stop", max_tokens=1))
        prefixes, key = runtime.pipeline.prefixes, runtime.pipeline.runner.loras.base.key
        sequences = runtime.pipeline.prepare([request("what do you see?", max_tokens=1)], 0)
        assert 0 < prefixes.stored_length(key, sequences[0].token_ids) < PAGE
        assert runtime.handle_request(request("what do you see?", max_tokens=1)).reused_tokens == 0
        runtime.handle_request(request(TEXT * 2, max_tokens=1))
        assert runtime.handle_request(request(TEXT * 2 + "now", max_tokens=1)).reused_tokens >= PAGE
