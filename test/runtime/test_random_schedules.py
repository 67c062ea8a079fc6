# SPDX-License-Identifier: Apache-2.0
"""Random schedules of submitted requests: every answer is the one alone.

With drafting, on a hybrid, and on a device that records steps and runs queued work late; bit by bit on a CPU,
up to rounding on a GPU. More of them: `pytest --schedules 1000 test/runtime/test_random_schedules.py`.
"""

import numpy as np
import pytest

from doubles.played_encoder import PlayedEncoder
from edgellm_ros.runtime import prefix_reuse
from edgellm_ros.runtime.decoding.speculative.drafting_config import SpecDecodeDraftingConfig
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.scheduling import rows
from edgellm_ros.runtime.scheduling.claims import Claims
from fixtures import dflash_checkpoints, mtp_checkpoints
from fixtures.drafted_chains import DFLASH, MTP
from fixtures.hybrid_checkpoints import write_nemotron_h_checkpoint, write_qwen3_5_checkpoint
from fixtures.random_schedules import Schedule, check, play, request_pool
from fixtures.requests_for_tests import assert_same_answer, assert_same_with_drafting
from fixtures.watched_drafts import WatchedDrafts

pytestmark = pytest.mark.only_on("cpu", "cuda", reason="the double of TensorRT has the turns of a GPU")
on_the_host = pytest.mark.only_on("cpu", reason="reads and replaces what a CPU computes")
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


@on_the_host
def test_answers_with_encoders_beside_the_steps_are_those_alone(opened, pool, alone, request):
    interrupted = beside = 0
    for seed in seeds_from(100, request, least=12):
        schedule, encoder = Schedule.of(seed, len(pool)), PlayedEncoder(seed)
        opened.clear_prefix_cache()  # which has all images: nothing would be encoded
        check(schedule, play(opened, schedule, pool, encoder), alone)
        interrupted, beside = interrupted + encoder.interrupted, beside + encoder.beside
    assert beside > 60
    assert interrupted > 0


def parts_of(monkeypatch, tokens: int) -> None:
    """Compute prompts in parts of so many tokens; those of hybrids also alone."""
    for module in (rows, prefix_reuse):
        monkeypatch.setattr(module, "PART_TOKENS", tokens)


def play_some(runtime, compare, seeds) -> None:
    device = runtime.pipeline.device
    pool = request_pool(runtime.config, 16, seed=1)
    alone = [runtime.handle_request(one) for one in pool]
    assert max(answer.prompt_tokens for answer in alone) > 3 * rows.PART_TOKENS
    ended = 0
    with pytest.MonkeyPatch.context() as patch:
        for seed in seeds:
            schedule, encoder = Schedule.of(seed, len(pool)), None
            patch.setattr(device, "short_parts", seed % 3 > 0)
            if device.runs_beside and seed % 2:
                encoder = PlayedEncoder(seed)
                runtime.clear_prefix_cache()
            ended += check(schedule, play(runtime, schedule, pool, encoder), alone, compare)
    assert ended > 2 * len(seeds)


def seeds_from(first: int, request, least: int = 4) -> range:
    """Return seeds of schedules, at least so many."""
    return range(first, first + max(least, request.config.getoption("--schedules") // 4))


@pytest.mark.parametrize("drafting", ["lookup", "eagle"])
def test_answers_with_drafting_are_those_alone(acting_draft_engine, device, drafting, monkeypatch, request):
    parts_of(monkeypatch, 24)
    with LLMInferenceRuntime(acting_draft_engine, device, drafting=drafting) as runtime:
        play_some(runtime, assert_same_with_drafting, seeds_from(20, request))


@pytest.fixture(params=["eagle", "mtp", "dflash", "hybrid-mtp"])
def head(request, tmp_path):
    """An engine with a draft head, and a configuration that drafts chains with it."""
    from edgellm_ros.builder import export

    if request.param == "eagle":
        return request.getfixturevalue("acting_draft_engine"), SpecDecodeDraftingConfig(
            1, 3, 4, falls_back=False
        )
    write, config = {
        "mtp": (mtp_checkpoints.write_mimo, MTP),
        "dflash": (dflash_checkpoints.write_qwen3_with_drafter, DFLASH),
        "hybrid-mtp": (mtp_checkpoints.write_qwen3_5_with_head, MTP),
    }[request.param]
    export(write(tmp_path / "checkpoint", 2), tmp_path / "engine")
    return tmp_path / "engine", config


@pytest.fixture
def random_pauses(monkeypatch):
    """Pause any rows for a turn, also one between others in a full batch."""
    rng, may_run = np.random.default_rng(0), Claims.may_run
    monkeypatch.setattr(Claims, "may_run", lambda *given: rng.random() < 0.8 and may_run(*given))


@on_the_host
@pytest.mark.slow
def test_a_head_drafts_what_it_drafts_alone(head, device, random_pauses, monkeypatch, request):
    parts_of(monkeypatch, 24)
    engine, config = head
    with LLMInferenceRuntime(engine, device, drafting=config, prefix_cache_bytes=0) as runtime:
        pool, drafts = request_pool(runtime.config, 16, seed=1), WatchedDrafts(runtime, config)
        alone = drafts.alone(pool)
        for seed in seeds_from(60, request, least=8):
            schedule = Schedule.of(seed, len(pool))
            with drafts.some_steps_vanilla(seed):
                entries = play(runtime, schedule, pool)
            check(schedule, entries, alone, assert_same_with_drafting)
        assert drafts.check() > 100
        assert drafts.held > 0
        assert runtime.scheduling_metrics.paused > 0
        assert not runtime.pipeline.drafter.failed


@pytest.mark.slow
@pytest.mark.parametrize("write", [write_qwen3_5_checkpoint, write_nemotron_h_checkpoint])
def test_answers_of_a_hybrid_are_those_alone(tmp_path, device, write, monkeypatch, request):
    from edgellm_ros.builder import export

    parts_of(monkeypatch, 40)
    export(write(tmp_path / "checkpoint", 0), tmp_path / "engine")
    with LLMInferenceRuntime(tmp_path / "engine", device, prefix_cache_bytes=0) as runtime:
        play_some(runtime, assert_same_answer, seeds_from(30, request))


@on_the_host
@pytest.mark.slow
@pytest.mark.parametrize("drafting", ["off", "eagle"])
def test_answers_on_a_device_that_runs_late_are_those_alone(
    acting_draft_engine, drafting, monkeypatch, request
):
    from doubles.deferred_runtime import WatchedDevice, queueing

    parts_of(monkeypatch, 24)
    begun, begin = [], rows.Rows._begin
    monkeypatch.setattr(
        rows.Rows, "_begin", lambda *given, **named: begun.append(named) or begin(*given, **named)
    )
    with (
        queueing(),
        LLMInferenceRuntime(acting_draft_engine, WatchedDevice(), drafting=drafting) as runtime,
    ):
        play_some(runtime, assert_same_with_drafting, seeds_from(40, request))
    assert 0.1 < sum(map(bool, begun)) / len(begun) < 0.9  # behind a step
