# SPDX-License-Identifier: Apache-2.0
"""The engine of a fleet: opened once, shared, closed with the last node."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from rclpy.logging import get_logger

from edgellm_ros.builder import export
from edgellm_ros.engine.errors import DeviceLostError, EngineError
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.ros.fleet import engine as engine_module
from edgellm_ros.ros.fleet.engine import OF_ENGINE, FleetEngine
from edgellm_ros.ros.node.engine_checks import plans_at_once
from edgellm_ros.ros.node.settings.parameters import SPECS
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.qwen3_asr_checkpoint import ORIGINAL, write_qwen3_asr
from fixtures.reference_inputs import make_sound
from fixtures.requests_for_tests import request
from fixtures.tiny_adapter import write_adapter

LOGGER = get_logger("test")


def parameters_of(engine, **changes) -> SimpleNamespace:
    """Make the parameters of a node."""
    defaults = {name: spec.default for name, spec in SPECS.items() if "." not in name}
    return SimpleNamespace(**{**defaults, "engine_dir": str(engine), "drafting": "off", **changes})


@pytest.fixture
def fleet():
    return FleetEngine(2)


@pytest.fixture
def opened(monkeypatch):
    """The runtimes that are opened."""
    runtimes: list[LLMInferenceRuntime] = []
    original = engine_module.open_engine

    def open_engine(*arguments) -> LLMInferenceRuntime:
        runtimes.append(original(*arguments))
        return runtimes[-1]

    monkeypatch.setattr(engine_module, "open_engine", open_engine)
    return runtimes


def test_the_engine_is_opened_once_and_closed_with_the_last_node(fleet, opened, tiny_engine):
    parameters = parameters_of(tiny_engine)
    first, second = (fleet.open(parameters, LOGGER) for _ in range(2))
    assert len(opened) == 1
    assert first.pipeline is second.pipeline is opened[0].pipeline
    fleet.close(first, parameters, LOGGER)
    fleet.close(first, parameters, LOGGER)
    assert not opened[0].closed
    assert second.submit(request()).result(60).token_ids
    fleet.close(second, parameters, LOGGER)
    assert opened[0].closed
    third = fleet.open(parameters, LOGGER)
    assert len(opened) == 2
    fleet.close(third, parameters, LOGGER)


def test_a_node_that_cannot_be_configured_leaves_the_others_their_engine(fleet, opened, tiny_engine):
    first = fleet.open(parameters_of(tiny_engine), LOGGER)
    with pytest.raises(ValueError, match="parameter frames_per_plan is 2"):
        fleet.open(parameters_of(tiny_engine, frames_per_plan=2), LOGGER)
    with pytest.raises(ValueError, match="parameter cameras is for policies"):
        fleet.open(parameters_of(tiny_engine, cameras=["top"]), LOGGER)
    assert first.submit(request()).result(60).token_ids
    first.close()
    assert opened[0].closed


def test_an_engine_is_closed_if_its_first_node_cannot_be_configured(fleet, opened, tiny_engine):
    with pytest.raises(ValueError, match="parameter frames_per_plan is 2"):
        fleet.open(parameters_of(tiny_engine, frames_per_plan=2), LOGGER)
    assert opened[0].closed


@pytest.mark.parametrize("name", OF_ENGINE)
def test_parameters_of_the_engine_are_equal(fleet, tiny_engine, name):
    parameters = parameters_of(tiny_engine)
    first = fleet.open(parameters, LOGGER)
    other = parameters_of(tiny_engine, **{name: "other"})
    own = getattr(parameters, name)
    with pytest.raises(
        ValueError, match=f"parameter {name} is 'other', but other robots of this process"
    ) as got:
        fleet.open(other, LOGGER)
    assert str(own) in str(got.value)
    first.close()


def test_every_parameter_that_opens_an_engine_must_be_equal():
    """Those that `open_engine` reads."""
    source = engine_module.open_engine.__code__.co_names
    assert {name for name in source if name in SPECS} == set(OF_ENGINE)


def test_each_node_has_its_own_adapters_and_seed(fleet, tiny_lora_engine, tiny_checkpoint, tmp_path):
    adapter = write_adapter(tmp_path / "a", tiny_checkpoint, r=2)
    first = fleet.open(
        parameters_of(tiny_lora_engine, loras=[f"a={adapter}"], lora="a", noise_seed=4), LOGGER
    )
    second = fleet.open(parameters_of(tiny_lora_engine), LOGGER)
    assert [share.submit(request()).result(60).lora for share in (first, second)] == ["a", ""]
    assert [share.submit(request()).result(60).noise_seed for share in (first, second)] == [4, 0]
    for share in (first, second):
        share.close()


def test_the_prefix_cache_is_saved_by_the_last_node(fleet, tiny_engine, tmp_path):
    file = tmp_path / "prefixes"
    parameters = parameters_of(tiny_engine, prefix_cache_file=str(file))
    first, second = (fleet.open(parameters, LOGGER) for _ in range(2))
    first.submit(request("go to the red box and then to the door")).result(60)
    fleet.close(first, parameters, LOGGER)
    assert not file.exists()
    fleet.close(second, parameters, LOGGER)
    assert file.exists()


def test_after_the_loss_of_the_device_all_nodes_must_be_cleaned_up(fleet, opened, tiny_engine, monkeypatch):
    parameters = parameters_of(tiny_engine)
    first, second = (fleet.open(parameters, LOGGER) for _ in range(2))

    def fail(*arguments):
        raise DeviceLostError("the device is gone")

    monkeypatch.setattr(opened[0].pipeline.runner, "execute_vanilla_decoding_step", fail)
    with pytest.raises(DeviceLostError):
        first.submit(request()).result(60)
    fleet.close(first, parameters, LOGGER)
    with pytest.raises(EngineError, match="the device was lost: clean up the nodes of all robots"):
        fleet.open(parameters, LOGGER)
    fleet.close(second, parameters, LOGGER)
    third = fleet.open(parameters, LOGGER)
    assert third.submit(request()).result(60).token_ids
    third.close()


def test_a_speech_engine_is_opened_once(fleet, tiny_engine, tmp_path):
    export(write_qwen3_asr(tmp_path / "checkpoint", ORIGINAL, seed=9), tmp_path / "engine")
    parameters = parameters_of(tiny_engine, speech_engine_dir=str(tmp_path / "engine"))
    first, second = (fleet.open_transcriber(parameters) for _ in range(2))
    assert first.runtime.pipeline is second.runtime.pipeline
    sound = Sound(make_sound(1.0, 16000), 16000)
    heard = first.transcribe(sound)
    first.close()
    assert second.transcribe(sound).text == heard.text
    second.close()
    third = fleet.open_transcriber(parameters)
    assert third.transcribe(sound).text == heard.text
    third.close()
    assert fleet.open_transcriber(parameters_of(tiny_engine)) is None


def test_nodes_of_a_policy_share_it_and_plan_one_after_another(fleet, opened, policy_engine):
    first, second = (fleet.open(parameters_of(policy_engine, noise_seed=seed), LOGGER) for seed in (3, 4))
    assert len(opened) == 1
    assert [plans_at_once(0, share.config, share.rows) for share in (first, second)] == [1, 1]
    first.close()
    assert not opened[0].closed
    second.close()


@pytest.mark.parametrize(("robots", "expected"), [(1, 4), (2, 2), (3, 2), (8, 2)])
def test_robots_divide_the_rows_and_each_can_drive_beside_a_goal(tiny_engine, robots, expected):
    config = EngineConfig.load(tiny_engine)
    assert config.builder.max_batch_size == 4
    with FleetEngine(robots).open(parameters_of(tiny_engine), LOGGER) as share:
        assert plans_at_once(0, share.config, share.rows) == expected
