# SPDX-License-Identifier: Apache-2.0
"""Random schedules of submitted requests: every answer is the one alone."""

import pytest

from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.scheduling import rows
from fixtures.random_schedules import Schedule, check, play, request_pool

pytestmark = pytest.mark.only_on("cpu", reason="a GPU gives numbers up to rounding")
POOL = 24
SCHEDULES = 12


@pytest.fixture(scope="module")
def engine(tiny_checkpoint, words, trigger_index, tmp_path_factory):
    """An engine with vision, sound, an action head, and the adapters `a` and `b`."""
    from runtime.conftest import triggering

    from edgellm_ros.builder import export
    from fixtures.tiny_adapter import write_adapter

    folder = tmp_path_factory.mktemp("schedules")
    export(tiny_checkpoint, folder / "engine", max_lora_rank=8)
    for seed, name in enumerate("ab"):
        write_adapter(folder / "engine" / "lora" / name, tiny_checkpoint, seed=seed, r=4)
    return triggering(folder / "engine", folder / "acting", words[trigger_index])


@pytest.fixture(scope="module")
def opened(engine, device):
    with LLMInferenceRuntime(engine, device) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def pool(opened):
    return request_pool(opened.config, POOL)


@pytest.fixture(scope="module")
def alone(opened, pool):
    return [opened.handle_request(one) for one in pool]


@pytest.mark.parametrize("part", [256, 24])
@pytest.mark.parametrize("first", range(0, SCHEDULES, 4))
def test_answers_are_those_alone(opened, pool, alone, monkeypatch, first, part):
    monkeypatch.setattr(rows, "PART_TOKENS", part)
    for seed in range(first, first + 4):
        schedule = Schedule.of(seed, len(pool))
        check(schedule, play(opened, schedule, pool), alone)
