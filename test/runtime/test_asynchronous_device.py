# SPDX-License-Identifier: Apache-2.0
"""A device that runs queued work only when the host waits answers as the CPU does."""

import dataclasses
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from doubles.deferred_runtime import WatchedDevice, queueing
from edgellm_ros.builder import export
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.runtime.grammar.grammar import GrammarMatcher
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.prefix.prefix_cache import PAGE
from fixtures.prefix_requests import REQUESTS
from fixtures.random_requests import cancelled_at, random_request
from fixtures.requests_for_tests import IMAGE, SOUND, assert_same_answer, request
from fixtures.tiny_adapter import write_adapter

pytestmark = pytest.mark.only_on("cpu", reason="these tests bring their own device")


@pytest.fixture(scope="module", autouse=True)
def _queueing():
    with queueing():
        yield


@pytest.fixture(scope="module")
def recording(acting_engine):
    """A runtime on a deferred device whose decode steps are recorded."""
    with LLMInferenceRuntime(acting_engine, WatchedDevice(), prefix_cache_bytes=0) as runtime:
        assert runtime.capture_decoding_cuda_graph() is True
        runtime.pipeline.device.synchronize()
        yield runtime


@pytest.fixture(scope="module")
def plain(acting_engine):
    """A runtime on a deferred device that records nothing."""
    device = WatchedDevice()
    with LLMInferenceRuntime(acting_engine, device, prefix_cache_bytes=0, cuda_graphs=False) as runtime:
        runtime.pipeline.device.synchronize()
        yield runtime


@pytest.fixture(params=["plain", "recording"])
def deferred(request):
    """Each of the two runtimes, with an empty queue and counters at 0."""
    runtime = request.getfixturevalue(request.param)
    device = runtime.pipeline.device
    assert device.waiting() == 0
    device.calls.clear()
    device.host_copies = device.most_host_copies = 0
    return runtime


def test_the_host_does_not_wait_between_the_encoder_and_the_first_token(deferred):
    device, waiting = deferred.pipeline.device, []

    def listen(progress):
        if progress.stage == "prefill":
            waiting.append(device.waiting())

    answer = deferred.handle_request(request(images=(IMAGE,), max_tokens=2, on_progress=listen))
    assert len(waiting) == 1
    assert waiting[0] > 0  # the encoder's work
    assert answer.metrics["vision_s"] > 0


@contextmanager
def evictions(runtime):
    """Collect the committed KV length of each sequence evicted inside the block.

    For sequences with actions the length on the device must be the same.
    """
    pipeline, lengths = runtime.pipeline, []
    evict = pipeline.batch.evict

    def watched(sequences):
        for sequence in sequences:
            cache = pipeline.runner.kv_cache.sequence(pipeline.batch.row_of(sequence))
            lengths.append(sequence.kv_length)
            assert sequence.actions is None or pipeline.device.download(cache.length) == lengths[-1:]
        evict(sequences)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline.batch, "evict", watched)
        yield lengths


def calls(runtime) -> dict[str, int]:
    return dict(runtime.pipeline.device.calls)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_batches_are_answered_as_by_the_cpu(acting_runtime, deferred, seed):
    rng = np.random.default_rng(seed)
    requests = [random_request(rng) for _ in range(8)]
    alone = [acting_runtime.handle_request(make()) for make in requests]
    for _ in range(4):
        chosen = rng.permutation(8)[: rng.integers(1, 5)]
        answers = deferred.handle_request([requests[index]() for index in chosen])
        for index, answer in zip(chosen, answers, strict=True):
            assert_same_answer(answer, alone[index])


def test_progress_is_reported_as_by_the_cpu(acting_runtime, deferred):
    reports = []
    for runtime in (acting_runtime, deferred):
        seen = []
        runtime.handle_request(
            [
                request(images=(IMAGE,), max_tokens=30, action_samples=1, on_progress=seen.append),
                request("what do you see?", max_tokens=9, stop=("a",), on_progress=seen.append),
            ]
        )
        reports.append(seen)
    assert reports[0] == reports[1]


