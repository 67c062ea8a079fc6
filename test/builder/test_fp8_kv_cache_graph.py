# SPDX-License-Identifier: Apache-2.0
"""Graphs and refusals of exports with an FP8 (E4M3) KV cache."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from edgellm_ros.builder import export
from edgellm_ros.builder.exporter.check import check
from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.builder.graph.graph import FLOAT, INT64
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.tensorrt.plan import build_plans
from edgellm_ros.cli import main
from edgellm_ros.engine.onnxruntime.session import open_session
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.runtime.decoding.speculative.drafting_config import SpecDecodeDraftingConfig, check_drafting
from fixtures.random_head import base_config, write_random_head

pytestmark = pytest.mark.only_on("cpu", reason="about graphs, not about a device")
FLOAT8 = ml_dtypes.float8_e4m3fn
SIZE = 16


@pytest.fixture(scope="module")
def engine(tiny_checkpoint, tmp_path_factory):
    directory = tmp_path_factory.mktemp("fp8")
    export(tiny_checkpoint, directory, precision="fp16", kv_cache="fp8")
    return directory


@pytest.fixture(scope="module")
def write_rows(tmp_path_factory):
    """A function that writes rows [1,1,S,SIZE] to an empty cache of 4, from slot 1 on.

    The function returns rows and cache.
    """
    graph = ModelBuilder("cache", None, "fp32", kv_cache="fp8")
    (cache, _), new = graph.caches([0], 1, 4, SIZE)[0], graph.input("new", FLOAT, [1, 1, "S", SIZE])
    rows, present = graph.written_cache(cache, new, graph.input("index", INT64, [1]))
    graph.output(rows, "rows", FLOAT, [1, 1, 4, SIZE])
    graph.output(present, "present", ir.DataType.FLOAT8E4M3FN, [1, 1, 4, SIZE])
    path = tmp_path_factory.mktemp("rows") / "model.onnx"
    graph.save(path)
    session = open_session(path)
    empty = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(np.zeros((1, 1, 4, SIZE), np.uint8), 17)

    def write(new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        binding, present = session.io_binding(), np.zeros((1, 1, 4, SIZE), np.uint8)
        for name in ("key_cache_0", "value_cache_0"):
            if name in {node.name for node in session.get_inputs()}:
                binding.bind_ortvalue_input(name, empty)
        binding.bind_cpu_input("new", new)
        binding.bind_cpu_input("index", np.array([1]))
        binding.bind_output("rows")
        binding.bind_output("present", "cpu", 0, 17, present.shape, present.ctypes.data)
        session.run_with_iobinding(binding)
        return binding.get_outputs()[0].numpy(), present.view(FLOAT8)

    return write


def test_new_rows_are_rounded_to_nearest_and_kept_within_the_range(write_rows):
    values = np.random.default_rng(0).standard_normal((1, 1, 2, SIZE)).astype(np.float32)
    values.flat[:6] = 1e-4, 0.001, 448, 480, -1e30, np.inf
    rows, present = write_rows(values)
    expected = np.zeros((1, 1, 4, SIZE), FLOAT8)
    expected[:, :, 1:3] = np.clip(values, -448, 448).astype(FLOAT8)  # of ml_dtypes
    np.testing.assert_array_equal(present.view(np.uint8), expected.view(np.uint8))
    np.testing.assert_array_equal(rows, expected.astype(np.float32))


def test_an_fp8_cache_takes_half_the_bytes_of_an_fp16_one(tiny_checkpoint):
    half, eight = (
        check(tiny_checkpoint, ExportOptions(precision="fp16", kv_cache=kind)) for kind in (None, "fp8")
    )
    assert half.memory.kv_cache_per_sequence == 2 * eight.memory.kv_cache_per_sequence > 0


def test_attention_for_cuda_reads_and_writes_fp8_with_one_scale(engine):
    graph = onnx.load(engine / "llm" / "model.cuda.onnx", load_external_data=False).graph
    found = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
    assert len(found) == 3
    for node in found:
        attributes = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
        kinds = attributes["k_quant_type"], attributes["v_quant_type"], attributes["kv_cache_bit_width"]
        assert kinds == (b"PER_TENSOR", b"PER_TENSOR", 8)
        assert len(node.input) == 14  # norms are nodes of their own
        assert node.input[12] == node.input[13]
        scale = next(each for each in graph.initializer if each.name == node.input[12])
        assert onnx.numpy_helper.to_array(scale).tolist() == [1.0]
    bindings = [*graph.input, *graph.output]
    caches = [each for each in bindings if each.name.startswith(("key_", "value_", "present_"))]
    assert len(caches) == 12
    assert {each.type.tensor_type.elem_type for each in caches} == {onnx.TensorProto.FLOAT8E4M3FN}


def test_the_schema_of_onnx_runtimes_attention_takes_the_graph_for_cuda(engine):
    """The CPU provider has no such kernel.

    ONNX Runtime finds that after it has checked all types.
    """
    path, missing = engine / "llm" / "model.cuda.onnx", onnxruntime.capi.onnxruntime_pybind11_state
    with pytest.raises(missing.NotImplemented, match=r"types are incompatible.*float8e4m3fn"):
        onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def test_building_plans_is_refused(engine):
    with pytest.raises(ValueError, match=r"TensorRT writes to a KV cache of fp32, fp16 or bf16.*has fp8"):
        build_plans(engine, lambda: pytest.fail("a device was opened"))


def test_on_cuda_chains_are_verified_and_no_trees(tiny_checkpoint, tmp_path):
    head = write_random_head(tmp_path / "head", base_config(tiny_checkpoint))
    config = export(tiny_checkpoint, tmp_path / "engine", draft=head, kv_cache="fp8")
    paths = {entry.path for entry in config.files}
    assert "llm/verify.chain.cuda.onnx" in paths
    assert "llm/verify.cuda.onnx" not in paths
    tree = SpecDecodeDraftingConfig(4, 2, 8)
    check_drafting(tree, config, on_cpu=True)
    with pytest.raises(
        ValueError, match=r"drafting_top_k 4: with a KV cache of type fp8 a GPU verifies chains"
    ):
        check_drafting(tree, config, on_cpu=False)


@pytest.mark.slow
def test_the_command_reports_what_the_rounding_cost_in_logits(tiny_checkpoint, tmp_path, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("what do you see?\n")
    command = ["export", str(tiny_checkpoint), str(tmp_path / "engine"), "--kv-cache", "fp8"]
    assert main([*command, "--prompts", str(prompts), "--json"]) == 0
    cost = json.loads(capsys.readouterr().out)["quantization"]
    assert 0 < cost["relative_error"] < 0.1
    assert EngineConfig.load(tmp_path / "engine").kv_cache_type == "fp8"
