# SPDX-License-Identifier: Apache-2.0
"""A request admitted into a running batch gets the same answer as alone."""

import pytest

from edgellm_ros.runtime.metrics import StageClock
from fixtures.requests_for_tests import IMAGE, OTHER_IMAGE, assert_same_answer, request

LONG = {"max_tokens": 30, "repetition_penalty": 1.3}
FIRST = [
    request("what do you see?", logprobs=2, **LONG),
    request("stop", temperature=1.1, seed=4, max_tokens=9),
]
LATE = [
    request(images=(OTHER_IMAGE,), temperature=0.9, seed=7, logprobs=1, max_tokens=12),
    request(images=(IMAGE,), action_samples=2, noise_seed=5, max_tokens=30),
]


def run(runtime, first, late):
    """Answer `first`, admit `late` when a sequence has left; return all sequences."""
    pipeline = runtime.pipeline
    waiting, done = [late], []
    sequences = pipeline.prepare(first, 0)
    pipeline.encode_images(sequences)
    pipeline.prefill(sequences)
    while pipeline.batch.sequences:
        ended = pipeline.decode()
        pipeline.finish(ended, StageClock(pipeline.device.mark))
        done += ended
        if waiting:
            assert pipeline.batch.sequences, "the batch is still running"
            admitted = pipeline.preparer.prepare(waiting.pop(), 0)
            pipeline.encode_images(admitted)
            pipeline.prefill(admitted)
    return done


@pytest.fixture
def answers(acting_runtime):
    """Answers to the first and the admitted requests, by the id of the request."""
    from edgellm_ros.runtime.prompt.tool_call_formats import ParsedAnswer
    from edgellm_ros.runtime.response import response_of

    done, answer = run(acting_runtime, FIRST, LATE), ParsedAnswer("")
    return {id(sequence.request): response_of(sequence, {}, answer) for sequence in done}


@pytest.mark.parametrize("one", [*FIRST, *LATE], ids=["running", "leaving", "words", "trajectory"])
def test_an_admitted_request_gets_the_same_bits_as_alone(acting_runtime, answers, one):
    assert_same_answer(answers[id(one)], acting_runtime.handle_request(one))
