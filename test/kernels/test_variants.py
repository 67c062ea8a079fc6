# SPDX-License-Identifier: Apache-2.0
"""The kernels of a step, by number of rows."""

from __future__ import annotations

import threading

import pytest

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.fused.variants import compile_all


def test_plans_are_compiled_at_the_same_time():
    both = threading.Barrier(2, timeout=10)

    def compile(plan: str) -> str:
        both.wait()
        return f"program of {plan}"

    programs = compile_all(compile, {1: "one row", 2: "two rows"})
    assert programs == {1: "program of one row", 2: "program of two rows"}


def test_an_error_of_the_compiler_is_raised():
    def compile(plan: str) -> str:
        if plan == "two rows":
            raise EngineError("line 7: expected an expression")
        return plan

    with pytest.raises(EngineError, match="line 7"):
        compile_all(compile, {1: "one row", 2: "two rows"})
