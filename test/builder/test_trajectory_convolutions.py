# SPDX-License-Identifier: Apache-2.0
"""Products in place of convolutions over the time of a trajectory."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

from edgellm_ros.builder.graph.graph import FLOAT
from edgellm_ros.builder.policies.diffusion.convolution import TrajectoryBuilder, doubled_taps, taps
from edgellm_ros.engine_directory import binding_names as names
from fixtures.graphs import helper, make_model
from fixtures.layer_graph import DictWeights

SAMPLES, BEFORE, AFTER = 3, 4, 5


def run(model: bytes, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x})[0]


def found_and_expected(tmp_path, operator, weight, places, **attributes):
    """Run our graph and ONNX's operator on the same random trajectory."""
    rng, steps = np.random.default_rng(1), places.shape[-1]
    bias = rng.standard_normal(AFTER).astype(np.float32)
    tensors = DictWeights({"conv.weight": weight, "conv.bias": bias})
    graph = TrajectoryBuilder("test", tensors, "fp32", [steps, BEFORE])
    y = graph.convolution("conv", graph.transpose(graph.trajectory, (0, 2, 1)), (BEFORE, AFTER), places)
    graph.output(y, "y", FLOAT, ["n", AFTER, len(places)])
    path, _ = graph.save(tmp_path / "model.onnx")
    x = rng.standard_normal((SAMPLES, steps, BEFORE)).astype(np.float32)
    node = helper.make_node(operator, ["x", "weight", "bias"], ["y"], **attributes)
    shapes = ([SAMPLES, BEFORE, steps], [SAMPLES, AFTER, len(places)])
    inputs, outputs = ({name: (int(FLOAT), shape)} for name, shape in zip("xy", shapes, strict=True))
    standard = make_model([node], inputs, outputs, {"weight": weight, "bias": bias})
    assert graph.graph.inputs[0].name == names.TRAJECTORY
    return run(str(path), x), run(standard.SerializeToString(), x.transpose(0, 2, 1))


@pytest.mark.parametrize("steps, kernel, stride", [(16, 5, 1), (4, 3, 1), (8, 3, 2), (2, 5, 1), (6, 1, 1)])
def test_products_are_a_convolution(tmp_path, steps, kernel, stride):
    weight = np.random.default_rng(0).standard_normal((AFTER, BEFORE, kernel)).astype(np.float32)
    places = taps(steps, kernel, stride)
    sizes = {"kernel_shape": [kernel], "strides": [stride], "pads": [kernel // 2] * 2}
    found, expected = found_and_expected(tmp_path, "Conv", weight, places, **sizes)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("steps", [1, 4, 8])
def test_products_are_a_transposed_convolution(tmp_path, steps):
    weight = np.random.default_rng(0).standard_normal((BEFORE, AFTER, 4)).astype(np.float32)
    sizes = {"kernel_shape": [4], "strides": [2], "pads": [1, 1]}
    found, expected = found_and_expected(tmp_path, "ConvTranspose", weight, doubled_taps(steps), **sizes)
    np.testing.assert_allclose(found, expected, atol=1e-5)
