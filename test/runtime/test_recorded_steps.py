# SPDX-License-Identifier: Apache-2.0
"""Decode steps as graphs: which are recorded, are replayed, cannot be recorded.

Most tests switch off what is recorded when the runtime is made, and record with the explicit call. Prompts
are not run in advance (test_prompt_buckets.py), so that the graphs that a test counts are of steps.
"""

import logging
import re

import numpy as np
import pytest

from doubles.deferred_runtime import WatchedDevice, queueing, used, without_warm_up
from edgellm_ros.builder import export
from edgellm_ros.engine.errors import DeviceLostError, DeviceMemoryError, EngineError
from edgellm_ros.runtime.batch.input_embedder import InputEmbedder
from edgellm_ros.runtime.decoding.recorded_steps import batch_sizes
from edgellm_ros.runtime.decoding.vanilla import VanillaStep
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.requests_for_tests import assert_same_answer, request
from fixtures.tiny_adapter import write_adapter

pytestmark = pytest.mark.only_on("cpu", reason="these tests bring their own device")
TOKENS = 12
WORDS = {"max_tokens": TOKENS, "repetition_penalty": 1.3}


@pytest.fixture(scope="module", autouse=True)
def _queueing():
    with queueing(), without_warm_up():
        yield


@pytest.fixture(scope="module")
def engine(tiny_checkpoint, tmp_path_factory):
    """An engine for two sequences with LoRA inputs and the LM head as an input."""
    directory = tmp_path_factory.mktemp("engine")
    export(tiny_checkpoint, directory, max_batch_size=2, max_lora_rank=8, lm_head_input=True)
    for name in "ab":
        write_adapter(directory / "lora" / name, tiny_checkpoint, seed=ord(name), r=4)
    return directory


@pytest.fixture(scope="module")
def on_cpu(engine):
    with LLMInferenceRuntime(engine, "cpu", prefix_cache_bytes=0) as runtime:
        yield runtime


@pytest.fixture
def runtime(engine):
    """A runtime that has recorded nothing yet."""
    with open_runtime(engine, cuda_graphs=False) as runtime:
        yield runtime


def open_runtime(engine, device=None, lora_dirs=None, **options):
    """Open a runtime on a WatchedDevice, without adapters and prefix reuse."""
    device = WatchedDevice() if device is None else device
    return LLMInferenceRuntime(engine, device, lora_dirs=lora_dirs or {}, prefix_cache_bytes=0, **options)


def test_a_plain_request_replays_the_steps_recorded_when_the_runtime_was_made(engine, on_cpu):
    with open_runtime(engine) as runtime:
        assert runtime.pipeline.device.calls["capture"] == 2  # batches of 1 and 2
        assert used(runtime, request(**WORDS)) == (TOKENS - 1, 0)
        assert used(runtime, request(**WORDS), request(**WORDS)) == (TOKENS - 1, 0)
        assert_same_answer(runtime.handle_request(request(**WORDS)), on_cpu.handle_request(request(**WORDS)))


def test_steps_with_the_constructors_adapters_are_recorded_with_the_runtime(engine):
    with open_runtime(engine, lora_dirs={"a": engine / "lora" / "a"}) as runtime:
        assert runtime.pipeline.device.calls["capture"] == 2 * 2
        assert used(runtime, request(lora="a", **WORDS)) == (TOKENS - 1, 0)


def test_without_cuda_graphs_nothing_is_recorded(tiny_engine):
    """Decode steps, prefills, the encoder and the action head all run unrecorded."""
    picture = np.full((64, 64, 3), 90, np.uint8)
    one = request(images=(picture,), action_samples=1, **WORDS)
    for graphs, recorded in ((False, False), (True, True)):
        with open_runtime(tiny_engine, cuda_graphs=graphs) as runtime:
            found = [used(runtime, one) for _ in range(3)]
            assert any(captures for _, captures in found) is recorded
            assert (sum(launches for launches, _ in found) > 0) is recorded


def test_steps_that_cannot_be_recorded_do_not_keep_the_runtime_from_answering(engine, on_cpu, caplog):
    with open_runtime(engine, Refusing(EngineError("a library copies"))) as runtime:
        assert_same_answer(runtime.handle_request(request(**WORDS)), on_cpu.handle_request(request(**WORDS)))
    expected = "decode steps of 1 sequence, 2 sequences run without a graph: a library copies"
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [(logging.WARNING, expected)]


