# SPDX-License-Identifier: Apache-2.0
"""How the node prepares a runtime before its first use."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from rclpy.logging import get_logger

from edgellm_ros.engine.device import CpuDevice
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.ros.node.engine_checks import OF_WORDS
from edgellm_ros.ros.node.runtime_opening import open_runtime
from edgellm_ros.ros.node.settings.parameters import SPECS
from edgellm_ros.runtime import opening
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.tiny_adapter import write_adapter


def test_decode_steps_are_recorded_with_the_adapters_that_the_parameters_name(
    tiny_lora_engine, tiny_checkpoint, tmp_path, monkeypatch
):
    adapter = write_adapter(tmp_path / "a", tiny_checkpoint, r=2)
    loaded: list[list[str]] = []
    monkeypatch.setattr(
        LLMInferenceRuntime,
        "capture_decoding_cuda_graph",
        lambda runtime: loaded.append(runtime.lora_names()),
    )
    parameters = parameters_of(tiny_lora_engine, loras=[f"a={adapter}"], lora="a")
    with open_runtime(parameters, get_logger("test")):
        assert loaded[-1] == ["a"]


def test_nothing_is_recorded_if_the_parameters_say_so(tiny_engine, monkeypatch):
    recorded: list[str] = []
    monkeypatch.setattr(
        LLMInferenceRuntime, "capture_decoding_cuda_graph", lambda runtime: recorded.append("yes")
    )
    open_runtime(parameters_of(tiny_engine, cuda_graphs=False), get_logger("test")).close()
    assert not recorded


def test_drafting_as_the_parameters_say(tiny_engine):
    parameters = parameters_of(tiny_engine, drafting="lookup", draft_steps=3)
    with open_runtime(parameters, get_logger("test")) as runtime:
        assert runtime.speculative_decoding_strategy_name == "lookup"
        assert runtime.pipeline.method.tokens_per_step == 4


def test_drafting_that_the_engine_does_not_support(tiny_engine):
    with pytest.raises(ValueError, match="this engine has no draft head"):
        open_runtime(parameters_of(tiny_engine, drafting="eagle"), get_logger("test"))


def test_a_policy_is_opened(policy_engine):
    with open_runtime(parameters_of(policy_engine, noise_seed=3), get_logger("test")) as runtime:
        assert runtime.config.policy is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cameras": ["top", "left"]}, "parameter cameras must be different cameras of top, wrist, got"),
        ({"cameras": ["top", "top"]}, "parameter cameras must be different cameras of top, wrist, got"),
        ({"state_joints": ["a", "b"]}, "parameter state_joints must be 3 different joints, for state_0, "),
        ({"state_joints": ["a", "b", "a"]}, "parameter state_joints must be 3 different joints"),
        ({"lora": "careful"}, r"parameter lora needs an engine with a language model.*\(smolvla\)"),
        ({"loras": ["careful=/tmp"]}, "parameter loras needs an engine with a language model"),
        ({"prefix_cache_file": "/tmp/x"}, "parameter prefix_cache_file needs an engine with a language"),
        ({"temperature": 0.5}, r"parameter temperature needs .* leave it at -1\.0, got 0\.5"),
        ({"max_tokens": 8}, r"parameter max_tokens needs .*\(smolvla\): leave it at 96, got 8"),
        ({"system_prompt": "be kind"}, "parameter system_prompt needs an engine with a language model"),
        ({"choices": ["yes", "no"]}, "parameter choices needs an engine with a language model"),
        ({"frames_per_plan": 2}, "parameter frames_per_plan is 2, but the engine takes no videos"),
        ({"chunking": "trained"}, "parameter chunking must be off, guided or frozen"),
        ({"drafting": "lookup"}, "drafting"),
        ({"without": ["visual"]}, r"a policy \(smolvla\) needs all of its parts: leave out none of visual"),
    ],
)
def test_parameters_that_do_not_fit_a_policy_are_refused(policy_engine, changes, message):
    with pytest.raises(ValueError, match=message):
        open_runtime(parameters_of(policy_engine, **changes), get_logger("test"))


def test_negative_sampling_parameters_are_those_of_any_engine(policy_engine):
    open_runtime(parameters_of(policy_engine, temperature=-2.0, choices=[""]), get_logger("test")).close()


@pytest.mark.parametrize("name", ["cameras", "state_joints"])
def test_parameters_of_policies_are_refused_by_a_language_model(tiny_engine, name):
    with pytest.raises(ValueError, match=f"parameter {name} is for policies, this engine is none"):
        open_runtime(parameters_of(tiny_engine, **{name: ["top"]}), get_logger("test"))


def test_fused_decoding_on_a_device_without_it(tiny_engine):
    with pytest.raises(EngineError, match="fused decoding is not available: it needs the device 'cuda'"):
        open_runtime(parameters_of(tiny_engine, decode="fused"), get_logger("test"))


def test_code_of_tensorrt_plans_runs_only_as_the_parameters_say(tiny_engine, monkeypatch):
    allowed = []

    def open_device(name, allow_plan_code, stream):
        allowed.append(allow_plan_code)
        return CpuDevice()

    monkeypatch.setattr(opening, "open_device", open_device)
    for value in (False, True):
        open_runtime(parameters_of(tiny_engine, allow_plan_code=value), get_logger("test")).close()
    assert allowed == [False, True]


def test_parts_are_left_out_as_the_parameters_say(tiny_engine):
    parameters = parameters_of(tiny_engine, without=["action", "visual"])
    with open_runtime(parameters, get_logger("test")) as runtime:
        assert runtime.parts.without == ("visual", "action")
        assert runtime.pipeline.action is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"plan_on": "image"}, "parameter plan_on must be command: the vision encoder was left out when"),
        ({"frames_per_plan": 2}, "parameter frames_per_plan is 2, but the vision encoder was left out when"),
    ],
)
def test_plans_of_frames_need_the_vision_encoder(tiny_engine, changes, message):
    with pytest.raises(ValueError, match=message):
        open_runtime(parameters_of(tiny_engine, without=["visual"], **changes), get_logger("test"))


def test_trained_chunks_need_a_checkpoint_that_was_trained_for_them(tiny_engine):
    with pytest.raises(ValueError, match="parameter chunking must be off, guided or frozen: the checkpoint"):
        open_runtime(parameters_of(tiny_engine, chunking="trained"), get_logger("test"))


def test_more_samples_than_the_engine_takes_are_refused(policy_engine):
    most = EngineConfig.load(policy_engine).builder.max_action_samples
    open_runtime(parameters_of(policy_engine, action_samples=most), get_logger("test")).close()
    words = (
        f"parameter action_samples must be from 0 to {most}, max_action_samples of the engine, got {most + 1}"
    )
    with pytest.raises(ValueError, match=words):
        open_runtime(parameters_of(policy_engine, action_samples=most + 1), get_logger("test"))


def parameters_of(engine, **changes) -> SimpleNamespace:
    """Make the parameters that `open_runtime` reads."""
    values = {
        "engine_dir": str(engine),
        "device": "cpu",
        "allow_plan_code": False,
        "prefix_cache_mb": -1,
        "prefix_cache_file": "",
        "drafting": "off",
        "draft_top_k": 0,
        "draft_steps": 0,
        "verify_tree_size": 0,
        "decode": "auto",
        "cuda_graphs": True,
        "without": [""],
        "plan_on": "command",
        "loras": [""],
        "lora": "",
        "noise_seed": 0,
        "frames_per_plan": 1,
        "cameras": [""],
        "state_joints": [""],
        "navigation": False,
        "guidance": -1.0,
        "chunking": "off",
        "action_samples": 1,
        "tool_call_format": "auto",
        "serve_port": 0,
        **{name: SPECS[name].default for name in OF_WORDS},
    }
    return SimpleNamespace(**{**values, **changes})
