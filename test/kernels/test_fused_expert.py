# SPDX-License-Identifier: Apache-2.0
"""The action expert's kernels against NumPy in float64.

Without a GPU they are compiled for the host.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cuda.core", reason="NVRTC and its bindings are not installed (requirements-test.txt)")


from doubles import fused_on_cpu
from doubles.fused_decoder import TYPES
from doubles.fused_expert import Inputs, layer_shapes, outer_shapes, velocity
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.fused.cuda.compiler import options
from edgellm_ros.fused.expert import FusedExpert
from edgellm_ros.fused.expert_weights import ExpertLayerWeights, ExpertWeights
from edgellm_ros.fused.plan.expert import (
    KERNELS,
    ExpertPlan,
    ExpertTuning,
    plan_samples,
)
from edgellm_ros.fused.plan.expert_shape import ExpertShape
from edgellm_ros.fused.sources import expand
from edgellm_ros.kernels import ConditionedStep
from fixtures.on_device import put
from fixtures.ptxas_report import ptxas_report

SMALL = ExpertShape(
    "fp16", kv_caches=(2, 0), hidden=64, heads=2, kv_heads=1, head_dim=64, inner=96, rotary_dim=64,
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
            caches={i: (self._cache(cache), self._cache(cache)) for i in sorted(set(shape.kv_caches))},
        )
        for pair in self.inputs.caches.values():
            for rows in pair:  # that are not filled: nothing may read them
                rows[:, :, length:] = np.nan

    def _values(self, shape: tuple[int, ...], scale: float) -> np.ndarray:
        return (self.random.standard_normal(shape) * scale).astype(self.dtype)

    def _cache(self, shape: tuple[int, ...]) -> np.ndarray:
        values = self._values(shape, 1.0)
        return values.astype(ml_dtypes.float8_e4m3fn) if self.shape.fp8_cache else values

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
            bits = np.uint8 if keys.itemsize == 1 else np.uint16
            tensors[f"key_cache_{i}"] = put(device, keys.view(bits))
            tensors[f"value_cache_{i}"] = put(device, values.view(bits))
        return ExpertWeights(layers, **outer, owners=tuple(kept)), tensors, put(device, inputs.time_row)

    def expected(self) -> np.ndarray:
        """Compute the velocity in float64."""
        return velocity(self.shape, self.layers, self.outer, self.inputs)


class HostProgram:
    """The kernels of a plan, compiled for the host at the first launch."""

    def __init__(self, plan: ExpertPlan) -> None:
        self._plan = plan

    @functools.cached_property
    def launch(self):
        source = fused_on_cpu.on_cpu(self._plan.source)
        return fused_on_cpu.build(source, self._plan.macros(), KERNELS).launch


@pytest.fixture(scope="session")
def fused(device):
    """The device, and a function that makes an expert on it.

    Without a GPU the device is the host with 6 multiprocessors.
    """
    if device.memory == "cuda":
        return device, lambda shape, weights, samples: FusedExpert(device, shape, weights, samples)
    host = fused_on_cpu.FusedDoubleDevice(6)

    def make(shape, weights, samples):
        return FusedExpert(host, shape, weights, samples, HostProgram, CPU_TUNING)

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
        pytest.param(SMALL, 3, 33, id="3 samples"),
        pytest.param(changed(fp8_cache=True, capacity=71), 1, 37, id="an FP8 cache"),
        pytest.param(
            changed(dtype="bf16", head_dim=128, rotary_dim=32, heads=3, kv_heads=3, hidden=128, actions=3),
            2, 70, id="bf16, a full cache, heads of 128 that are rotated in part",
        ),
    ],
)  # fmt: skip
def test_a_step_is_that_of_numpy(fused, shape, samples, length):
    model = Model(shape, samples, length)
    found, expected = step(fused, model), model.expected()
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert error < TOLERANCE[shape.dtype], f"relative error {error:.2g}"


@pytest.mark.slow
@pytest.mark.parametrize("clean", [0, 5, SMALL.horizon])
def test_a_step_that_continues_a_chunk_is_that_of_numpy(fused, clean):
    device, make = fused
    model = Model(SMALL, 3, 33)
    weights, tensors, time_row = model.on_device(device)
    previous = model.random.standard_normal((SMALL.horizon, SMALL.actions)).astype(np.float32)
    factors = model.random.standard_normal((3, SMALL.horizon)).astype(np.float32)
    clean_row = model.random.standard_normal(SMALL.hidden).astype(np.float32)
    condition = ConditionedStep(
        *(put(device, array) for array in (previous, factors, np.array([clean]), clean_row))
    )
    make(SMALL, weights, 3).step(tensors, time_row, DT, first=True, conditioned=condition)
    start, inputs = model.inputs.trajectory, model.inputs
    is_clean = np.arange(SMALL.horizon)[:, None] < clean
    inputs.time_row = np.where(is_clean, clean_row, inputs.time_row)
    strength, pull = factors[0, :, None], factors[1, :, None]
    expected = strength * model.expected() + pull * (previous - start)
    found = (device.download(tensors["trajectory"]) - start) / DT
    assert np.abs(found - expected).max() < TOLERANCE["fp16"] * np.abs(expected).max()


@pytest.mark.slow
def test_a_sample_has_the_bits_that_it_has_alone(fused):
    model = Model(SMALL, 3, 33)
    together, trajectory = step(fused, model), model.inputs.trajectory
    for sample in (0, 2):
        model.inputs.trajectory = trajectory[sample : sample + 1]
        np.testing.assert_array_equal(step(fused, model)[0], together[sample])


@pytest.mark.slow
def test_nan_in_one_sample_stays_in_that_sample(fused):
    model = Model(SMALL, 3, 33)
    model.inputs.trajectory[1, 6, 0] = np.nan
    found, expected = step(fused, model), model.expected()
    assert np.isnan(found[1]).all()
    others = [0, 2]
    error = np.abs(found[others] - expected[others]).max() / np.abs(expected[others]).max()
    assert error < TOLERANCE["fp16"], f"relative error {error:.2g}"


class Recorder:
    """A program that keeps the launches of all plans."""

    def __init__(self) -> None:
        self.launches = []

    def launch(self, launch, params) -> None:
        self.launches.append(launch)


@pytest.mark.parametrize("arch, early", [("sm_87", False), ("sm_90", True), ("sm_110", True)])
def test_all_kernels_but_the_first_start_early_where_the_gpu_can(arch, early):
    device, program = fused_on_cpu.FusedDoubleDevice(20), Recorder()
    device.arch = arch
    weights, tensors, time_row = Model(SMALL, 1, 5).on_device(device)
    expert = FusedExpert(device, SMALL, weights, 1, lambda plan: program)
    expert.step(tensors, time_row, DT, first=True)
    expert.step(tensors, time_row, DT, first=False)
    layer = ["qkv", "attention", "o", "gate_up", "down"]
    assert [launch.name for launch in program.launches] == [*layer, *layer, "finish"] * 2
    assert [launch.early for launch in program.launches] == [False, *[early] * 21]


@pytest.mark.parametrize("shape", [ARENA, LARGE])
@pytest.mark.parametrize("multiprocessors, most_shared", [(132, 227 << 10), (16, 163 << 10), (20, 99 << 10)])
def test_blocks_fit_into_shared_memory(shape, multiprocessors, most_shared):
    for samples in (1, 4, 64):
        plan = plan_samples(shape, samples, multiprocessors, most_shared, ExpertTuning())
        launches = [plan.launch(name, samples, False) for name in KERNELS]
        assert max(launch.shared for launch in launches) <= most_shared
        assert max(launch.threads for launch in launches) <= 1024


def test_a_gpu_with_too_little_shared_memory_is_refused():
    with pytest.raises(EngineError, match=r"need \d+ bytes of shared memory, the GPU has 49152"):
        plan_samples(LARGE, 1, 20, 48 << 10, ExpertTuning())


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape, row_tile, arch",
    [(ARENA, 32, "sm_90"), (LARGE, 8, "sm_80"), (LARGE, 8, "sm_90"), (LARGE, 8, "sm_110")],
    ids=["the demo's", "a large one on sm_80", "on sm_90", "on sm_110"],
)
def test_the_kernels_keep_their_variables_in_registers(shape, row_tile, arch):
    plan = ExpertPlan(shape, row_tile, 163 << 10, ExpertTuning())
    report = ptxas_report(expand(plan.source), options(arch, plan))
    frames = re.findall(r"Function properties for (\w+)\n\D*(\d+) bytes stack frame", report)
    assert sorted(frames) == [(name, "0") for name in sorted(KERNELS)]


def test_a_shape_that_the_kernels_do_not_take_is_refused(fused):
    _, make = fused
    with pytest.raises(EngineError, match="head_dim is 96"):
        make(changed(head_dim=96), None, 1)
