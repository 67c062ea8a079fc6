# SPDX-License-Identifier: Apache-2.0
"""Rounds of drafting as graphs: which are recorded, replayed, and their answers."""

import dataclasses
import itertools
import logging
import time

import numpy as np
import pytest

from doubles.deferred_runtime import WatchedDevice, queueing, without_warm_up
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.runtime.decoding.speculative.drafting_config import SpecDecodeDraftingConfig
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.random_requests import random_request
from fixtures.requests_for_tests import assert_same_with_drafting, request

pytestmark = pytest.mark.only_on("cpu", reason="these tests bring their own device")
EAGLE = SpecDecodeDraftingConfig(3, 3, 10, falls_back=False)
CHAIN = SpecDecodeDraftingConfig(1, 3, 4, falls_back=False)
ONE_LEVEL = SpecDecodeDraftingConfig(4, 1, 5, falls_back=False)
LOOKUP = SpecDecodeDraftingConfig(1, 7, 8, "lookup", falls_back=False)
TALKING = request("abc abc abc what do you see?", max_tokens=30, repetition_penalty=1.3)
DRAWING = request("stop", temperature=1.2, seed=3, repetition_penalty=1.2, max_tokens=25)
SOME_VANILLA = [True, False, True, True, *[False] * 6, True, *[False] * 3]  # whether a step is a round
REPEATING = request("abc " * 60, max_tokens=1000)  # fills the KV cache


@pytest.fixture(scope="module", autouse=True)
def _queueing():
    with queueing(), without_warm_up():
        yield


@pytest.fixture(scope="module")
def plain(draft_engine):
    """A runtime without drafting on the CPU."""
    with LLMInferenceRuntime(draft_engine, "cpu", prefix_cache_bytes=0) as runtime:
        yield runtime


def open_drafting(engine, drafting, **options):
    """Open a runtime that has recorded nothing yet."""
    options = {"lora_dirs": {}, "prefix_cache_bytes": 0, "cuda_graphs": False, **options}
    return LLMInferenceRuntime(engine, WatchedDevice(), drafting=drafting, **options)


@pytest.fixture(
    scope="module", params=[EAGLE, CHAIN, ONE_LEVEL, LOOKUP], ids=["tree", "chain", "one level", "lookup"]
)
def recorded(draft_engine, request):
    """A runtime whose rounds are recorded."""
    with open_drafting(draft_engine, request.param) as runtime:
        assert runtime.capture_decoding_cuda_graph() is True
        yield runtime


@pytest.fixture(scope="module")
def eagle(draft_engine):
    with open_drafting(draft_engine, EAGLE) as runtime:
        assert runtime.capture_decoding_cuda_graph() is True
        yield runtime


@dataclasses.dataclass
class Used:
    """What answering a batch took on a WatchedDevice."""

    rounds: int
    vanilla_steps: int
    launches: int
    captures: int
    uploads: int
    engine_runs: int  # by the host, not in graphs


def used(runtime, *batch) -> Used:
    metrics, calls = runtime.spec_decode_generation_metrics, runtime.pipeline.device.calls
    before, runs = dataclasses.replace(metrics), []
    calls.clear()
    execute = EngineExecutor.execute
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineExecutor, "execute", lambda *rest: (runs.append(None), execute(*rest)))
        runtime.handle_request(list(batch))
    rounds, steps = metrics.total_runs - before.total_runs, metrics.vanilla_runs - before.vanilla_runs
    return Used(rounds, steps, calls["launch"], calls["capture"], calls["upload"], len(runs))


def assert_same_answers(runtime, plain, *batch) -> None:
    for one, other in zip(runtime.handle_request(list(batch)), map(plain.handle_request, batch), strict=True):
        assert_same_with_drafting(one, other)


def test_rounds_of_every_adapter_and_batch_size_are_recorded(draft_engine):
    with open_drafting(draft_engine, EAGLE, lora_dirs=None) as runtime:
        assert runtime.capture_decoding_cuda_graph() is True
        adapters, sizes = 3, 3  # base, a, b; 1, 2, 4
        assert len(runtime.pipeline.method.recorded) == adapters * sizes
        first_tokens = {"base": (0, 0), "a": (0, 1), "b": (1, 0)}  # recorded in the second batch of two
        for name, (launches, captures) in first_tokens.items():
            one = dataclasses.replace(TALKING, lora=name)
            found = used(runtime, one, one)
            assert (found.launches, found.captures) == (found.rounds + launches, captures)
        runtime.remove_lora("a")
        runtime.handle_request(TALKING)
        assert len(runtime.pipeline.method.recorded) == 2 * sizes


def test_a_recorded_round_is_one_launch_and_nothing_else(recorded):
    for _ in range(3):  # the second prefill is recorded
        prefill = used(recorded, request(TALKING.prompt, max_tokens=1, repetition_penalty=1.3))
    found = used(recorded, TALKING)
    assert found.rounds > 3
    assert (found.vanilla_steps, found.captures) == (0, 0)
    assert found.launches == found.rounds + prefill.launches
    assert found.engine_runs == prefill.engine_runs
    assert found.uploads == prefill.uploads


