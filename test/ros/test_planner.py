# SPDX-License-Identifier: Apache-2.0
"""Errors of jobs become outcomes whose message is short and printable."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.ros.node.input_time import StaleInputError
from edgellm_ros.ros.node.planner import Planner
from edgellm_ros.ros.node.worker import ERROR, STALE_INPUT, Job, Outcome


def outcome_of(error: Exception) -> Outcome:
    """The outcome of a job that raises."""

    def fail() -> None:
        raise error

    quiet = SimpleNamespace(
        get_clock=lambda: None, get_logger=lambda: SimpleNamespace(error=lambda text: None)
    )
    return Planner(quiet, None, None, None, None).plan(Job(fail, math.inf, lambda outcome: None))


@pytest.mark.parametrize(
    "error, reason",
    [
        (StaleInputError("old"), STALE_INPUT),
        (ValueError("wrong"), ERROR),
        (FileNotFoundError("missing"), ERROR),
        (EngineError("failed"), ERROR),
    ],
)
def test_an_expected_error_keeps_its_own_words(error, reason):
    assert outcome_of(error) == Outcome(reason, str(error))


def test_an_internal_error_is_cut_and_escaped():
    outcome = outcome_of(RuntimeError("\x1b[31m" + "x" * 1_000_000))
    assert outcome.reason == ERROR
    assert outcome.message.startswith("internal error, see the node's log: RuntimeError: \\x1b[31mxxx")
    assert outcome.message.isprintable()
    assert len(outcome.message) < 400