def test_the_runtime_answers_after_a_step_that_failed_while_steps_were_recorded(
    engine, on_cpu, caplog, monkeypatch
):
    """As the largest batch does where the device has no memory for it."""
    embed = InputEmbedder.embed_tokens

    def embed_one(embedder, tokens):
        if tokens.shape[0] > 1:
            raise DeviceMemoryError("none left")
        return embed(embedder, tokens)

    with monkeypatch.context() as patch:
        patch.setattr(InputEmbedder, "embed_tokens", embed_one)
        runtime = open_runtime(engine)
    with runtime:
        assert used(runtime, request(**WORDS)) == (TOKENS - 1, 0)
        both = [request(**WORDS), request("stop", **WORDS)]
        for answer, one in zip(runtime.handle_request(both), both, strict=True):
            assert_same_answer(answer, on_cpu.handle_request(one))
    expected = "decoding goes on with the graphs recorded so far: a step failed: none left"
    assert [r.getMessage() for r in caplog.records] == [expected]


def test_nothing_runs_when_a_runtime_is_made_on_a_cpu(engine, monkeypatch):
    ran = []
    monkeypatch.setattr(VanillaStep, "run", lambda step: ran.append("step"))
    with open_runtime(engine, "cpu") as runtime:
        assert runtime.capture_decoding_cuda_graph() is False
    assert not ran


def test_steps_of_every_batch_size_and_adapter_are_recorded_and_replayed(runtime, engine):
    runtime.add_lora("a", engine / "lora" / "a")
    assert runtime.capture_decoding_cuda_graph() is True
    assert runtime.pipeline.device.calls["capture"] == 2 * 2
    for batch, captures in (([""], 0), (["a"], 1), (["", ""], 0), (["a", "a"], 1)):  # second first tokens
        assert used(runtime, *(request(lora=name, **WORDS) for name in batch)) == (TOKENS - 1, captures)


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])],
)
def test_batch_sizes_are_powers_of_two_and_the_largest_batch(largest, sizes):
    assert batch_sizes(largest) == sizes


def test_a_batch_of_3_replays_the_graph_of_4(tiny_engine):
    batch = [request(prompt, **WORDS) for prompt in ("stop", "what do you see?", "turn left", "go back")]
    with (
        LLMInferenceRuntime(tiny_engine, WatchedDevice(), prefix_cache_bytes=0) as runtime,
        LLMInferenceRuntime(tiny_engine, "cpu", prefix_cache_bytes=0) as on_cpu,
    ):
        assert runtime.config.builder.max_batch_size == 4
        runtime.capture_decoding_cuda_graph()
        assert runtime.pipeline.device.calls["capture"] == 3
        runtime.handle_request(batch)  # leaves tokens and lengths of a sequence in row 3
        assert used(runtime, *batch[:3]) == (TOKENS - 1, 0)
        answers = runtime.handle_request(batch[:3])
        for answer, one in zip(answers, batch[:3], strict=True):
            assert_same_answer(answer, on_cpu.handle_request(one))


def test_with_a_grammar_steps_are_recorded_up_to_the_logits_when_they_first_run(runtime, on_cpu):
    runtime.capture_decoding_cuda_graph()
    one = request(regex="[a-z]{20}", max_tokens=TOKENS)
    assert used(runtime, one) == (TOKENS - 2, 1)
    assert used(runtime, one) == (TOKENS - 1, 2)  # the second prefill and first token
    assert used(runtime, one, request(**WORDS)) == (TOKENS - 2, 1)
    answers = runtime.handle_request([one, request(**WORDS)])
    for answer, alone in zip(answers, (one, request(**WORDS)), strict=True):
        assert_same_answer(answer, on_cpu.handle_request(alone))
    assert used(runtime, *[request(**WORDS)] * 2) == (TOKENS + 1, 0)  # with prefill and first tokens


def test_a_batch_of_3_with_a_grammar_replays_the_graph_of_4(tiny_engine):
    rules = ({"regex": "[a-z]{20}"}, {"repetition_penalty": 1.3}, {"choices": ["left" * 9]}, {})
    batch = [request(max_tokens=TOKENS, **rule) for rule in rules]
    with (
        LLMInferenceRuntime(tiny_engine, WatchedDevice(), prefix_cache_bytes=0) as runtime,
        LLMInferenceRuntime(tiny_engine, "cpu", prefix_cache_bytes=0) as on_cpu,
    ):
        runtime.capture_decoding_cuda_graph()
        runtime.handle_request(batch)  # leaves tokens and lengths of a sequence in row 3
        assert used(runtime, *batch[:3]) == (TOKENS - 1, 0)
        answers = runtime.handle_request(batch[:3])
        for answer, one in zip(answers, batch[:3], strict=True):
            assert_same_answer(answer, on_cpu.handle_request(one))


