# SPDX-License-Identifier: Apache-2.0
"""Results that are not fit for a results file, and the digest of the code."""

from __future__ import annotations

import math
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from edgellm_ros.evaluation.task import code_digest, open_task
from edgellm_ros.fused.plan.tuning import TABLES


@dataclass(frozen=True)
class Given:
    """A task whose result is given."""

    result: Any
    failures: ClassVar = (ArithmeticError,)
    environment: ClassVar = {}
    cores: ClassVar = 1
    gpus: ClassVar = 0

    @contextmanager
    def open(self):
        yield lambda item: {"result": self.result, "measured": {"seconds": 0.5}}


def outcome_of(result: Any) -> dict[str, Any]:
    with ExitStack() as stack:
        return open_task(Given(result), stack)("1")


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({"time": 1.5, "mean_speed": math.nan}, "result.mean_speed is nan, expected a finite number"),
        ({"poses": [(1.0, 2.0), (3.0, -math.inf)]}, "result.poses[1][1] is -inf, expected a finite number"),
    ],
)
def test_an_item_whose_result_has_a_number_that_is_not_finite_fails(result, words):
    assert outcome_of(result) == {"failed": words}


def test_a_finite_result_is_kept():
    result = {"time": 1e300, "first": None, "name": "a", "equal": True, "poses": [(1.0, 2)]}
    assert outcome_of(result) == {"result": result, "measured": {"seconds": 0.5}}


def test_the_code_of_a_result_has_the_sizes_of_the_fused_kernels(tmp_path, monkeypatch):
    package = tmp_path / "results_of_this"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    before = code_digest(package.name)
    for table in TABLES.glob("*.json"):
        (package / table.name).write_text("{}")
    assert code_digest(package.name) != before