@pytest.mark.slow
def test_prompts_are_reused_as_on_the_cpu(acting_engine, tmp_path):
    answers = []
    for device in ("cpu", WatchedDevice()):
        with LLMInferenceRuntime(acting_engine, device) as runtime:
            runtime.capture_decoding_cuda_graph()
            answers.append([runtime.handle_request(one) for one in (*REQUESTS, *REQUESTS)])
            runtime.save_prefix_cache(tmp_path / "prompts")
        with LLMInferenceRuntime(acting_engine, device) as runtime:
            runtime.load_prefix_cache(tmp_path / "prompts")
            answers[-1] += runtime.handle_request(REQUESTS[:4])
    for one, other in zip(*answers, strict=True):
        assert_same_answer(one, other)
        # padded prompts reuse no less than a page
        assert other.reused_tokens == (one.reused_tokens if one.reused_tokens >= PAGE else 0)
    assert sum(answer.reused_tokens for answer in answers[0]) > 500


def test_adapters_of_one_batch_answer_as_on_the_cpu(tiny_lora_engine, tiny_checkpoint, tmp_path):
    adapters = {name: write_adapter(tmp_path / name, tiny_checkpoint, seed=ord(name), r=4) for name in "ab"}
    batch = [
        request(lora=lora, max_tokens=n, logprobs=2) for lora, n in zip("abba", (5, 9, 3, 7), strict=True)
    ]
    answers = []
    for device in ("cpu", WatchedDevice()):
        with LLMInferenceRuntime(tiny_lora_engine, device, lora_dirs=adapters) as runtime:
            runtime.capture_decoding_cuda_graph()
            answers.append([*runtime.handle_request(batch), runtime.handle_request(batch[2])])
    for one, other in zip(*answers, strict=True):
        assert_same_answer(one, other)


def test_a_step_downloads_only_token_ids_and_uploads_nothing(deferred):
    uploads = []
    device = deferred.pipeline.device

    def watch(progress):
        if progress.stage == "decode":
            uploads.append(device.calls["upload"])

    answer = deferred.handle_request(request(max_tokens=20, repetition_penalty=1.3, on_progress=watch))
    assert len(answer.token_ids) == 20
    assert calls(deferred)["copy_to_host"] == 20
    assert "download" not in calls(deferred)
    assert uploads == [uploads[0]] * 20


def test_log_probabilities_are_downloaded_only_on_request(deferred):
    deferred.handle_request(request(max_tokens=8, repetition_penalty=1.3, logprobs=2))
    assert calls(deferred)["copy_to_host"] == 3 * 8


def test_the_next_step_is_queued_before_the_tokens_of_the_last_are_read(deferred):
    deferred.handle_request(request(max_tokens=12, repetition_penalty=1.3))
    assert deferred.pipeline.device.most_host_copies == 2


def test_masks_are_computed_while_the_device_computes_the_logits(acting_runtime, deferred, monkeypatch):
    waiting, device = [], deferred.pipeline.device
    to_mask = GrammarMatcher.to_mask

    def watch(*arguments):
        waiting.append(device.waiting())
        to_mask(*arguments)

    one = request(regex="[a-z]{20}", max_tokens=12)
    expected = acting_runtime.handle_request(one)
    monkeypatch.setattr(GrammarMatcher, "to_mask", watch)
    assert_same_answer(deferred.handle_request(one), expected)
    assert len(waiting) == 12
    assert all(waiting)
    assert device.most_host_copies == 1


def test_with_a_grammar_the_next_logits_are_computed_while_the_host_reads_a_token(
    acting_runtime, deferred, monkeypatch
):
    waiting, runs, logits = [], [], deferred.pipeline.vanilla.recorded_logits
    accept, queue = GrammarMatcher.accept, logits.queue

    def read(matcher, token):
        waiting.append(deferred.pipeline.device.waiting())
        accept(matcher, token)

    one = request(regex="[a-z]{10}", max_tokens=12)
    expected = acting_runtime.handle_request(one)
    monkeypatch.setattr(GrammarMatcher, "accept", read)
    monkeypatch.setattr(logits, "queue", lambda: runs.append(queue()))
    assert_same_answer(deferred.handle_request(one), expected)
    assert [count > 0 for count in waiting] == [False, *[True] * 9], "the first token is the prefill's"
    assert len(runs) == 10, "no logits are computed after the end that the grammar foresees"


def test_with_a_grammar_logits_that_were_computed_ahead_leave_no_trace(acting_runtime, deferred):
    """Sequences end at different times, by a stop token that no grammar foresees."""
    rules = {"max_tokens": 25, "temperature": 2.0}
    batch = [request(regex="[a-z]{3,20}", seed=seed, **rules) for seed in range(3)]
    batch.append(request(max_tokens=15, repetition_penalty=1.3))
    found = deferred.handle_request(batch)
    for answer, one in zip(found, batch, strict=True):
        assert_same_answer(answer, acting_runtime.handle_request(one))
    assert len({len(answer.token_ids) for answer in found}) > 2