def test_capture_logs_count_batch_sizes_seconds_and_memory_in_one_line(runtime, monkeypatch, caplog):
    free = iter([50_000_000, 8_000_000, 8_000_000])
    monkeypatch.setattr(runtime.pipeline.device, "memory_info", lambda: (next(free), 100_000_000))
    with caplog.at_level(logging.INFO, "edgellm_ros"):
        runtime.capture_decoding_cuda_graph()
        runtime.capture_decoding_cuda_graph()  # records nothing more
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    expected = r"recorded 2 graphs of decode steps \(batch sizes 1, 2, 1 adapters\) in \d+\.\d s, 42 MB"
    assert re.fullmatch(expected, record.getMessage())


def test_nothing_is_recorded_before_capture(runtime):
    for _ in range(3):
        assert used(runtime, request(**WORDS)) == (0, 0)


def test_a_second_capture_records_only_new_steps(runtime, engine):
    runtime.capture_decoding_cuda_graph()
    runtime.add_lora("a", engine / "lora" / "a")
    assert runtime.capture_decoding_cuda_graph() is True
    assert runtime.pipeline.device.calls["capture"] == 2 + 2


def test_a_step_of_an_adapter_loaded_later_is_recorded_after_its_first_run(runtime, on_cpu, engine):
    runtime.capture_decoding_cuda_graph()
    runtime.add_lora("b", engine / "lora" / "b")
    one = request(lora="b", **WORDS)
    assert used(runtime, one) == (TOKENS - 2, 1)
    assert used(runtime, one) == (TOKENS - 1, 2)  # the second prefill and first token
    assert_same_answer(runtime.handle_request(one), on_cpu.handle_request(one))


def test_a_graph_is_not_replayed_for_other_bindings(runtime, engine):
    """The test moves the LM head, which the runtime never does.

    A replay would read the old one.
    """
    runtime.capture_decoding_cuda_graph()
    one = request(**WORDS)
    runner = runtime.pipeline.runner
    moved = runtime.pipeline.device.empty((48, 302), np.float32)
    weights = np.random.default_rng(0).standard_normal((48, 302)).astype(np.float32)
    runtime.pipeline.device.upload(moved, weights)
    runner._runs.shared["lm_head.weight"] = moved
    assert used(runtime, one) == (TOKENS - 2, 1)  # the first step of the new binding is not a replay
    assert used(runtime, one) == (TOKENS - 1, 2)  # the second prefill and first token
    with LLMInferenceRuntime(engine, "cpu", lora_dirs={}) as other:
        other.set_lm_head_weights("lm_head.weight", weights)
        assert_same_answer(runtime.handle_request(one), other.handle_request(one))


def test_recorded_steps_use_a_replaced_lm_head(runtime, engine):
    runtime.capture_decoding_cuda_graph()
    one = request(**WORDS)
    before = runtime.handle_request(one)
    weights = np.random.default_rng(0).standard_normal((48, 302)).astype(np.float32)
    runtime.set_lm_head_weights("lm_head.weight", weights)
    assert used(runtime, one) == (TOKENS - 1, 2)  # the second prefill and first token
    with LLMInferenceRuntime(engine, "cpu", lora_dirs={}) as other:
        other.set_lm_head_weights("lm_head.weight", weights)
        expected = other.handle_request(one)
    answer = runtime.handle_request(one)
    assert_same_answer(answer, expected)
    assert answer.token_ids != before.token_ids


def test_a_prefill_is_recorded_when_a_prompt_of_its_bucket_runs_again(runtime, on_cpu):
    runtime.capture_decoding_cuda_graph()
    first, near, longer = (request(prompt, **WORDS) for prompt in ("go left", "go to the left", "go " * 20))
    steps = TOKENS - 1
    found = [used(runtime, one) for one in (first, longer, near, first, longer, longer)]
    # the second first token is recorded, too
    assert found[:3] == [(steps, 0), (steps, 1), (1 + steps, 1)]
    assert found[3:] == [(2 + steps, 0), (1 + steps, 1), (2 + steps, 0)]
    for one in (longer, first, near):
        assert_same_answer(runtime.handle_request(one), on_cpu.handle_request(one))


def test_prompts_of_a_batch_are_recorded_together(runtime, on_cpu):
    runtime.capture_decoding_cuda_graph()
    batch = [request(prompt, **WORDS) for prompt in ("go left", "go back")]
    steps = TOKENS - 1
    assert [used(runtime, *batch) for _ in range(3)] == [(steps, 0), (steps, 2), (2 + steps, 0)]
    for answer, one in zip(runtime.handle_request(batch), batch, strict=True):
        assert_same_answer(answer, on_cpu.handle_request(one))


