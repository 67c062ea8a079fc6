# SPDX-License-Identifier: Apache-2.0
"""ActionRunner with an engine of known velocity, and with the tiny action expert."""

from types import SimpleNamespace

import numpy as np
import pytest

from edgellm_ros.diffusion.action_runner import ActionRunner
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.kernels.random import normal_noise
from edgellm_ros.runtime.batch.linear_kv_cache import LinearKVCache
from edgellm_ros.runtime.prompt.rope import make_rope_table
from fixtures.graphs import FLOAT, INT64, helper, save_model
from fixtures.on_device import edited


@pytest.fixture(scope="module")
def config(tiny_engine) -> EngineConfig:
    return EngineConfig.load(tiny_engine)


@pytest.fixture
def cache(device, kernels, config) -> LinearKVCache:
    llm, builder = config.llm, config.builder
    cache = LinearKVCache(
        device,
        kernels,
        layers=llm.num_hidden_layers,
        max_batch_size=3,
        kv_heads=llm.num_key_value_heads,
        capacity=builder.max_kv_cache_capacity,
        head_dim=llm.head_dim,
        dtype=np.dtype(np.float32),
    )
    for row, (length, delta) in enumerate([(20, 0), (33, -5), (7, 0)]):
        cache.open(row, SimpleNamespace(kv_length=length, rope_delta=delta))
    rng = np.random.default_rng(0)
    for tensor in cache.bindings(range(3)).values():
        device.upload(tensor, rng.standard_normal(tensor.shape).astype(np.float32))
    return cache


@pytest.fixture
def make_runner(device, kernels, config):
    """Function that makes a runner of an engine file."""

    def make(path) -> ActionRunner:
        positions = config.builder.max_kv_cache_capacity + 6
        table = make_rope_table(config.llm.rope, positions, device)
        executor = EngineExecutor.open(path, device)
        return ActionRunner(executor, config.action, device, kernels, table, 8)

    return make


@pytest.fixture
def runner(make_runner, tiny_engine) -> ActionRunner:
    return make_runner(tiny_engine / "action" / "model.onnx")


@pytest.fixture
def known_velocity(make_runner, config, tmp_path):
    """Make a runner whose engine computes velocity from trajectory [n,6,2] and time [1]."""

    def make(nodes) -> ActionRunner:
        llm, capacity = config.llm, config.builder.max_kv_cache_capacity
        shape = [1, llm.num_key_value_heads, capacity, llm.head_dim]
        inputs = {
            "trajectory": (FLOAT, ["n", 6, 2]),
            "time": (FLOAT, [1]),
            "rope_cos": (FLOAT, [1, 6, 8]),
            "rope_sin": (FLOAT, [1, 6, 8]),
            "kv_length": (INT64, [1]),
            "cache_rows": (INT64, ["P"]),
        }
        layers = range(llm.num_hidden_layers)
        inputs |= {f"{kind}_cache_{i}": (FLOAT, shape) for i in layers for kind in ("key", "value")}
        outputs = {"velocity": (FLOAT, ["n", 6, 2])}
        return make_runner(save_model(tmp_path / "known.onnx", nodes, inputs, outputs))

    return make


def always(step: int) -> bool:
    return True


def test_euler_steps_follow_the_velocity_from_noise_to_data(known_velocity, cache):
    nodes = [
        helper.make_node("Mul", ["trajectory", "time"], ["product"]),  # dx/dt = x * t
        helper.make_node("Identity", ["product"], ["velocity"]),
    ]
    runner = known_velocity(nodes)
    result = runner.execute(cache.sequence(0), samples=3, steps=4, seed=11, report=always)
    x = normal_noise(11, 3, 12).reshape(3, 6, 2)
    for step in range(4):
        x = x + np.float32(0.25) * (x * np.float32(step / 4))
    np.testing.assert_allclose(result, x, rtol=1e-6)


def test_noise_that_was_prepared_is_not_computed_again(runner, cache, monkeypatch):
    expected = runner.execute(cache.sequence(1), samples=2, steps=2, seed=3, report=always)
    runner.prepare(2, 3)
    monkeypatch.delattr("edgellm_ros.diffusion.action_runner.normal_noise")
    found = runner.execute(cache.sequence(1), samples=2, steps=2, seed=3, report=always)
    np.testing.assert_array_equal(found, expected)


def test_results_that_are_not_finite_are_an_error_that_names_the_seed(known_velocity, cache):
    runner = known_velocity([helper.make_node("Sqrt", ["trajectory"], ["velocity"])])
    with pytest.raises(EngineError, match=r"not finite \(noise seed 11, 2 Euler steps\)"):
        runner.execute(cache.sequence(0), samples=3, steps=2, seed=11, report=always)


def test_the_same_seed_gives_the_same_bits_and_another_gives_another_trajectory(runner, cache):
    first = runner.execute(cache.sequence(1), samples=4, steps=5, seed=3, report=always)
    runner.execute(cache.sequence(0), samples=8, steps=2, seed=9, report=always)
    again = runner.execute(cache.sequence(1), samples=4, steps=5, seed=3, report=always)
    np.testing.assert_array_equal(first, again)
    other = runner.execute(cache.sequence(1), samples=4, steps=5, seed=4, report=always)
    assert np.abs(other - first).max() > 0.1
    assert np.abs(first[0] - first[1]).max() > 0.1


def test_samples_are_those_of_a_smaller_number_of_samples(runner, cache):
    many = runner.execute(cache.sequence(1), samples=8, steps=5, seed=3, report=always)
    few = runner.execute(cache.sequence(1), samples=2, steps=5, seed=3, report=always)
    np.testing.assert_allclose(many[:2], few, atol=1e-5)


def test_the_trajectory_depends_on_the_committed_rows_of_its_own_cache_only(device, runner, cache):
    before = runner.execute(cache.sequence(1), samples=1, steps=3, seed=3, report=always)
    bindings = cache.bindings(range(3))
    for tensor in bindings.values():
        with edited(device, tensor) as rows:
            rows[1, :, 33:] += 1.0
            rows[[0, 2]] += 1.0
    np.testing.assert_array_equal(runner.execute(cache.sequence(1), 1, 3, 3, always), before)
    with edited(device, bindings["value_cache_0"]) as rows:
        rows[1, :, 32] += 1.0
    assert not np.array_equal(runner.execute(cache.sequence(1), 1, 3, 3, always), before)


def test_the_cache_is_only_read(device, runner, cache):
    before = {name: device.download(tensor) for name, tensor in cache.bindings(range(3)).items()}
    runner.execute(cache.sequence(1), samples=2, steps=3, seed=3, report=always)
    for name, tensor in cache.bindings(range(3)).items():
        np.testing.assert_array_equal(device.download(tensor), before[name])


def test_a_cancelled_run_stops_at_its_euler_step(runner, cache):
    asked = []
    assert runner.execute(cache.sequence(0), 1, 10, 0, lambda step: asked.append(step) or step < 3) is None
    assert asked == [0, 1, 2, 3]
