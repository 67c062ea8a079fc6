# SPDX-License-Identifier: Apache-2.0
"""How the node prepares a runtime before its first use."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from rclpy.logging import get_logger

from edgellm_ros.builder import export
from edgellm_ros.engine.device import CpuDevice
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.ros.node.runtime_opening import open_runtime
from edgellm_ros.runtime import pipeline
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.smolvla_checkpoint import write_smolvla
from fixtures.tiny_adapter import write_adapter


def test_decode_steps_are_recorded_with_the_adapters_that_the_parameters_name(
    tiny_lora_engine, tiny_checkpoint, tmp_path, monkeypatch
):
    adapter = write_adapter(tmp_path / "a", tiny_checkpoint, r=2)
    loaded = []
    monkeypatch.setattr(
        LLMInferenceRuntime,
        "capture_decoding_cuda_graph",
        lambda runtime: loaded.append(runtime.lora_names()),
    )
    parameters = parameters_of(tiny_lora_engine, loras=[f"a={adapter}"], lora="a")
    with open_runtime(parameters, get_logger("test")):
        assert loaded == [["a"]]


def test_drafting_as_the_parameters_say(tiny_engine):
    parameters = parameters_of(tiny_engine, drafting="lookup", draft_steps=3)
    with open_runtime(parameters, get_logger("test")) as runtime:
        assert runtime.speculative_decoding_strategy_name == "lookup"
        assert runtime.pipeline.method.tokens_per_step == 4


def test_drafting_that_the_engine_does_not_support(tiny_engine):
    with pytest.raises(ValueError, match="this engine has no draft head"):
        open_runtime(parameters_of(tiny_engine, drafting="eagle"), get_logger("test"))


def test_a_policy_is_refused_because_the_node_needs_text(tmp_path):
    export(write_smolvla(tmp_path / "checkpoint"), tmp_path / "engine")
    with pytest.raises(ValueError, match=r"the node needs an engine that answers with text; .* \(smolvla\)"):
        open_runtime(parameters_of(tmp_path / "engine"), get_logger("test"))


def test_fused_decoding_on_a_device_without_it(tiny_engine):
    with pytest.raises(EngineError, match="fused decoding is not available: it needs the device 'cuda'"):
        open_runtime(parameters_of(tiny_engine, decode="fused"), get_logger("test"))


def test_code_of_tensorrt_plans_runs_only_as_the_parameters_say(tiny_engine, monkeypatch):
    allowed = []

    def open_device(name, allow_plan_code=False):
        allowed.append(allow_plan_code)
        return CpuDevice()

    monkeypatch.setattr(pipeline, "open_device", open_device)
    for value in (False, True):
        open_runtime(parameters_of(tiny_engine, allow_plan_code=value), get_logger("test")).close()
    assert allowed == [False, True]


def test_trained_chunks_need_a_checkpoint_that_was_trained_for_them(tiny_engine):
    with pytest.raises(ValueError, match="parameter chunking must be off, guided or frozen: the checkpoint"):
        open_runtime(parameters_of(tiny_engine, chunking="trained"), get_logger("test"))


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
        "loras": [""],
        "lora": "",
        "noise_seed": 0,
        "frames_per_plan": 1,
        "chunking": "off",
    }
    return SimpleNamespace(**{**values, **changes})