def test_a_batch_of_different_adapters_runs_without_a_graph_and_logs_it_once(runtime, on_cpu, engine, caplog):
    runtime.add_lora("a", engine / "lora" / "a")
    runtime.capture_decoding_cuda_graph()
    batch = [request(lora="a", **WORDS), request(**WORDS)]
    prefills = [used(runtime, *batch) for _ in range(3)]  # the prefill of both, and the first tokens
    assert prefills == [(0, 0), (0, 2), (2, 0)]
    for answer, one in zip(runtime.handle_request(batch), batch, strict=True):
        assert_same_answer(answer, on_cpu.handle_request(one))
    assert [record.getMessage() for record in caplog.records] == [
        "decode steps of 2 sequences with base, a run without a graph: different adapters or LM heads "
        "need one run each"
    ]


def test_graphs_of_a_removed_adapter_are_dropped(runtime, engine):
    runtime.add_lora("a", engine / "lora" / "a")
    runtime.capture_decoding_cuda_graph()
    recorded = runtime.pipeline.method.recorded
    prefills = [request(**WORDS), request(lora="a", **WORDS)]
    for one in prefills * 2:
        runtime.handle_request(one)
    assert (len(recorded), len(runtime.pipeline.prefills.recorded)) == (4, 2)
    runtime.remove_lora("a")
    runtime.handle_request(request(**WORDS))
    assert (len(recorded), len(runtime.pipeline.prefills.recorded)) == (2, 1)


class Refusing(WatchedDevice):
    """A device that records the first `allowed` graphs and then raises `error`."""

    def __init__(self, error: EngineError, allowed: int = 0) -> None:
        super().__init__()
        self.error, self.allowed = error, allowed

    def capture(self, record):
        if self.calls["capture"] < self.allowed:
            return super().capture(record)
        self.calls["refused"] += 1
        raise self.error


@pytest.mark.parametrize("error", [EngineError("a library copies"), DeviceMemoryError("none left")])
def test_steps_that_cannot_be_recorded_run_without_a_graph_and_log_why_once(engine, on_cpu, caplog, error):
    device = Refusing(error)
    with open_runtime(engine, device, cuda_graphs=False) as runtime:
        assert runtime.capture_decoding_cuda_graph() is False
        for one in [request(**WORDS), request("stop", **WORDS)]:
            assert_same_answer(runtime.handle_request(one), on_cpu.handle_request(one))
    assert device.calls["refused"] == 2  # batches of 1 and 2, once each
    expected = f"decode steps of 1 sequence, 2 sequences run without a graph: {error}"
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [(logging.WARNING, expected)]


def test_steps_recorded_before_an_error_are_replayed(engine):
    device = Refusing(DeviceMemoryError("none left"), allowed=1)
    with open_runtime(engine, device, cuda_graphs=False) as runtime:
        assert runtime.capture_decoding_cuda_graph() is False
        assert used(runtime, request(**WORDS)) == (TOKENS - 1, 0)
        assert used(runtime, request(**WORDS), request(**WORDS)) == (0, 0)


def test_a_device_lost_during_recording_is_an_error(engine):
    with (
        open_runtime(engine, Refusing(DeviceLostError("gone")), cuda_graphs=False) as runtime,
        pytest.raises(DeviceLostError, match="gone"),
    ):
        runtime.capture_decoding_cuda_graph()


class RefusingSome(WatchedDevice):
    """A device that refuses the graphs whose numbers are in `refused`, counted from 1."""

    refused = range(0)

    def capture(self, record):
        self.calls["tried"] += 1
        if self.calls["tried"] in self.refused:
            raise EngineError("a library copies")
        return super().capture(record)


def test_a_step_that_cannot_be_recorded_does_not_keep_others_from_being_recorded(engine, caplog):
    device = RefusingSome()
    device.refused = range(3, 5)  # those of the first adapter: the base model's two steps come first
    folders = {name: engine / "lora" / name for name in "ab"}
    with open_runtime(engine, device, folders) as runtime:
        assert device.calls["capture"] == 4
        assert used(runtime, request(**WORDS)) == (TOKENS - 1, 0)
        assert used(runtime, request(lora="a", **WORDS)) == (0, 0)  # and is not tried again
        assert used(runtime, request(lora="b", **WORDS)) == (TOKENS - 1, 0)
    assert [record.getMessage() for record in caplog.records] == [
        "decode steps of 1 sequence with a, 2 sequences with a run without a graph: a library copies"
    ]


def test_capture_on_a_device_without_graphs_changes_and_logs_nothing(on_cpu, caplog):
    one = request(**WORDS)
    before = on_cpu.handle_request(one)
    assert on_cpu.capture_decoding_cuda_graph() is False
    assert_same_answer(on_cpu.handle_request(one), before)
    assert not caplog.records
