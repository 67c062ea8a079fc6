# SPDX-License-Identifier: Apache-2.0
"""`edgellm export --cpu-int8`: graphs for a CPU multiply in 8 bits."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from edgellm_ros.builder import export
from edgellm_ros.builder.graph.graph import FLOAT, GraphBuilder
from edgellm_ros.builder.passes.int8_products import multiply_in_int8
from edgellm_ros.cli import main
from edgellm_ros.cli.quantization.cost import logits
from fixtures.decoder_checkpoint import write_decoder_checkpoint
from fixtures.hybrid_checkpoints import write_nemotron_h_checkpoint, write_qwen3_5_checkpoint

INNER, WIDTH = 96, 40
TOKENS = [[5, 9, 1, 7, 7, 30, 2], [40, 3, 8]]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_decoder_checkpoint(tmp_path_factory.mktemp("int8") / "checkpoint", "llama")


@pytest.fixture(scope="module")
def engines(checkpoint, tmp_path_factory) -> dict[bool, Path]:
    """The same checkpoint with and without the option."""
    folder = tmp_path_factory.mktemp("engines")
    for wanted in (False, True):
        export(checkpoint, folder / str(wanted), cpu_int8=wanted)
    return {wanted: folder / str(wanted) for wanted in (False, True)}


def session(folder: Path, weight: np.ndarray, threads: int = 1) -> onnxruntime.InferenceSession:
    """Load y = x W with the product in 8 bits."""
    graph = GraphBuilder("product", "fp32")
    x = graph.input("x", FLOAT, ["B", "S", len(weight)])
    y = graph.op("MatMul", x, graph.weight("w", weight.shape, lambda: weight))
    graph.output(y, "y", FLOAT, ["B", "S", weight.shape[1]])
    assert multiply_in_int8(graph, lm_head=True)
    graph.save(folder / "model.onnx")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])


def product(folder: Path, weight: np.ndarray, rows: np.ndarray) -> np.ndarray:
    (found,) = session(folder, weight).run(None, {"x": rows[None].astype(np.float32)})
    return found[0]


def rounded(values: np.ndarray, axis: int) -> np.ndarray:
    """Round to 255 levels, whose largest is the largest magnitude along an axis."""
    steps = np.abs(values).max(axis, keepdims=True) / 127
    return np.rint(values / steps) * steps


def test_a_product_is_that_of_rounded_rows_and_columns(tmp_path, rng):
    rows, weight = rng.standard_normal((7, INNER)), rng.standard_normal((INNER, WIDTH))
    found = product(tmp_path, weight.astype(np.float32), rows)
    np.testing.assert_allclose(found, rounded(rows, 1) @ rounded(weight, 0), rtol=1e-4, atol=1e-4)


def test_sums_of_the_largest_values_do_not_saturate(tmp_path):
    """AVX2 kernels that multiply unsigned with signed values cut such sums to 16 bits."""
    found = product(tmp_path, np.ones((INNER, WIDTH), np.float32), np.ones((6, INNER)))
    np.testing.assert_allclose(found, INNER, rtol=1e-6)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("fan_in", "fan_out"), [(256, 1280), (640, 256), (48, 21)])
def test_a_row_does_not_depend_on_other_rows(tmp_path, rng, threads, fan_in, fan_out):
    weight = rng.standard_normal((fan_in, fan_out)).astype(np.float32)
    rows = rng.standard_normal((120, fan_in)).astype(np.float32)
    engine = session(tmp_path, weight, threads)
    (whole,) = engine.run(None, {"x": rows[None]})
    for batch, tokens in [(1, 1), (3, 1), (1, 6), (2, 7), (1, 64)]:
        (part,) = engine.run(None, {"x": rows[: batch * tokens].reshape(batch, tokens, fan_in)})
        np.testing.assert_array_equal(part.reshape(-1, fan_out), whole[0, : batch * tokens])


@pytest.mark.parametrize("place", [0, 13, INNER - 1])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_spoils_its_row_and_no_other(tmp_path, rng, place, value):
    rows, weight = rng.standard_normal((5, INNER)), rng.standard_normal((INNER, WIDTH))
    rows[2, place] = value
    finite = np.isfinite(product(tmp_path, weight.astype(np.float32), rows))
    assert not finite[2].any()
    assert np.delete(finite, 2, axis=0).all()


def test_a_row_of_zeros_stays_zero(tmp_path, rng):
    rows = np.zeros((2, INNER))
    assert (product(tmp_path, rng.standard_normal((INNER, WIDTH)).astype(np.float32), rows) == 0).all()


def test_a_column_of_zeros_stays_zero(tmp_path, rng):
    weight = rng.standard_normal((INNER, WIDTH)).astype(np.float32)
    weight[:, 3] = 0
    assert (product(tmp_path, weight, rng.standard_normal((2, INNER)))[:, 3] == 0).all()


def test_graphs_and_weights_of_other_devices_do_not_change(engines):
    def files(engine: Path) -> dict[str, str]:
        return {
            path.relative_to(engine).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in engine.rglob("*")
            if path.is_file() and ".cpu." not in path.name and path.name != "config.json"
        }

    assert files(engines[True]) == files(engines[False])
    assert any(".cuda." in name for name in files(engines[True]))


def test_all_layers_multiply_in_8_bits_and_the_lm_head_does_not(engines):
    nodes = onnx.load(engines[True] / "llm" / "model.cpu.onnx", load_external_data=False).graph.node
    assert [node.name for node in nodes if node.op_type == "MatMul"] == ["/lm_head/MatMul"]
    assert sum(node.op_type == "MatMulIntegerToFloat" for node in nodes) == 3 * 4  # layers, products of each


@pytest.mark.parametrize("write", [write_nemotron_h_checkpoint, write_qwen3_5_checkpoint])
def test_what_makes_the_decays_of_recurrent_layers_stays_in_fp32(tmp_path, write):
    export(write(tmp_path / "checkpoint"), tmp_path / "engine", cpu_int8=True)
    nodes = onnx.load(tmp_path / "engine" / "llm" / "model.cpu.onnx", load_external_data=False).graph.node
    of_projection = [node.op_type for node in nodes if "/in_proj/" in node.name]
    assert "MatMul" in of_projection
    assert "MatMulIntegerToFloat" not in of_projection
    assert any(node.op_type == "MatMulIntegerToFloat" for node in nodes)


def test_weights_in_fp32_that_nothing_multiplies_are_not_in_the_graph(engines):
    graph = onnx.load(engines[True] / "llm" / "model.cpu.onnx", load_external_data=False).graph
    used = {name for node in graph.node for name in node.input}
    assert {each.name for each in graph.initializer} <= used


def test_logits_are_close_to_those_in_fp32(engines):
    for expected, found in zip(logits(engines[False], TOKENS), logits(engines[True], TOKENS), strict=True):
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert 0 < error < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantised_weights_are_multiplied_in_8_bits_too(checkpoint, tmp_path, kind):
    for wanted in (False, True):
        export(checkpoint, tmp_path / str(wanted), quantize=kind, cpu_int8=wanted)
    nodes = onnx.load(tmp_path / "True" / "llm" / "model.cpu.onnx", load_external_data=False).graph.node
    assert not any(node.op_type == "DequantizeLinear" for node in nodes)
    results = zip(*(logits(tmp_path / str(wanted), TOKENS) for wanted in (False, True)), strict=True)
    for expected, found in results:
        assert 0 < np.linalg.norm(found - expected) / np.linalg.norm(expected) < 0.03


def test_another_precision_is_refused(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="cpu_int8 needs precision fp32, got 'fp16'"):
        export(checkpoint, tmp_path / "engine", precision="fp16", cpu_int8=True)
    assert not (tmp_path / "engine").exists()


def test_the_option_of_the_command_shows_the_file_of_integers(checkpoint, capsys):
    assert main(["export", str(checkpoint), "--check", "--cpu-int8", "--json"]) == 0
    files = json.loads(capsys.readouterr().out.splitlines()[-1])["files"]
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96  # q, k and v; o; gate, up and down
    assert files["llm/model.cpu.onnx.data"] > 3 * layer


def test_with_one_scale_for_all_rows_a_product_has_its_bias(tmp_path, rng):
    """The product of the vision tower and of draft heads."""
    rows, weight = rng.standard_normal((9, INNER)), rng.standard_normal((INNER, WIDTH)).astype(np.float32)
    bias = rng.standard_normal(WIDTH).astype(np.float32)
    graph = GraphBuilder("product", "fp32")
    x = graph.input("x", FLOAT, ["S", INNER])
    y = graph.op("MatMul", x, graph.weight("w", weight.shape, lambda: weight))
    y = graph.op("Add", y, graph.weight("b", bias.shape, lambda: bias))
    graph.output(y, "y", FLOAT, ["S", WIDTH])
    assert multiply_in_int8(graph, by_rows=False)
    assert [node.op_type for node in graph.graph] == ["DynamicQuantizeMatMul"]
    graph.save(tmp_path / "model.onnx")
    engine = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (found,) = engine.run(None, {"x": rows.astype(np.float32)})
    expected = rows @ weight + bias
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 0.02
