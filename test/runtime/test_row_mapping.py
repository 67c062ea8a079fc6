# SPDX-License-Identifier: Apache-2.0
"""Which request each row of a batch is of, and how many steps an answer took."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.requests_for_tests import IMAGE, request


@pytest.fixture(scope="module", params=["off", "eagle"])
def mixed(draft_engine, runtime_device, request):
    """A runtime with the adapters a and b, without drafting and with a draft head."""
    with LLMInferenceRuntime(draft_engine, runtime_device, drafting=request.param) as runtime:
        yield runtime


def mixed_requests() -> list:
    """Return requests with adapters in no order, the third cancelled from the start."""
    cancel = threading.Event()
    cancel.set()
    return [
        request("to the left", lora="b", max_tokens=9),
        request("hello", max_tokens=3),
        request("nothing", lora="a", cancel=cancel),
        request("what do you see?", lora="a", max_tokens=6),
    ]


def test_each_row_is_mapped_to_its_request(mixed, device):
    requests = mixed_requests()
    alone = []
    for one in requests:
        mixed.handle_request(one, output_thinker_embeddings=True)
        alone.append(mixed.base_model_input_token_ids)
    assert alone[2] == []
    assert len({len(ids) for (ids,) in alone[:2] + alone[3:]}) == 3
    answers = mixed.handle_request(requests, output_thinker_embeddings=True)
    assert [answer.finish_reason == "cancelled" for answer in answers] == [False, False, True, False]
    assert mixed.batch_index_mapping == [1, 3, 0]  # the base model, adapter a, adapter b
    states = device.download(mixed.base_model_hidden_states(0))
    table = device.download(mixed.embedding_table)
    assert len(states) == 3
    for row, index in enumerate(mixed.batch_index_mapping):
        (ids,) = alone[index]
        assert mixed.base_model_input_token_ids[row] == ids
        assert len(ids) == answers[index].prompt_tokens
        np.testing.assert_array_equal(states[row, : len(ids)], table[ids])


def test_the_mapping_follows_rows_that_move_up(mixed):
    seen = []
    requests = mixed_requests()
    requests[0] = request(
        "to the left",
        lora="b",
        max_tokens=9,
        on_progress=lambda progress: seen.append(tuple(mixed.pipeline.batch.index_mapping)),
    )
    mixed.handle_request(requests)
    assert list(dict.fromkeys(seen)) == [(), (1, 3, 0), (3, 0), (0,)]
    assert mixed.batch_index_mapping == [1, 3, 0]


def test_a_mapping_is_of_the_last_request(mixed):
    mixed.handle_request([request(lora="b"), request()])
    assert mixed.batch_index_mapping == [1, 0]
    mixed.handle_request(request())
    assert mixed.batch_index_mapping == [0]
    with pytest.raises(ValueError, match="request 1: the prompt has"):
        mixed.handle_request([request(), request("word " * 1000)])
    assert mixed.batch_index_mapping == []


def test_an_answer_tells_its_steps(mixed):
    last = {}

    def limited(count):
        def report(progress):
            if progress.stage == "decode":
                last[count] = progress.step

        return request(max_tokens=count, repetition_penalty=1.3, on_progress=report)

    counts = (3, 10)
    for count, answer in zip(counts, mixed.handle_request([limited(n) for n in counts]), strict=True):
        assert answer.steps == last[count] > 0
        if not mixed.has_draft_model:
            assert answer.steps == len(answer.token_ids) - 1  # the prefill gives the first token


def test_the_step_that_writes_the_trigger_s_row_counts(acting_runtime):
    answer = acting_runtime.handle_request(request(images=(IMAGE,), max_tokens=30, action_samples=1))
    assert answer.actions is not None
    assert answer.steps == len(answer.token_ids)
