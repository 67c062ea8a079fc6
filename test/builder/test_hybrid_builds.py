# SPDX-License-Identifier: Apache-2.0
"""Graphs of hybrids are within the parser's list, and NVIDIA's builder takes them."""

from __future__ import annotations

import json
from collections import Counter

import onnx
import pytest

from edgellm_ros.builder import export
from edgellm_ros.builder.tensorrt.plan import PlanOptions, serialize_plan
from edgellm_ros.builder.tensorrt.profiles import make_profiles
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.tensorrt.library import Library, load_library
from edgellm_ros.engine.tensorrt.plan_file import RTX
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.engine_directory.files import VERIFY, graph_path
from fixtures.hybrid_checkpoints import write_nemotron_h_checkpoint, write_qwen3_5_checkpoint
from fixtures.qwen3_5_checkpoint import write_whole_qwen3_5_checkpoint

WRITERS = {"nemotron_h": write_nemotron_h_checkpoint, "qwen3_5": write_qwen3_5_checkpoint}
LOOPS = {"If", "Loop", "Scan"}


@pytest.fixture(scope="module")
def library() -> Library:
    try:
        return load_library(RTX)
    except EngineError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("family", WRITERS)
def test_a_hybrid_has_caches_for_attention_layers_and_states_for_recurrent_ones(tmp_path, family):
    config = export(WRITERS[family](tmp_path / "checkpoint"), tmp_path / "engine")
    graph = onnx.load(tmp_path / "engine/llm/model.onnx", load_external_data=False).graph
    inputs = Counter(value.name.rstrip("0123456789") for value in graph.input)
    outputs = Counter(value.name.rstrip("0123456789") for value in graph.output)
    recurrent = config.llm.recurrent
    assert recurrent is not None
    assert config.num_attention_layers + config.num_mamba_layers < config.num_decoder_layers + 1
    assert inputs["key_cache_"] == outputs["present_value_"] == config.num_attention_layers > 0
    assert inputs["conv_state_"] == outputs["present_recurrent_state_"] == recurrent.num_layers > 0
    assert inputs[names.VALID_TOKENS] == 1
    assert not LOOPS & {node.op_type for node in graph.node}


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("family", WRITERS)
def test_state_decays_and_their_sums_are_fp32_in_half_precision(tmp_path, family, precision):
    export(WRITERS[family](tmp_path / "checkpoint"), tmp_path / "engine", precision=precision)
    model = onnx.load(tmp_path / "engine/llm/model.onnx", load_external_data=False)
    graph = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    types = {value.name: value.type.tensor_type.elem_type for value in graph.value_info}
    types |= {value.name: value.type.tensor_type.elem_type for value in [*graph.input, *graph.output]}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    whole = {onnx.TensorProto.FLOAT, onnx.TensorProto.INT64, onnx.TensorProto.BOOL}
    nodes = [node for node in graph.node if "/scan/" in node.name or "/delta_rule/" in node.name]
    casts = {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
    assert len(nodes) > 20
    for node in nodes:
        assert all(types[name] in whole for name in node.output)
        inputs = {types[name] for name in node.input if name}
        assert inputs <= (casts if node.op_type == "Cast" else whole)
    read = {name for node in nodes for name in node.input}
    written = {name for node in nodes for name in node.output}
    assert {name for name in types if name.startswith("recurrent_state_")} <= read
    assert {name for name in types if name.startswith("present_recurrent_state_")} <= written
    for suffix in ("dt_bias", "A_log.negative_exp"):
        assert any(name.endswith(suffix) for name in read)


@pytest.mark.parametrize(
    ("family", "change", "reason"),
    [
        ("nemotron_h", {"layers_block_type": ["mamba", "moe", "attention"]}, "layer 1 has experts"),
        ("qwen3_5", {"num_experts": 8}, "num_experts 8: a mixture of experts, only dense layers are"),
    ],
)
def test_a_mixture_of_experts_is_refused_with_its_size(tmp_path, family, change, reason):
    checkpoint = WRITERS[family](tmp_path / "checkpoint")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=r"a mixture of experts.*parameters") as e:
        export(checkpoint, tmp_path / "engine")
    assert reason in str(e.value)


@pytest.mark.tensorrt_build
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("family", WRITERS)
def test_the_builder_makes_plans_of_all_graphs_with_lora_inputs(tmp_path, library, family, precision):
    write = write_whole_qwen3_5_checkpoint if family == "qwen3_5" else WRITERS[family]
    config = export(write(tmp_path / "checkpoint"), tmp_path / "engine", precision=precision, max_lora_rank=4)
    profiles = make_profiles(config)
    assert profiles.keys() == {"llm", VERIFY} | ({"visual"} if family == "qwen3_5" else set())
    profiles.pop("llm" if precision == "fp16" else VERIFY)  # which have the same layers
    for part, profile in profiles.items():
        model = tmp_path / "engine" / graph_path(part)
        plan = serialize_plan(model, profile, PlanOptions(), library, ("sm_89",))
        assert plan.nbytes > model.with_name("model.onnx.data").stat().st_size  # it has the weights
