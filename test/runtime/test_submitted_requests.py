# SPDX-License-Identifier: Apache-2.0
"""`LLMInferenceRuntime.submit`: the queue, the handle, and the answers."""

import gc
import threading
import time

import pytest

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.prefix import prefix_key
from fixtures.requests_for_tests import IMAGE, assert_same_answer, request

WAIT_S = 60.0
TEXTS = ("go", "stop", "go to the red box", "what do you see?", "")


def test_an_answer_is_that_of_handle_request(runtime):
    one = request(images=(IMAGE,), max_tokens=20, temperature=0.8, seed=3, logprobs=2)
    assert_same_answer(runtime.submit(one).result(WAIT_S), runtime.handle_request(one))


def test_the_pieces_are_the_answer(runtime):
    handle = runtime.submit(request(max_tokens=20, stop=("zzz",)))
    pieces = list(handle)
    response = handle.result(WAIT_S)
    assert len(pieces) > 5
    assert "".join(piece.text for piece in pieces) == response.text
    assert [token for piece in pieces for token in piece.token_ids] == response.token_ids
    assert list(handle) == pieces
    assert handle.done


def test_an_invalid_request_is_refused_at_once(runtime):
    with pytest.raises(ValueError, match="unknown LoRA adapter 'none'"):
        runtime.submit(request(lora="none"))
    with pytest.raises(ValueError, match=r"priority must be an integer from -1000 to 1000, got 1.5"):
        runtime.submit(request(), priority=1.5)
    with pytest.raises(ValueError, match=r"deadline must be a number .*, got 'soon'"):
        runtime.submit(request(), deadline="soon")
    with pytest.raises(ValueError, match=r"submit takes an LLMGenerationRequest, got str"):
        runtime.submit("hello")


def test_a_cancelled_request_ends_with_what_it_has(runtime):
    handle = runtime.submit(request(max_tokens=60))
    first = next(iter(handle))
    handle.cancel()
    response = handle.result(WAIT_S)
    assert response.finish_reason == "cancelled"
    assert response.token_ids[: len(first.token_ids)] == list(first.token_ids)
    assert len(response.token_ids) < 60


def test_a_request_that_is_late_before_it_begins_fails(runtime):
    handle = runtime.submit(request(), deadline=time.monotonic() - 1)
    with pytest.raises(TimeoutError, match="the deadline passed before the request was begun"):
        handle.result(WAIT_S)
    with pytest.raises(TimeoutError, match="the deadline passed"):
        list(handle)


def test_result_waits_no_longer_than_told(runtime):
    go = threading.Event()
    handle = runtime.submit(request(max_tokens=3, on_progress=lambda progress: go.wait(WAIT_S)))
    with pytest.raises(TimeoutError, match=r"the request has not ended within 0.01 s"):
        handle.result(0.01)
    go.set()
    assert handle.result(WAIT_S).finish_reason in ("stop", "length")


def test_an_error_of_the_callback_ends_its_request_only(runtime):
    def fail(progress):
        raise RuntimeError("no screen")

    failing, other = runtime.submit(request(on_progress=fail)), runtime.submit(request())
    with pytest.raises(RuntimeError, match="no screen"):
        failing.result(WAIT_S)
    assert_same_answer(other.result(WAIT_S), runtime.handle_request(request()))


def test_threads_submit_and_ask_at_the_same_time(runtime):
    requests = [request(text, max_tokens=12, temperature=0.8, seed=seed) for seed, text in enumerate(TEXTS)]
    expected = [runtime.handle_request(one) for one in requests]
    wrong: list[BaseException] = []

    def ask(first: int) -> None:
        try:
            for index in range(first, first + 3):
                one = requests[index % len(requests)]
                answer = runtime.handle_request if first % 4 == 0 else runtime.submit
                found = answer(one)
                response = found.result(WAIT_S) if first % 4 else found
                assert_same_answer(response, expected[index % len(requests)])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=ask, args=(first,)) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert not wrong
    assert not runtime.pipeline.batch.sequences


def test_handle_request_waits_for_the_running_answers_only(runtime):
    running = runtime.submit(request(max_tokens=60))
    next(iter(running))
    asked = threading.Event()

    def keep_asking() -> None:
        while not asked.is_set():
            runtime.submit(request(max_tokens=5)).result(WAIT_S)

    client = threading.Thread(target=keep_asking)
    client.start()
    runtime.handle_request(request("stop", max_tokens=5))
    assert running.done
    asked.set()
    client.join(WAIT_S)
    assert not client.is_alive()


def test_the_metrics_have_the_time_in_the_queue(runtime):
    response = runtime.submit(request(max_tokens=5)).result(WAIT_S)
    assert set(response.metrics) == {*runtime.handle_request(request()).metrics, "queued_s"}
    assert 0 < response.metrics["queued_s"] < response.metrics["first_token_s"] < response.metrics["total_s"]


def test_close_ends_open_requests(tiny_engine, device):
    runtime = LLMInferenceRuntime(tiny_engine, device, prefix_cache_bytes=0)
    before = set(threading.enumerate())
    handles = [runtime.submit(request(max_tokens=200)) for _ in range(3)]
    next(iter(handles[0]))
    (own,) = set(threading.enumerate()) - before
    runtime.close()
    for handle in handles:
        assert handle.done
    with pytest.raises(EngineError, match="the runtime is closed"):
        handles[-1].result(WAIT_S)
    with pytest.raises(EngineError, match="the runtime is closed"):
        runtime.submit(request())
    assert not own.is_alive()


def test_images_are_hashed_by_the_thread_that_submits(tiny_engine, device, monkeypatch):
    threads = []
    with LLMInferenceRuntime(tiny_engine, device) as runtime:
        expected = runtime.handle_request(request(images=(IMAGE,)))
        runtime.clear_prefix_cache()
        hashed = prefix_key.content_hash
        monkeypatch.setattr(
            prefix_key, "content_hash", lambda *given: threads.append(threading.get_ident()) or hashed(*given)
        )
        assert_same_answer(runtime.submit(request(images=(IMAGE,))).result(WAIT_S), expected)
    assert set(threads) == {threading.get_ident()}


def test_nothing_of_an_answered_request_is_left_to_collect(runtime):
    def sequences() -> int:
        return sum(isinstance(each, GenerationSequence) for each in gc.get_objects())

    runtime.submit(request(max_tokens=3)).result(60)
    gc.collect()
    gc.disable()
    try:
        before = sequences()
        for _ in range(3):
            runtime.submit(request(max_tokens=3, on_progress=lambda progress: None)).result(60)
        assert sequences() <= before + 1  # the scheduler's thread may not have dropped the last one
    finally:
        gc.enable()
