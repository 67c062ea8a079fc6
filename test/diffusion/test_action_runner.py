# SPDX-License-Identifier: Apache-2.0
"""ActionRunner with an engine of known velocity, and with the tiny action expert."""

import numpy as np
import pytest

from edgellm_ros.diffusion.action_runner import STEPS_PER_GRAPH, ActionRunner
from edgellm_ros.diffusion.action_space import UnicycleActionSpace
from edgellm_ros.diffusion.chunking import ChunkCondition
from edgellm_ros.diffusion.heads.flow_expert import FlowExpertHead
from edgellm_ros.diffusion.samplers import NOISE_AT_1
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.kernels.random import normal_noise
from edgellm_ros.runtime.batch.linear_kv_cache import LinearKVCache
from edgellm_ros.runtime.prompt.rope import make_rope_table
from fixtures.chunk_reference import continue_frozen, continue_guided, continue_trained
from fixtures.graphs import FLOAT, INT64, helper, save_model
from fixtures.on_device import edited, open_rows


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
    open_rows(device, cache, [(20, 0), (33, -5), (7, 0)])
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
        capacity = config.builder.max_kv_cache_capacity
        head = FlowExpertHead(config.action, capacity, device, kernels, table)
        return ActionRunner(executor, head, device, kernels, 8)

    return make


@pytest.fixture
def runner(make_runner, tiny_engine) -> ActionRunner:
    return make_runner(tiny_engine / "action" / "model.onnx")


@pytest.fixture
def known_velocity(make_runner, config, tmp_path):
    """Function that makes a runner whose engine computes a velocity that is known.

    The engine computes it from trajectory [n,6,2] and time [1], or [6].
    """

    def make(nodes, times: int = 1, initializers=()) -> ActionRunner:
        llm, capacity = config.llm, config.builder.max_kv_cache_capacity
        shape = [1, llm.num_key_value_heads, capacity, llm.head_dim]
        inputs = {
            "trajectory": (FLOAT, ["n", 6, 2]),
            "time": (FLOAT, [times]),
            "rope_cos": (FLOAT, [1, 6, 8]),
            "rope_sin": (FLOAT, [1, 6, 8]),
            "kv_length": (INT64, [1]),
            "cache_rows": (INT64, ["P"]),
        }
        layers = range(llm.num_hidden_layers)
        inputs |= {f"{kind}_cache_{i}": (FLOAT, shape) for i in layers for kind in ("key", "value")}
        outputs = {"velocity": (FLOAT, ["n", 6, 2])}
        path = tmp_path / "known.onnx"
        return make_runner(save_model(path, nodes, inputs, outputs, dict(initializers)))

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
    runner.prepare(2, 2, 3)
    monkeypatch.delattr("edgellm_ros.diffusion.action_runner.normal_noise")
    found = runner.execute(cache.sequence(1), samples=2, steps=2, seed=3, report=always)
    np.testing.assert_array_equal(found, expected)


def test_results_that_are_not_finite_are_an_error_that_names_the_seed(known_velocity, cache):
    runner = known_velocity([helper.make_node("Sqrt", ["trajectory"], ["velocity"])])
    with pytest.raises(EngineError, match=r"not finite \(noise seed 11, 2 steps\)"):
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


@pytest.mark.parametrize("continues", [False, True], ids=["from noise", "continued"])
def test_parts_of_two_requests_that_alternate_have_the_bits_of_those_in_one_go(runner, cache, continues):
    chunk = ChunkCondition(actions=TestChunks.CHUNK, executed=1, delay=2) if continues else None
    requests = {0: (8, 3, 5), 1: (3, STEPS_PER_GRAPH + 4, 6)}  # row: samples, steps, seed
    alone = [runner.execute(cache.sequence(row), *one, always, chunk) for row, one in requests.items()]
    samplings = {row: runner.begin(*one, always, chunk) for row, one in requests.items()}
    while not all(sampling.done for sampling in samplings.values()):
        for row, sampling in samplings.items():
            if not sampling.done:
                runner.queue_part(cache.sequence(row), sampling)
    for sampling, expected in zip(samplings.values(), alone, strict=True):
        np.testing.assert_array_equal(sampling.read(), expected)


