# SPDX-License-Identifier: Apache-2.0
"""Graphs with negative scales of 4-bit weights, rewritten for TensorRT."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from edgellm_ros.builder.graph.graph import GraphBuilder
from edgellm_ros.builder.graph.product import quantized_product
from edgellm_ros.builder.quantization.matrix import INT4, QuantizedMatrix
from edgellm_ros.builder.tensorrt.positive_scales import positive_scales
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.onnxruntime.session import open_session

INPUTS, GROUP = 256, 32


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def product_graph(path: Path, rng: np.random.Generator, outputs: int, precision: str, signed: bool) -> Path:
    """Write a graph of y = x W with x [B,S,K] and random 4-bit weights."""
    values = rng.integers(-8, 8, (INPUTS, outputs)).astype(np.int8)
    scales = rng.uniform(0.01, 0.02, (INPUTS // GROUP, outputs)).astype(np.float32)
    if signed:
        scales *= rng.choice([-1, 1], scales.shape)
    matrix = QuantizedMatrix(
        fan_in=INPUTS, fan_out=outputs, dtype=INT4, group=GROUP, values=lambda: values, scales=lambda: scales
    )
    graph = GraphBuilder("product", precision)
    x = graph.input("x", graph.dtype, ["B", "S", INPUTS])
    graph.output(quantized_product(graph, "layer", x, matrix), "y", graph.dtype, ["B", "S", outputs])
    graph.save(path)
    return path


def run(path: Path, x: np.ndarray) -> np.ndarray:
    return open_session(path).run(None, {"x": x})[0]


@pytest.mark.parametrize("outputs", [64, 37])
def test_products_with_negative_scales_are_those_of_positive_ones(tmp_path, rng, outputs):
    model = product_graph(tmp_path / "model.onnx", rng, outputs, "fp32", signed=True)
    x = rng.standard_normal((2, 3, INPUTS), np.float32)
    with positive_scales(model) as graph:
        np.testing.assert_allclose(run(graph, x), run(model, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_the_graph_for_tensorrt_has_4_bit_weights_and_no_negative_scale(tmp_path, rng, precision):
    model = product_graph(tmp_path / "model.onnx", rng, 64, precision, signed=True)
    with positive_scales(model) as graph:
        tensors = {each.name: each for each in onnx.load(graph).graph.initializer}
    (scales,) = (each for name, each in tensors.items() if name.endswith("positive"))
    assert (numpy_helper.to_array(scales).astype(np.float32) > 0).all()
    assert [each.data_type for each in tensors.values()].count(TensorProto.INT4) == 1


def test_a_graph_with_positive_scales_is_given_as_it_is(tmp_path, rng):
    model = product_graph(tmp_path / "model.onnx", rng, 64, "fp32", signed=False)
    with positive_scales(model) as graph:
        assert graph == model


def test_no_file_is_left_beside_the_graph(tmp_path, rng):
    model = product_graph(tmp_path / "model.onnx", rng, 64, "fp32", signed=True)
    before = set(tmp_path.iterdir())
    with pytest.raises(KeyError), positive_scales(model):
        raise KeyError
    assert set(tmp_path.iterdir()) == before


def test_a_damaged_graph_is_named(tmp_path):
    model = tmp_path / "model.onnx"
    model.write_bytes(b"\xff" * 40)
    with (
        pytest.raises(EngineError, match=f"{model}: not a readable ONNX file"),
        positive_scales(model),
    ):
        pass


def test_weights_with_hard_links_are_read(tmp_path, rng):
    model = product_graph(tmp_path / "model.onnx", rng, 64, "fp32", signed=True)
    (tmp_path / "copy.data").hardlink_to(f"{model}.data")
    with positive_scales(model) as graph:
        assert graph != model