def test_no_step_is_queued_beyond_max_tokens(deferred):
    runs = deferred.generation_metrics.total_runs
    deferred.handle_request(request(max_tokens=6, repetition_penalty=1.3))
    assert deferred.generation_metrics.total_runs == runs + 5
    assert deferred.pipeline.device.waiting() == 0


def test_a_stop_found_after_queueing_costs_one_step(acting_runtime, deferred):
    one = request(images=(IMAGE,), max_tokens=30)  # ends with a stop token
    expected = acting_runtime.handle_request(one)
    runs = deferred.generation_metrics.total_runs
    assert_same_answer(deferred.handle_request(one), expected)
    assert expected.finish_reason == "stop"
    assert deferred.generation_metrics.total_runs == runs + len(expected.token_ids)


def test_rows_written_after_the_end_are_not_committed(acting_runtime, deferred, trigger_index):
    """Ends: a stop token, a stop string, a trajectory, a trajectory at max_tokens."""
    acting = {"images": (IMAGE,), "action_samples": 1}
    rules = {"max_tokens": 15, "repetition_penalty": 1.3}
    stop = acting_runtime.handle_request(request(**rules)).text[4]
    batch = [
        request(images=(IMAGE,), max_tokens=30),
        request(stop=(stop,), **rules),
        request(max_tokens=trigger_index + 1, **acting),
        request(max_tokens=30, **acting),
    ]
    rows = []
    for runtime in (acting_runtime, deferred):
        with evictions(runtime) as lengths:
            answers = runtime.handle_request(batch)
        rows.append(lengths)
    expected = [one.prompt_tokens + len(one.token_ids) - (one.actions is None) for one in answers]
    assert sorted(rows[1]) == sorted(expected)
    assert sorted(rows[0]) == sorted(expected)
    assert [one.finish_reason for one in answers] == ["stop"] * 4


@pytest.mark.slow
@pytest.mark.parametrize("action_samples", [0, 1])
def test_answers_may_fill_the_cache_to_its_last_row(acting_runtime, deferred, action_samples):
    rules = {"max_tokens": 1000, "temperature": 0.3, "repetition_penalty": 1.3, "seed": 4}
    long, short = (
        request("x" * 250, action_samples=action_samples, **rules),
        request("y", stop=("a",), **rules),
    )
    for batch in ([long], [long, short, long]):
        expected = [acting_runtime.handle_request(one) for one in batch]
        for one, other in zip(deferred.handle_request(batch), expected, strict=True):
            assert_same_answer(one, other)
    assert expected[0].finish_reason == "length"
    rows = expected[0].prompt_tokens + len(expected[0].token_ids)
    assert rows == deferred.config.builder.max_kv_cache_capacity


@pytest.mark.slow
def test_a_trajectory_may_be_triggered_in_the_last_row(
    acting_runtime, acting_engine, tiny_checkpoint, tmp_path
):
    one = request(images=(IMAGE,), max_tokens=30, action_samples=2)
    expected = acting_runtime.handle_request(one)
    prompt, tokens = expected.prompt_tokens, len(expected.token_ids)
    export(tiny_checkpoint, tmp_path, max_input_len=prompt, max_kv_cache_capacity=prompt + tokens)
    stops = EngineConfig.load(acting_engine)
    config = EngineConfig.load(tmp_path)
    dataclasses.replace(config, action=stops.action, stop_token_ids=stops.stop_token_ids).save(tmp_path)
    with LLMInferenceRuntime(tmp_path, "cpu") as runtime:
        expected = runtime.handle_request(one)
    assert expected.actions is not None
    for record in (False, True):
        with LLMInferenceRuntime(tmp_path, WatchedDevice(), prefix_cache_bytes=0) as runtime:
            assert not record or runtime.capture_decoding_cuda_graph()
            for answer in runtime.handle_request([one, one]):
                assert_same_answer(answer, expected)


