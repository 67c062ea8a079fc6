# SPDX-License-Identifier: Apache-2.0
"""Operators of ONNX Runtime whose rows do not depend on the batch.

See OnnxRuntimeBackend.
"""

import numpy as np
import pytest

from edgellm_ros.engine.device import CpuDevice
from edgellm_ros.engine.executor import EngineExecutor
from fixtures.graphs import BOOL, FLOAT, helper, save_model

pytestmark = pytest.mark.only_on("cpu", reason="on GPUs the order of summation depends on the shapes")
DEVICE = CpuDevice()


def run(executor, dims, inputs, output, shape):
    tensors = {output: DEVICE.empty(shape, np.float32)}
    for name, array in inputs.items():
        tensors[name] = DEVICE.empty(array.shape, array.dtype)
        DEVICE.upload(tensors[name], array)
    executor.prepare(0, dims, tensors)
    executor.execute()
    return DEVICE.download(tensors[output])


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize(("fan_in", "fan_out"), [(256, 256), (256, 128), (640, 256), (256, 1393), (48, 16)])
def test_a_row_times_a_weight_does_not_depend_on_other_rows(tmp_path, threads, fan_in, fan_out):
    rng = np.random.default_rng(0)
    path = save_model(
        tmp_path / "linear.onnx",
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        {"x": (FLOAT, ["B", "S", fan_in])},
        {"y": (FLOAT, ["B", "S", fan_out])},
        {"w": rng.standard_normal((fan_in, fan_out)).astype(np.float32)},
    )
    executor = EngineExecutor.open(path, DEVICE, threads)
    rows = rng.standard_normal((256, fan_in)).astype(np.float32)
    whole = run(executor, {"B": 1, "S": 256}, {"x": rows[None]}, "y", (1, 256, fan_out))[0]
    for batch, tokens in [(1, 1), (2, 1), (3, 1), (4, 1), (1, 5), (2, 7), (1, 64), (4, 33), (1, 129)]:
        count = batch * tokens
        x = rows[:count].reshape(batch, tokens, fan_in)
        part = run(executor, {"B": batch, "S": tokens}, {"x": x}, "y", (batch, tokens, fan_out))
        np.testing.assert_array_equal(part.reshape(count, fan_out), whole[:count])


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("width", [1, 3, 4, 48])
@pytest.mark.parametrize("operator", ["Exp", "Sigmoid", "Atanh"])
def test_functions_of_recurrent_layers_do_not_depend_on_other_rows(tmp_path, threads, width, operator):
    """Softplus and Log fail this test: `softplus` (decoders/recurrent.py) has neither."""
    path = save_model(
        tmp_path / "function.onnx",
        [helper.make_node(operator, ["x"], ["y"])],
        {"x": (FLOAT, ["B", width])},
        {"y": (FLOAT, ["B", width])},
    )
    executor = EngineExecutor.open(path, DEVICE, threads)
    rows = np.random.default_rng(0).uniform(-4, 1 / 3, (8193, width)).astype(np.float32)
    rows = np.abs(rows) / 12 if operator == "Atanh" else rows
    whole = run(executor, {"B": 8193}, {"x": rows}, "y", rows.shape)
    for count in (1, 2, 3, 5, 64, 129, 1000, 4099):
        part = run(executor, {"B": count}, {"x": rows[:count]}, "y", (count, width))
        np.testing.assert_array_equal(part, whole[:count])


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("rank", [1, 8, 24, 64, 200])
@pytest.mark.parametrize(("fan_in", "fan_out"), [(256, 640), (640, 256), (2048, 128), (48, 16)])
def test_gemm_with_trans_a_of_activations_does_not_depend_on_other_rows(
    tmp_path, threads, rank, fan_in, fan_out
):
    """Adapters are applied so (builder/graph/lora.py); MatMul fails this test."""
    rng = np.random.default_rng(0)
    path = save_model(
        tmp_path / "adapter.onnx",
        [
            helper.make_node("Gemm", ["a", "x"], ["t"], transA=1, transB=1),
            helper.make_node("Gemm", ["t", "b", "base"], ["y"], transA=1),
        ],
        {
            "x": (FLOAT, ["T", fan_in]),
            "a": (FLOAT, [fan_in, "r"]),
            "b": (FLOAT, ["r", fan_out]),
            "base": (FLOAT, ["T", fan_out]),
        },
        {"y": (FLOAT, ["T", fan_out])},
    )
    executor = EngineExecutor.open(path, DEVICE, threads)

    def random(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    x, base, a, b = random(516, fan_in), random(516, fan_out), random(fan_in, rank), random(rank, fan_out)

    def apply(count):
        inputs = {"x": x[:count], "base": base[:count], "a": a, "b": b}
        return run(executor, {"T": count, "r": rank}, inputs, "y", (count, fan_out))

    whole = apply(516)
    exact = base + (x.astype(np.float64) @ a) @ b
    np.testing.assert_allclose(whole, exact, atol=1e-6 * np.abs(exact).max())
    for count in (1, 2, 3, 4, 5, 14, 33, 64, 129, 260):
        np.testing.assert_array_equal(apply(count), whole[:count])


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize(
    ("fan_in", "fan_out"), [(256, 1655), (48, 302), (2048, 400), (256, 3), (200, 100), (16, 1)]
)
def test_a_row_times_an_input_matrix_does_not_depend_on_other_rows(tmp_path, threads, fan_in, fan_out):
    """LMHead uses this form for a matrix that is an input; MatMul fails this test."""
    rng = np.random.default_rng(0)
    path = save_model(
        tmp_path / "product.onnx",
        [
            helper.make_node("Transpose", ["x"], ["columns"], perm=[2, 0, 1]),
            helper.make_node("Reshape", ["columns", "shape"], ["flat"]),
            helper.make_node("Gemm", ["flat", "w"], ["y"], transA=1),
        ],
        {"x": (FLOAT, ["B", "N", fan_in]), "w": (FLOAT, [fan_in, fan_out])},
        {"y": (FLOAT, ["T", fan_out])},
        {"shape": np.array([fan_in, -1])},
    )
    executor = EngineExecutor.open(path, DEVICE, threads)
    weight = rng.standard_normal((fan_in, fan_out)).astype(np.float32)
    rows = rng.standard_normal((64, fan_in)).astype(np.float32)

    def product(batch, wanted):
        x = rows[: batch * wanted].reshape(batch, wanted, fan_in)
        shape = (batch * wanted, fan_out)
        return run(executor, {"B": batch, "N": wanted, "T": shape[0]}, {"x": x, "w": weight}, "y", shape)

    whole = product(8, 8).reshape(64, fan_out)
    for batch, wanted in [(1, 1), (2, 1), (3, 1), (4, 1), (7, 1), (1, 5), (3, 7)]:
        np.testing.assert_array_equal(product(batch, wanted).reshape(-1, fan_out), whole[: batch * wanted])


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_attention_of_a_sequence_does_not_depend_on_other_sequences(tmp_path, threads):
    heads, kv_heads, size, capacity = 4, 2, 64, 384
    cache_shape = ["B", kv_heads, capacity, size]
    path = save_model(
        tmp_path / "attention.onnx",
        [helper.make_node("Attention", ["q", "k", "v", "mask"], ["y"], scale=size**-0.5)],
        {
            "q": (FLOAT, ["B", heads, "S", size]),
            "k": (FLOAT, cache_shape),
            "v": (FLOAT, cache_shape),
            "mask": (BOOL, ["B", 1, "S", capacity]),
        },
        {"y": (FLOAT, ["B", heads, "S", size])},
    )
    executor = EngineExecutor.open(path, DEVICE, threads)
    rng = np.random.default_rng(0)
    q = rng.standard_normal((4, heads, 130, size)).astype(np.float32)
    k, v = (rng.standard_normal((4, kv_heads, capacity, size)).astype(np.float32) for _ in "kv")
    mask = np.broadcast_to(np.tri(130, capacity, dtype=bool), (4, 1, 130, capacity)).copy()

    def attend(batch, tokens, keys=k, values=v, rows=None):
        rows = rows or slice(tokens)
        inputs = {
            "q": np.ascontiguousarray(q[:batch, :, rows]),
            "k": keys[:batch],
            "v": values[:batch],
            "mask": np.ascontiguousarray(mask[:batch, :, rows]),
        }
        return run(executor, {"B": batch, "S": tokens}, inputs, "y", (batch, heads, tokens, size))

    whole = attend(4, 130)
    for batch, tokens in [(1, 2), (4, 2), (1, 33), (3, 70), (1, 130)]:
        np.testing.assert_array_equal(attend(batch, tokens), whole[:batch, :, :tokens])

    for start, stop in [(1, 130), (100, 130), (128, 130)]:  # prompts with a reused prefix
        rest = attend(2, stop - start, rows=slice(start, stop))
        np.testing.assert_array_equal(rest, whole[:2, :, start:stop])

    decoded = attend(4, 1, rows=slice(129, 130))  # the last token alone, which sees 130 rows
    for batch in (1, 2, 3):
        np.testing.assert_array_equal(attend(batch, 1, rows=slice(129, 130)), decoded[:batch])
    np.testing.assert_allclose(decoded, whole[:, :, 129:], atol=1e-6)  # the same, but not bit by bit

    keys, values = k.copy(), v.copy()
    keys[:, :, 130:], values[:, :, 130:] = 7.0, -3.0  # rows beyond the length
    np.testing.assert_array_equal(attend(4, 130, keys, values), whole)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_attention_is_the_same_with_queries_of_a_head_split_into_heads(tmp_path, threads):
    """This is how families/qwen3_vl/vision.py splits the vision tower over threads."""
    heads, parts, patches, size = 3, 4, 280, 64
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, heads, patches, size)).astype(np.float32) for _ in "qkv")

    def attend(queries):
        path = save_model(
            tmp_path / f"{queries.shape[1]}.onnx",
            [helper.make_node("Attention", ["q", "k", "v"], ["y"], scale=size**-0.5)],
            {"q": (FLOAT, list(queries.shape)), "k": (FLOAT, list(k.shape)), "v": (FLOAT, list(v.shape))},
            {"y": (FLOAT, list(queries.shape))},
        )
        executor = EngineExecutor.open(path, DEVICE, threads)
        return run(executor, {}, {"q": queries, "k": k, "v": v}, "y", queries.shape).reshape(q.shape)

    np.testing.assert_array_equal(attend(q.reshape(1, heads * parts, -1, size)), attend(q))
