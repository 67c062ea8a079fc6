# SPDX-License-Identifier: Apache-2.0
"""What `make test-aarch64` takes for a difference between processors."""

import copy

import pytest

from tools.aarch64.comparison import DifferenceError, compare

ANSWERS = [
    {"text": "no", "token_ids": [5], "finish_reason": "stop", "logprobs": [[[5, -0.5]]], "actions": None},
    {"text": "go", "token_ids": [7, 9], "finish_reason": "stop", "actions": [[[0.5, 0.0]]]},
]


@pytest.fixture
def others() -> list:
    return copy.deepcopy(ANSWERS)


def test_numbers_may_differ_up_to_the_tolerance(others) -> None:
    others[0]["logprobs"][0][0][1] = -0.75
    others[1]["actions"][0][0][1] = 0.125
    assert compare(ANSWERS, others, tolerance=0.25) == {"logprobs": 0.25, "actions": 0.125}
    with pytest.raises(DifferenceError, match=r"answer 0: logprobs differ by 2\.5e-01, more than 1e-01"):
        compare(ANSWERS, others, tolerance=0.1)


def test_another_token_is_a_difference(others) -> None:
    others[1]["token_ids"][1] = 8
    with pytest.raises(DifferenceError, match="answer 1: token 1 is 8 on aarch64, 9 on x86_64"):
        compare(ANSWERS, others, tolerance=1.0)
    del others[1]["token_ids"][1]
    with pytest.raises(DifferenceError, match="answer 1: token 1 is None on aarch64, 9 on x86_64"):
        compare(ANSWERS, others, tolerance=1.0)


@pytest.mark.parametrize("actions", [None, [], [[[0.5]]], [[[0.5, float("nan")]]]])
def test_a_missing_number_is_a_difference(others, actions) -> None:
    others[1]["actions"] = actions
    with pytest.raises(DifferenceError, match="answer 1: actions differ by"):
        compare(ANSWERS, others, tolerance=1.0)


def test_a_missing_answer_and_an_error_are_differences(others) -> None:
    with pytest.raises(DifferenceError, match="1 answers on aarch64, 2 on x86_64"):
        compare(ANSWERS, others[:1], tolerance=1.0)
    others[0] = {"error": "no such adapter"}
    with pytest.raises(DifferenceError, match="answer 0: no such adapter on aarch64"):
        compare(ANSWERS, others, tolerance=1.0)
