# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's parser and builder take graphs with quantised weights.

Plans keep the weights in their bits.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgellm_ros.builder import export
from edgellm_ros.builder.graph.graph import GraphBuilder
from edgellm_ros.builder.graph.product import quantized_product
from edgellm_ros.builder.quantization.matrix import FLOAT8, INT4, INT8, QuantizedMatrix
from edgellm_ros.builder.tensorrt.plan import PlanOptions, serialize_plan
from edgellm_ros.builder.tensorrt.profiles import make_profiles
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.optimization_profile import Profile, Range
from edgellm_ros.engine.tensorrt.library import Library, load_library
from edgellm_ros.engine.tensorrt.plan_file import RTX
from fixtures.decoder_checkpoint import write_decoder_checkpoint
from fixtures.pi_checkpoint import WIDER_SIZES, write_pi
from fixtures.quantized_checkpoint import METHODS, write_quantized_checkpoint

pytestmark = pytest.mark.tensorrt_build
SIZE = 1024
OVERHEAD = 3  # bits of each weight of a plan that are scales, zero points, an order of inputs and kernels


@pytest.fixture(scope="module")
def library() -> Library:
    try:
        return load_library(RTX)
    except EngineError as error:
        pytest.skip(str(error))


def gpus(method: str) -> tuple[str, ...]:
    return ("sm_89", "sm_120") if method == "fp8" else ("sm_86", "sm_120")  # those with FP8 units


def build(checkpoint: Path, engine: Path, library: Library, method: str, **options) -> memoryview:
    config = export(checkpoint, engine, **options)
    return serialize_plan(
        engine / "llm" / "model.onnx", make_profiles(config)["llm"], PlanOptions(), library, gpus(method)
    )


@pytest.mark.parametrize(
    ("method", "precision"), [*((method, "fp16") for method in METHODS), ("gptq", "bf16"), ("fp8", "bf16")]
)
def test_the_builder_makes_a_plan_of_every_layout(tmp_path, library, method, precision):
    order = method == "gptq"
    checkpoint = write_quantized_checkpoint(tmp_path / "checkpoint", method, act_order=order, desc_act=order)
    assert build(checkpoint, tmp_path / "engine", library, method, precision=precision).nbytes


def test_the_builder_makes_a_plan_of_rounded_weights_with_lora_inputs(tmp_path, library):
    checkpoint = write_decoder_checkpoint(tmp_path / "checkpoint", "qwen2", num_hidden_layers=1)
    options = {"precision": "fp16", "quantize": "int4", "group_size": 32, "max_lora_rank": 8}
    assert build(checkpoint, tmp_path / "engine", library, "int4", **options).nbytes


@pytest.mark.parametrize("part", ["visual", "prefix", "action"])
def test_the_builder_makes_a_plan_of_a_policy(tmp_path, library, part):
    checkpoint = write_pi(tmp_path / "checkpoint", sizes=WIDER_SIZES["pi05"])
    config = export(checkpoint, tmp_path / "engine", precision="bf16", quantize="int8")
    profiles, model = make_profiles(config)[part], tmp_path / "engine" / part / "model.onnx"
    assert b"DequantizeLinear" in model.read_bytes()
    assert serialize_plan(model, profiles, PlanOptions(), library, ("sm_86",)).nbytes


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        *((INT4, parts) for parts in ("", "zeros", "order", "negative scales")),
        *((INT8, parts) for parts in ("", "zeros")),
        (FLOAT8, ""),
    ],
)
def test_a_plan_keeps_the_weights_in_their_bits(tmp_path, library, kind, parts):
    rng = np.random.default_rng(0)
    values = rng.integers(-8, 8, (SIZE, SIZE)).astype(np.int8)
    zeros = rng.integers(-8, 8, (SIZE // 128, SIZE)).astype(np.int8) if parts == "zeros" else None
    order = rng.permutation(SIZE) if parts == "order" else None
    scales = np.full((SIZE // 128, SIZE), 0.01, np.float32)
    if parts == "negative scales":
        scales[:, ::2] *= -1
    matrix = QuantizedMatrix(
        fan_in=SIZE,
        fan_out=SIZE,
        dtype=kind,
        group=128,
        values=lambda: values,
        scales=lambda: scales,
        zeros=zeros,
        order=order,
    )
    graph = GraphBuilder("product", "fp16")
    x = graph.input("x", graph.dtype, ["S", SIZE])
    graph.output(quantized_product(graph, "layer", x, matrix), "y", graph.dtype, ["S", SIZE])
    graph.save(tmp_path / "model.onnx")
    profiles = [Profile("decode", {"S": Range(1, 1, 8)})]
    plan = serialize_plan(tmp_path / "model.onnx", profiles, PlanOptions(), library, ("sm_120",))
    bits = 8 * plan.nbytes / SIZE**2
    assert bits < (4 if kind == INT4 else 8) + OVERHEAD
