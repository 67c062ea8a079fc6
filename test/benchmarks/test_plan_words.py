# SPDX-License-Identifier: Apache-2.0
"""`plan_words.py` and the comparison of engines by `answers.py`, in benchmarks/."""

from __future__ import annotations

import pytest

from benchmarks import answers, plan_words
from edgellm_ros.builder import export
from edgellm_ros.builder.export_cache import ARENA_CHECKPOINT

pytestmark = [pytest.mark.slow, pytest.mark.only_on("cpu", reason="the benchmarks are for a CPU")]


@pytest.fixture(scope="module")
def engines(tmp_path_factory) -> str:
    """The demo's checkpoint in fp32 and with products in 8 bits."""
    folder = tmp_path_factory.mktemp("engines")
    for wanted in (False, True):
        export(ARENA_CHECKPOINT, folder / f"int8-{wanted}", cpu_int8=wanted)
    return f"{folder}/int8-False,{folder}/int8-True"


@pytest.mark.parity
def test_the_words_of_a_plan_have_the_tokens_of_transformers(engines):
    pytest.importorskip("transformers")
    result = plan_words.main(["--engines", engines, "--plans", "2", "--threads", "1"])
    assert [found["equal"] for found in result["engines"].values()] == [2, 2]


def test_answers_of_several_engines_are_compared_with_those_of_the_first(engines):
    result = answers.main(["--engines", engines, "--scenes", "8"])
    first, second = result["engines"].values()
    assert first["same"] == 8
    assert 7 <= second["same"] <= 8
    assert 0 < second["logits"]["relative_error"] < 0.1
    assert "logits" not in first
    assert abs(first["right"] - second["right"]) <= 1
