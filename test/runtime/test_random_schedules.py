# SPDX-License-Identifier: Apache-2.0
"""Random schedules of submitted requests: every answer is the one alone.

On a CPU, with drafting, on a hybrid, and on a device that records steps and runs queued work late. More of
them: `pytest --schedules 1000 test/runtime/test_random_schedules.py`.
"""

import pytest

from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.scheduling import rows
from fixtures.random_schedules import Schedule, check, play, request_pool
from fixtures.requests_for_tests import assert_same_bits, assert_same_with_drafting

pytestmark = pytest.mark.only_on("cpu", reason="a GPU gives numbers up to rounding")
POOL = 24


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
def test_answers_are_those_alone(opened, pool, alone, monkeypatch, request, part):
    monkeypatch.setattr(rows, "PART_TOKENS", part)
    for seed in range(request.config.getoption("--schedules")):
        schedule = Schedule.of(seed, len(pool))
        check(schedule, play(opened, schedule, pool), alone)


def play_some(runtime, compare, seeds) -> None:
    pool = request_pool(runtime.config, 16, seed=1)
    alone = [runtime.handle_request(one) for one in pool]
    ended = 0
    for seed in seeds:
        schedule = Schedule.of(seed, len(pool))
        ended += check(schedule, play(runtime, schedule, pool), alone, compare)
    assert ended > 2 * len(seeds)


@pytest.mark.parametrize("drafting", ["lookup", "eagle"])
def test_answers_with_drafting_are_those_alone(acting_draft_engine, device, drafting):
    with LLMInferenceRuntime(acting_draft_engine, device, drafting=drafting) as runtime:
        play_some(runtime, assert_same_with_drafting, range(20, 24))


@pytest.mark.slow
def test_answers_of_a_hybrid_have_the_bits_of_those_alone(tmp_path, device):
    from edgellm_ros.builder import export
    from fixtures.hybrid_checkpoints import write_qwen3_5_checkpoint

    export(write_qwen3_5_checkpoint(tmp_path / "checkpoint", 0), tmp_path / "engine")
    with LLMInferenceRuntime(tmp_path / "engine", device, prefix_cache_bytes=0) as runtime:
        play_some(runtime, assert_same_bits, range(30, 34))


@pytest.mark.slow
@pytest.mark.parametrize("drafting", ["off", "eagle"])
def test_answers_on_a_device_that_runs_late_are_those_alone(acting_draft_engine, drafting):
    from doubles.deferred_runtime import WatchedDevice, queueing

    with (
        queueing(),
        LLMInferenceRuntime(acting_draft_engine, WatchedDevice(), drafting=drafting) as runtime,
    ):
        play_some(runtime, assert_same_with_drafting, range(40, 44))