@pytest.mark.parametrize("seed", range(3))
def test_answers_of_recorded_rounds_are_those_of_vanilla_decoding(recorded, plain, seed):
    rng = np.random.default_rng(seed)
    batch = [random_request(rng)() for _ in range(rng.integers(1, 5))]
    batch = [
        dataclasses.replace(one, lora="base", images=(), audio=(), on_progress=None, cancel=None)
        for one in batch
    ]
    assert_same_answers(recorded, plain, *batch)


def test_a_batch_of_3_whose_sequences_leave_one_by_one_replays_graphs(recorded, plain):
    batch = [request("what do you see?", max_tokens=limit, repetition_penalty=1.3) for limit in (30, 9, 17)]
    recorded.handle_request([DRAWING] * 4)  # leaves tokens and lengths of a sequence in row 3
    found = used(recorded, *batch)
    assert found.launches == found.rounds
    assert_same_answers(recorded, plain, *batch)


def drafts(runtime, *batch) -> list[list[np.ndarray]]:
    """Answer a batch with rounds and vanilla steps; return the drafts of each round.

    The drafts are candidates, tree and path.
    """
    method, device = runtime.pipeline.method, runtime.pipeline.device
    table, rounds = runtime.pipeline.drafter.drafter._table, method._rounds
    queue, kinds, found = method.queue, itertools.cycle(SOME_VANILLA), []

    def watched(room):
        result, rows = queue(room), len(runtime.pipeline.batch)
        if result.most_tokens > 1:
            tensors = *vars(table).values(), *vars(rounds.tree(rows, EAGLE.tree_size)).values(), rounds.path
            found.append([device.download(tensor.rows(0, rows)) for tensor in tensors])
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(method, "_chosen_size", lambda most: most if next(kinds) else 1)
        patch.setattr(method, "queue", watched)
        runtime.handle_request(list(batch))
    return found


def test_rounds_are_recorded_when_the_runtime_is_made(draft_engine, plain):
    with open_drafting(draft_engine, EAGLE, cuda_graphs=True) as runtime:
        found = used(runtime, TALKING)
        assert found.rounds > 3
        assert (found.launches, found.captures) == (found.rounds + found.vanilla_steps, 0)
        assert_same_answers(runtime, plain, TALKING)


class TestMeasuredRounds:
    """The seconds of draft, verification and acceptance on a device with queued work."""

    def test_each_part_is_a_graph_between_marks(self, recorded, plain):
        metrics, pipeline = recorded.spec_decode_generation_metrics, recorded.pipeline
        recorded.measure_rounds()
        pipeline.records_prefills = False
        try:
            first = used(recorded, TALKING)
            assert first.captures == 3  # the first round of all, which is not counted
            assert metrics.timed_runs == first.rounds - 1
            found = used(recorded, TALKING)
            assert found.rounds > 3
            assert found.launches - found.vanilla_steps - 3 * found.rounds in (0, 1)  # 1: the prefill
            assert metrics.timed_runs == first.rounds - 1 + found.rounds
            assert min(metrics.draft_seconds, metrics.verify_seconds, metrics.accept_seconds) > 0
            assert_same_answers(recorded, plain, TALKING)
            assert_same_answers(recorded, plain, DRAWING, TALKING)
        finally:
            recorded.measure_rounds(False)
            pipeline.records_prefills = True

    def test_the_parts_take_what_a_round_takes(self, draft_engine):
        """One part is made slow; its seconds tell, and the others do not."""
        with open_drafting(draft_engine, CHAIN) as runtime:
            device, verified = runtime.pipeline.device, runtime.pipeline.runner.execute_tree_decoding_step

            def slow(*arguments):
                verified(*arguments)
                device.queue(lambda: time.sleep(0.02))

            runtime.pipeline.runner.execute_tree_decoding_step = slow
            runtime.measure_rounds()
            runtime.handle_request(dataclasses.replace(TALKING, sampling=request(max_tokens=4).sampling))
            metrics = runtime.spec_decode_generation_metrics
            assert metrics.verify_seconds > 0.02 * metrics.timed_runs > 0
            assert max(metrics.draft_seconds, metrics.accept_seconds) < metrics.verify_seconds

    def test_nothing_is_measured_unless_a_caller_asks(self, draft_engine):
        with open_drafting(draft_engine, CHAIN) as runtime:
            assert used(runtime, TALKING).rounds > 3
            assert runtime.spec_decode_generation_metrics.timed_runs == 0


def test_recorded_rounds_draft_as_unrecorded_ones(draft_engine, eagle):
    with open_drafting(draft_engine, EAGLE) as unrecorded:
        for batch in ([TALKING], [DRAWING, TALKING]):
            both = drafts(unrecorded, *batch), drafts(eagle, *batch)
            assert len(both[0]) > 4
            for one, other in zip(*both, strict=True):
                for expected, found in zip(one, other, strict=True):
                    np.testing.assert_array_equal(found, expected)
            assert unrecorded.pipeline.device.calls["launch"] == 0