def test_each_group_of_many_samples_has_its_own_noise(known_velocity, cache, device):
    runner = known_velocity([helper.make_node("Mul", ["trajectory", "time"], ["velocity"])])
    runner = ActionRunner(runner._executor, runner._head, device, runner._kernels, 20)
    result = runner.execute(cache.sequence(0), samples=20, steps=2, seed=11, report=always)
    noise = normal_noise(11, 20, 12).reshape(20, 6, 2)
    np.testing.assert_allclose(result, noise * 1.25, rtol=1e-6)


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


def test_steps_of_all_groups_of_samples_are_counted(device, runner, cache):
    asked = []
    runner = ActionRunner(runner._executor, runner._head, device, runner._kernels, 20)
    runner.execute(cache.sequence(0), 20, 2, 0, lambda step: asked.append(step) or True)
    groups = 3 if device.max_queued_steps == 0 else 1
    assert asked == list(range(2 * groups))


class Reversed:
    """The tiny engine's head with a time from 1 (noise) to 0 (actions)."""

    sampler = NOISE_AT_1

    def __init__(self, head) -> None:
        self.config, self.space, self.shape, self.bind = head.config, head.space, head.shape, head.bind


class TestReversedTime:
    """A head whose time falls, against the same flow with a time that rises."""

    NODES = (
        helper.make_node("Mul", ["trajectory", "time"], ["product"]),  # dx/dt = x * t
        helper.make_node("Identity", ["product"], ["velocity"]),
    )

    @pytest.fixture
    def reversed_runner(self, known_velocity, device, kernels) -> ActionRunner:
        runner = known_velocity(list(self.NODES))
        return ActionRunner(runner._executor, Reversed(runner._head), device, kernels, 8)

    def test_steps_go_down_from_time_1(self, reversed_runner, cache):
        result = reversed_runner.execute(cache.sequence(0), samples=3, steps=4, seed=11, report=always)
        x = normal_noise(11, 3, 12).reshape(3, 6, 2)
        for step in range(4):
            x = x - np.float32(0.25) * (x * np.float32(1 - step / 4))
        np.testing.assert_allclose(result, x, rtol=1e-5)

    @pytest.mark.parametrize("form", ["guided", "frozen"])
    def test_a_chunk_is_continued_as_with_the_time_that_rises(self, reversed_runner, cache, config, form):
        chunk = ChunkCondition(
            actions=TestChunks.CHUNK, executed=1, delay=2, form=form, max_guidance_weight=3.0
        )
        found = reversed_runner.execute(cache.sequence(0), 3, 5, 11, always, chunk)
        space = config.action.action_space
        previous = (TestChunks.CHUNK.astype(np.float64) - space.mean) / space.std
        previous = np.concatenate([previous[1:], np.zeros((1, 2))])
        noise = normal_noise(11, 3, 12).reshape(3, 6, 2).astype(np.float64)

        def velocity(x: np.ndarray, times: np.ndarray) -> np.ndarray:
            return -x * (1 - times[:, None])  # by the time that rises

        if form == "guided":
            expected = continue_guided(velocity, noise, previous, 2, 5, "linear", 3.0, 5)
        else:
            expected = continue_frozen(velocity, noise, previous, 2, 5, 5)
        np.testing.assert_allclose(found, expected, atol=1e-5)


