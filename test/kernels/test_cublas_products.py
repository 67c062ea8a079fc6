# SPDX-License-Identifier: Apache-2.0
"""Which matrices, layouts and epilogues CublasProducts passes to cuBLASLt."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cuda.core", reason="NVRTC and its bindings are not installed (requirements-test.txt)")

from doubles.cublas_double import CublasDouble
from doubles.fused_decoder import TYPES
from doubles.fused_on_cpu import FusedDoubleDevice
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.fused.cuda import products as module
from edgellm_ros.fused.cuda.products import CublasProducts
from edgellm_ros.fused.products import Matrix
from fixtures.on_device import put

pytestmark = pytest.mark.only_on("cpu", reason="the double of the library")
ROWS, K, N = 5, 16, 24


class Device(FusedDoubleDevice):
    stream = SimpleNamespace(handle=7)

    def activate(self) -> None:
        pass


@pytest.fixture
def make(monkeypatch):
    """A function that makes products on a library."""

    def products(library: CublasDouble, dtype: str = "fp16") -> CublasProducts:
        monkeypatch.setattr(module, "load_nvidia_dynamic_lib", lambda name: SimpleNamespace(abs_path=name))
        monkeypatch.setattr(module.ctypes, "CDLL", lambda path: library)
        return CublasProducts(Device(4), dtype)

    return products


class Case:
    """x [ROWS,K], weights and a result on a device."""

    def __init__(self, dtype: str = "fp16", columns: int = N, transposed: bool = False) -> None:
        random, self.dtype, self.device = np.random.default_rng(0), TYPES[dtype], Device(4)
        self.x = random.standard_normal((ROWS, K)).astype(self.dtype)
        size = (N, K) if transposed else (K, columns)
        self.weights = random.standard_normal(size).astype(self.dtype)
        self.bias = random.standard_normal(N).astype(self.dtype)
        kept = [put(self.device, each.view(np.uint16)) for each in (self.x, self.weights, self.bias)]
        self.kept = kept
        self.matrix = Matrix(kept[1].pointer, K, N, columns if columns != N else 0, transposed)
        wide = self.weights.astype(np.float64)
        self.expected = self.x.astype(np.float64) @ (wide.T if transposed else wide[:, :N])

    def run(self, products: CublasProducts, before: np.ndarray | None = None, **options) -> np.ndarray:
        wide = "adds" in options or "wide" in options
        out = np.zeros((ROWS, N), np.float32 if wide else np.uint16) if before is None else before
        result = put(self.device, out)
        products.multiply(self.kept[0].pointer, self.matrix, result.pointer, ROWS, **options)
        found = self.device.download(result)
        return (found if wide else found.view(self.dtype)).astype(np.float64)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "matrix", [{}, {"transposed": True}, {"columns": N + 8}], ids=["plain", "transposed", "more columns"]
)
@pytest.mark.parametrize("options", [{}, {"wide": True}], ids=["half", "wide"])
def test_a_product_is_that_of_numpy(make, dtype, matrix, options):
    case = Case(dtype, **matrix)
    found = case.run(make(CublasDouble(), dtype), **options)
    np.testing.assert_allclose(found, case.expected, rtol=1e-6 if options else 1e-2, atol=1e-2)


def test_a_product_is_added_to_fp32(make):
    case, before = Case(), np.arange(ROWS * N, dtype=np.float32).reshape(ROWS, N)
    found = case.run(make(CublasDouble()), before, adds=True)
    np.testing.assert_allclose(found, before + case.expected, rtol=1e-5)


def test_a_bias_ends_a_product(make):
    case = Case()
    found = case.run(make(CublasDouble()), bias=case.kept[2].pointer)
    expected = case.expected + case.bias.astype(np.float64)
    np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-2)


def test_bias_and_gelu_end_a_product(make):
    case = Case()
    found = case.run(make(CublasDouble()), bias=case.kept[2].pointer, gelu=True)
    value = case.expected + case.bias.astype(np.float64)
    expected = 0.5 * value * (1 + np.tanh((2 / np.pi) ** 0.5 * (value + 0.044715 * value**3)))
    np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-2)


def test_a_kernel_is_chosen_once_for_each_size(make):
    library, case = CublasDouble(), Case()
    products = make(library)
    for _ in range(3):
        case.run(products)
        case.run(products, adds=True)
    assert library.chosen == [(N, K, K, ROWS)] * 2


def test_sizes_without_a_kernel_are_named(make):
    library = CublasDouble()
    library.kernels = 0
    with pytest.raises(EngineError, match=r"no kernel for \[5,16\] times \[16,24\]"):
        Case().run(make(library))


def test_a_library_that_cannot_be_loaded_is_an_engine_error(monkeypatch):
    def missing(name):
        raise RuntimeError("libcublasLt.so.13 is nowhere")

    monkeypatch.setattr(module, "load_nvidia_dynamic_lib", missing)
    with pytest.raises(EngineError, match=r"cuBLASLt cannot be loaded: libcublasLt\.so\.13 is nowhere"):
        CublasProducts(Device(4), "fp16")


def test_a_failing_function_is_named_with_its_status(make):
    with pytest.raises(EngineError, match="cublasLtCreate failed with status 1 of cuBLAS"):
        make(CublasDouble({"cublasLtCreate": 1}))