def test_log_probabilities_of_recorded_rounds(recorded, plain):
    batch = [dataclasses.replace(one, logprobs=2) for one in (TALKING, DRAWING)]
    assert_same_answers(recorded, plain, *batch)


def test_recorded_rounds_are_queued_ahead(recorded):
    device = recorded.pipeline.device
    device.host_copies = device.most_host_copies = 0
    recorded.handle_request(TALKING)
    assert device.most_host_copies == 2


def test_smaller_trees_at_the_end_of_the_kv_cache_run_without_a_graph(eagle, plain):
    found = used(eagle, REPEATING)
    assert found.rounds > found.launches - found.vanilla_steps > 0
    assert_same_answers(eagle, plain, REPEATING)


def test_vanilla_steps_between_recorded_rounds(eagle, plain):
    """The head catches up on tokens of vanilla steps; a graph goes on from there."""
    alone = request(TALKING.prompt, max_tokens=1, repetition_penalty=1.3)
    prefill = [used(eagle, alone) for _ in range(3)][-1]  # recorded by now
    with pytest.MonkeyPatch.context() as patch:
        kinds = itertools.cycle(SOME_VANILLA)
        patch.setattr(eagle.pipeline.method, "_chosen_size", lambda most: most if next(kinds) else 1)
        found = used(eagle, TALKING)
        assert min(found.rounds, found.vanilla_steps) > 3
        assert found.launches == prefill.launches + found.rounds + found.vanilla_steps
        assert found.uploads == prefill.uploads
        assert_same_answers(eagle, plain, TALKING)


def test_a_batch_of_different_adapters_runs_rounds_without_a_graph_and_logs_it_once(
    draft_engine, plain, caplog
):
    with open_drafting(draft_engine, EAGLE, lora_dirs=None) as runtime:
        runtime.capture_decoding_cuda_graph()
        batch = [dataclasses.replace(TALKING, lora="a"), TALKING]
        for _ in range(2):
            assert used(runtime, *batch).launches == 0
        assert_same_answers(runtime, plain, *batch)
    assert [record.getMessage() for record in caplog.records] == [
        f"{kind} of 2 sequences with base, a run without a graph: different adapters or LM heads "
        "need one run each"
        for kind in ("rounds of drafting", "decode steps")
    ]


@pytest.mark.parametrize("moment", ["propose", "accepted"])
def test_a_drafter_that_needs_the_host_runs_without_a_graph_and_is_kept(draft_engine, plain, caplog, moment):
    with open_drafting(draft_engine, EAGLE) as runtime:
        pipeline = runtime.pipeline
        eagle, device = pipeline.drafter.drafter, pipeline.device
        own, value = getattr(eagle, moment), device.zeros((1,), np.int64)

        def uploads(*arguments):
            device.upload(value, np.zeros(1, np.int64))
            own(*arguments)

        setattr(eagle, moment, uploads)
        with caplog.at_level(logging.WARNING):
            assert runtime.capture_decoding_cuda_graph() is False
        found = used(runtime, TALKING, DRAWING)
        assert found.rounds > 3
        assert (found.launches, found.captures, found.vanilla_steps) == (0, 0, 0)
        assert_same_answers(runtime, plain, TALKING, DRAWING)
    assert [record.getMessage() for record in caplog.records] == [
        "rounds of drafting of 1 sequence, 2 sequences, 4 sequences run without a graph: "
        "a graph cannot be recorded: it has a copy from host memory"
    ]


def test_a_failed_drafter_leaves_recorded_vanilla_steps(draft_engine, plain):
    with open_drafting(draft_engine, EAGLE) as runtime:
        runtime.pipeline.drafter.failed = True
        assert runtime.capture_decoding_cuda_graph() is True
        assert used(runtime, TALKING).launches == 29
        assert_same_answers(runtime, plain, TALKING)


def test_a_round_is_not_replayed_for_other_bindings(draft_engine, plain):
    """The test moves the states that the head drafts from; the runtime never does."""
    with open_drafting(draft_engine, EAGLE) as runtime:
        runtime.capture_decoding_cuda_graph()
        eagle = runtime.pipeline.drafter.drafter
        eagle._parents = runtime.pipeline.device.zeros(eagle._parents.shape, eagle._parents.dtype)
        found = used(runtime, TALKING)
        assert (found.launches, found.captures) == (found.rounds - 1, 1)
        assert_same_answers(runtime, plain, TALKING)


def test_steps_recorded_for_other_buffers_are_not_replayed(draft_engine, plain):
    one = request("go", max_tokens=8)
    with open_drafting(draft_engine, EAGLE) as runtime:
        assert runtime.capture_decoding_cuda_graph() is True
        trees, vanilla = runtime.pipeline.method, runtime.pipeline.vanilla
        assert min(len(trees.recorded), len(vanilla.recorded)) > 0
        for method in (vanilla, trees):
            runtime.pipeline.use_decode_method(method)
            assert len(method.recorded) == 0
            assert_same_with_drafting(runtime.handle_request(one), plain.handle_request(one))