class TestChunks:
    """Chunks that continue the one before, against the literal formulas in float64."""

    CHUNK = np.array([[0.5, -1], [1, 0.5], [-0.5, 0.3], [0.2, 0.1], [-1, 1], [0.3, 2]], np.float32)

    @pytest.fixture
    def coupled(self, known_velocity):
        """`coupled(times)` makes a runner whose actions depend on each other.

        `times` is the length of the engine's input `time`.
        """

        def make(times: int) -> ActionRunner:
            nodes = [
                helper.make_node("Unsqueeze", ["time", "axis"], ["times"]),
                helper.make_node("Mul", ["trajectory", "times"], ["product"]),
                helper.make_node("ReduceMean", ["product", "axis"], ["mean"], keepdims=1),
                helper.make_node("Sub", ["trajectory", "mean"], ["velocity"]),
            ]
            return known_velocity(nodes, times, {"axis": np.array([1])})

        return make

    @staticmethod
    def velocity(x: np.ndarray, times: np.ndarray) -> np.ndarray:
        return x - (x * times[:, None]).mean(axis=1, keepdims=True)

    def previous(self, config, executed: int) -> np.ndarray:
        """Return the previous chunk in the head's values, shifted and padded."""
        space = config.action_space
        values = (self.CHUNK.astype(np.float64) - space.mean) / space.std
        return np.concatenate([values[executed:], np.zeros((executed, 2))])

    def sample(self, runner, cache, steps: int, **condition) -> np.ndarray:
        chunk = ChunkCondition(actions=self.CHUNK, **condition)
        return runner.execute(cache.sequence(0), 3, steps, 11, always, chunk)

    @property
    def noise(self) -> np.ndarray:
        return normal_noise(11, 3, 12).reshape(3, 6, 2).astype(np.float64)

    @pytest.mark.parametrize("times", [1, 6])
    @pytest.mark.parametrize("schedule", ["linear", "exp", "ones", "zeros"])
    def test_guided_actions_follow_the_formula(self, coupled, cache, config, schedule, times):
        condition = {"executed": 1, "delay": 2, "horizon": 4, "schedule": schedule}
        found = self.sample(coupled(times), cache, 5, max_guidance_weight=3.0, **condition)
        expected = continue_guided(
            self.velocity, self.noise, self.previous(config.action, 1), 2, 4, schedule, 3.0, 5
        )
        np.testing.assert_allclose(found, expected, atol=1e-5)

    @pytest.mark.parametrize("times", [1, 6])
    def test_frozen_actions_follow_the_formula(self, coupled, cache, config, times):
        found = self.sample(coupled(times), cache, 5, executed=1, delay=2, form="frozen")
        expected = continue_frozen(self.velocity, self.noise, self.previous(config.action, 1), 2, 5, 5)
        np.testing.assert_allclose(found, expected, atol=1e-5)

    def test_trained_actions_have_the_time_of_finished_ones(self, coupled, cache, config):
        found = self.sample(coupled(6), cache, 5, executed=1, delay=2, form="trained")
        expected = continue_trained(self.velocity, self.noise, self.previous(config.action, 1), 2, 5)
        np.testing.assert_allclose(found, expected, atol=1e-5)
        kept = UnicycleActionSpace(config.action.action_space).normalise(self.CHUNK[1:3])
        np.testing.assert_array_equal(found[:, :2], np.stack([kept] * 3))

    def test_actions_after_the_trained_ones_are_guided_up_to_the_horizon(self, coupled, cache, config):
        found = self.sample(coupled(6), cache, 5, executed=1, delay=2, horizon=4, form="trained")
        previous = self.previous(config.action, 1)
        expected = continue_trained(self.velocity, self.noise, previous, 2, 5, end=4)
        np.testing.assert_allclose(found, expected, atol=1e-5)
        assert (
            np.abs(found[:, 2:] - continue_trained(self.velocity, self.noise, previous, 2, 5)[:, 2:]).max()
            > 0.01
        )

    def test_more_steps_than_a_graph_has_continue_a_chunk(self, coupled, cache, config):
        steps = STEPS_PER_GRAPH + 3
        found = self.sample(coupled(1), cache, steps, executed=2, delay=1)
        expected = continue_guided(
            self.velocity, self.noise, self.previous(config.action, 2), 1, 4, "linear", steps, steps
        )
        np.testing.assert_allclose(found, expected, atol=1e-5)

    def test_actions_without_a_previous_chunk_keep_their_bits_after_others(self, runner, cache):
        def sample(condition=None):
            return runner.execute(cache.sequence(1), 2, 5, 3, always, condition)

        first, chunk = sample(), ChunkCondition(actions=self.CHUNK, executed=1, delay=2, form="frozen")
        conditioned = sample(chunk)
        assert np.abs(conditioned - first).max() > 0.01
        np.testing.assert_array_equal(sample(), first)
        np.testing.assert_array_equal(sample(chunk), conditioned)

    def test_only_runs_that_continue_a_chunk_use_the_kernel_for_it(self, runner, cache, monkeypatch):
        def refused(*tensors):
            raise AssertionError("a run that continues nothing used the kernel")

        monkeypatch.setattr(runner._kernels, "conditioned_step", refused, raising=False)
        condition = ChunkCondition(actions=self.CHUNK, executed=1, delay=2)
        with pytest.raises(AssertionError, match="continues nothing"):
            runner.execute(cache.sequence(1), 2, 5, 3, always, condition)
        assert runner.execute(cache.sequence(1), 2, 5, 3, always) is not None
