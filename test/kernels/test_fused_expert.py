# SPDX-License-Identifier: Apache-2.0
"""The action expert's kernels against NumPy in float64; without a GPU they are compiled for the host."""

from __future__ import annotations

import dataclasses
import functools
import hashlib

import numpy as np
import pytest

pytest.importorskip("cuda.core", reason="NVRTC and its bindings are not installed (requirements-test.txt)")


from doubles import fused_on_cpu
from doubles.fused_decoder import TYPES
from doubles.fused_expert import Inputs, layer_shapes, outer_shapes, velocity
from edgellm_ros.kernels.cuda.fused import expert_compiler
from edgellm_ros.kernels.cuda.fused.compiler import source
from edgellm_ros.kernels.cuda.fused.expert import FusedExpert
from edgellm_ros.kernels.cuda.fused.expert_plan import ExpertPlan, ExpertTuning
from edgellm_ros.kernels.cuda.fused.expert_shape import ExpertShape
from edgellm_ros.kernels.cuda.fused.expert_weights import ExpertLayerWeights, ExpertWeights
from fixtures.on_device import put

SMALL = ExpertShape(
    "fp16", kv_caches=(0, 1), hidden=64, heads=2, kv_heads=1, head_dim=64, inner=96, rotary_dim=64,
    capacity=70, horizon=18, actions=2,
)  # fmt: skip
ARENA = ExpertShape(
    "fp16", kv_caches=tuple(range(6)), hidden=192, heads=4, kv_heads=2, head_dim=64, inner=512, rotary_dim=64,
    capacity=448, horizon=40, actions=2,
)  # fmt: skip
LARGE = ExpertShape(
    "bf16", kv_caches=tuple(range(28)), hidden=1024, heads=16, kv_heads=8, head_dim=128, inner=3072,
    rotary_dim=128, capacity=4096, horizon=64, actions=2,
)  # fmt: skip
CPU_TUNING = ExpertTuning(warps=4, stages=2, attention_warps=2, finish_threads=64)
TOLERANCE = {"fp16": 4e-3, "bf16": 3e-2}  # of velocities, relative to the largest
DT = 0.25


def changed(**changes) -> ExpertShape:
    return dataclasses.replace(SMALL, **changes)


class Model:
    """Random weights, caches and inputs of a shape, as arrays and on a device."""

    def __init__(self, shape: ExpertShape, samples: int, length: int, seed: int = 0) -> None:
        self.shape, self.dtype = shape, TYPES[shape.dtype]
        self.random = np.random.default_rng(seed)
        self.layers = [self._weights(layer_shapes(shape)) for _ in shape.kv_caches]
        self.outer = self._weights(outer_shapes(shape))
        steps, cache = shape.horizon, (1, shape.kv_heads, shape.capacity, shape.head_dim)
        angles = self.random.uniform(-3, 3, (1, steps, shape.rotary_dim // 2))
        self.inputs = Inputs(
            trajectory=self.random.standard_normal((samples, steps, shape.actions)).astype(np.float32),
            time_row=self.random.standard_normal(shape.hidden).astype(np.float32),
            cos=np.cos(angles).astype(np.float32),
            sin=np.sin(angles).astype(np.float32),
            length=length,
            caches={
                i: (self._values(cache, 1.0), self._values(cache, 1.0)) for i in sorted(set(shape.kv_caches))
            },
        )
        for pair in self.inputs.caches.values():
            for rows in pair:  # that are not filled: nothing may read them
                rows[:, :, length:] = np.nan

    def _values(self, shape: tuple[int, ...], scale: float) -> np.ndarray:
        return (self.random.standard_normal(shape) * scale).astype(self.dtype)

    def _weights(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
        return {
            name: (1 + 0.2 * self.random.standard_normal(shape)).astype(self.dtype)
            if "norm" in name
            else self._values(shape, shape[0] ** -0.5)
            for name, shape in shapes.items()
        }

    def on_device(self, device) -> tuple[ExpertWeights, dict, object]:
        """Return the weights, the tensors and the time's row of a run."""
        kept = []

        def place(array: np.ndarray) -> int:
            kept.append(put(device, array.view(np.uint16)))
            return kept[-1].pointer

        layers = tuple(
            ExpertLayerWeights(**{name: place(array) for name, array in layer.items()})
            for layer in self.layers
        )
        outer = {name: place(array) for name, array in self.outer.items()}
        inputs = self.inputs
        tensors = {
            "trajectory": put(device, inputs.trajectory),
            "rope_cos": put(device, inputs.cos),
            "rope_sin": put(device, inputs.sin),
            "kv_length": put(device, np.array([inputs.length], np.int64)),
        }
        for i, (keys, values) in inputs.caches.items():
            tensors[f"key_cache_{i}"] = put(device, keys.view(np.uint16))
            tensors[f"value_cache_{i}"] = put(device, values.view(np.uint16))
        return ExpertWeights(layers, **outer, owners=tuple(kept)), tensors, put(device, inputs.time_row)

    def expected(self) -> np.ndarray:
        """Compute the velocity in float64."""
        return velocity(self.shape, self.layers, self.outer, self.inputs)


class HostProgram:
    """The kernels of a plan, compiled for the host unless `folder` has them already."""

    def __init__(self, folder, plan: ExpertPlan) -> None:
        name = hashlib.sha256(repr(plan.macros()).encode()).hexdigest()[:16]
        library = folder / f"{name}.so"
        if not library.exists():
            kernels = source(expert_compiler.FILES)
            fused_on_cpu.build(library, kernels, plan.macros(), expert_compiler.KERNELS)
        self.launch = fused_on_cpu.HostKernels(library).launch


@pytest.fixture(scope="session")
def fused(device, tmp_path_factory):
    """Function that makes an expert: on the GPU, or on the host with 12 multiprocessors."""
    if device.memory == "cuda":
        return device, lambda shape, weights, samples: FusedExpert(device, shape, weights, samples)
    host, folder = fused_on_cpu.FusedDoubleDevice(12), tmp_path_factory.mktemp("expert")
    compile = functools.partial(HostProgram, folder)

    def make(shape, weights, samples):
        return FusedExpert(host, shape, weights, samples, compile, CPU_TUNING)

    return host, make


def step(fused, model: Model) -> np.ndarray:
    """Return the change of the trajectory in one step, per unit of time."""
    device, make = fused
    weights, tensors, time_row = model.on_device(device)
    expert = make(model.shape, weights, len(model.inputs.trajectory))
    expert.step(tensors, time_row, DT, first=True)
    return (device.download(tensors["trajectory"]) - model.inputs.trajectory) / DT


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape, samples, length",
    [
        pytest.param(SMALL, 1, 5, id="a short prefix"),
        pytest.param(changed(dtype="bf16"), 2, 70, id="bf16, a full cache, 2 samples"),
        pytest.param(changed(horizon=7, kv_caches=(2, 0)), 4, 33, id="other caches, 4 samples, tiles of 16"),
        pytest.param(
            changed(head_dim=128, rotary_dim=32, heads=3, kv_heads=3, hidden=128, inner=32, actions=3), 1, 48,
            id="heads of 128 that are rotated in part",
        ),
    ],
)  # fmt: skip
def test_a_step_is_that_of_numpy(fused, shape, samples, length):
    model = Model(shape, samples, length)
    found, expected = step(fused, model), model.expected()
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert error < TOLERANCE[shape.dtype], f"relative error {error:.2g}"