class TestErrors:
    def test_an_error_between_two_steps_does_not_affect_the_next_request(self, acting_runtime, deferred):
        def fail(progress):
            if (progress.stage, progress.step) == ("decode", 3):
                raise RuntimeError("the client is gone")

        endless = request(max_tokens=20, repetition_penalty=1.3)
        batch = [dataclasses.replace(endless, on_progress=fail), endless]
        with pytest.raises(RuntimeError, match="gone"):
            deferred.handle_request(batch)
        assert deferred.pipeline.device.waiting() <= 1  # the cache is cleared
        one = request(images=(IMAGE,), audio=(SOUND,), max_tokens=20, action_samples=1)
        assert_same_answer(deferred.handle_request(one), acting_runtime.handle_request(one))

    def test_non_finite_logits_fail_at_the_token_sampled_from_them(self, acting_runtime, deferred):
        """Logits are NaN from the fourth step on.

        The fifth is queued before the host sees the error.
        """
        pipeline = deferred.pipeline
        device, table = pipeline.device, pipeline.embedder.table
        weights = device.download(table)

        def spoil(progress):
            if (progress.stage, progress.step) == ("decode", 2):  # the third step is queued already
                device.upload(table, np.full_like(weights, np.nan))

        one = request(max_tokens=20, repetition_penalty=1.3)
        with pytest.raises(EngineError, match="not finite at token 4 of the answer"):
            deferred.handle_request([dataclasses.replace(one, on_progress=spoil), one])
        device.upload(table, weights)
        assert_same_answer(deferred.handle_request(one), acting_runtime.handle_request(one))

    def test_non_finite_logits_after_the_end_of_a_sequence_are_ignored(self, acting_runtime, deferred):
        """A stop string ends one sequence; its logits of the step queued by then are NaN."""
        pipeline = deferred.pipeline
        talking, ending = (
            request("what do you see?", max_tokens=9, repetition_penalty=1.3, logprobs=1),
            request(max_tokens=9, repetition_penalty=1.3, temperature=1.0, logprobs=1),
        )
        expected = [acting_runtime.handle_request(one) for one in (talking, ending)]
        third = expected[1].text[:3][-1:]
        ending = dataclasses.replace(ending, sampling=dataclasses.replace(ending.sampling, stop=(third,)))
        expected[1] = acting_runtime.handle_request(ending)
        step = pipeline.sampling.sample

        def spoil_last_row(logits, rows=None):
            if logits.shape[0] == 2 and len(sampled_rows) == len(expected[1].token_ids):
                device = pipeline.device
                device.copy(logits.rows(1, 2), not_finite)
            sampled_rows.append(logits.shape[0])
            step(logits, rows)

        sampled_rows = []
        not_finite = pipeline.device.empty((1, 1, deferred.config.llm.output_vocab_size), np.float32)
        pipeline.device.upload(not_finite, np.full(not_finite.shape, np.nan, np.float32))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipeline.sampling, "sample", spoil_last_row)
            patch.setattr(pipeline.first_tokens.recorded, "active", False)
            patch.setattr(pipeline.method.recorded, "_recorded", {})
            patch.setattr(pipeline.method.recorded, "record_lazily", False)
            answers = deferred.handle_request([talking, ending])
        assert sampled_rows[len(expected[1].token_ids)] == 2
        for one, other in zip(answers, expected, strict=True):
            assert_same_answer(one, other)


def test_a_request_cancelled_between_tokens_keeps_its_tokens(acting_runtime, deferred):
    one = request(max_tokens=20, repetition_penalty=1.3)
    for step in (0, 1, 5):
        expected = acting_runtime.handle_request(cancelled_at(one, "decode", step))
        assert_same_answer(deferred.handle_request(cancelled_at(one, "decode", step)), expected)
        assert len(expected.token_ids) == step + 1


def test_the_time_of_a_stage_includes_the_work_it_queued(deferred, monkeypatch):
    """The vision stage only queues work: the host waits for none of its results."""
    runner = deferred.pipeline.vision
    encode, device = runner.encode, deferred.pipeline.device

    def slow(*arguments):
        encode(*arguments)
        device.queue(lambda: time.sleep(0.3))

    monkeypatch.setattr(runner, "encode", slow)
    metrics = deferred.handle_request(request(images=(IMAGE,), max_tokens=1)).metrics
    assert metrics["vision_s"] > 0.3 > metrics["prefill_s"]


def test_a_request_cancelled_before_it_starts_computes_nothing(deferred):
    cancel = threading.Event()
    cancel.set()
    answer = deferred.handle_request(request(cancel=cancel))
    assert (answer.finish_reason, answer.token_ids) == ("cancelled", [])
    assert calls(deferred) == {"mark": 4, "queued": 4}, "of the times of stages"
