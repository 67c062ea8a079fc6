# SPDX-License-Identifier: Apache-2.0
"""Euler steps in fused kernels: the engine's trajectories, and when it samples.

Without a GPU the kernels are their doubles in NumPy: the tests are about the runtime then, not the kernels.
"""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

from doubles.deferred_runtime import WatchedDevice, queueing
from doubles.fused_expert import HostFusedExpert
from edgellm_ros.builder import export
from edgellm_ros.diffusion.action_runner import STEPS_PER_GRAPH, ActionRunner
from edgellm_ros.diffusion.chunking import FORMS, ChunkCondition
from edgellm_ros.diffusion.heads.flow_expert import FlowExpertHead
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine.tensor import float8
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.fused.description.expert import FUSED_EXPERT_FILE, FusedExpertModel
from edgellm_ros.fused.loading import actions as fused_actions
from edgellm_ros.fused.loading import agreement, availability
from edgellm_ros.fused.loading.availability import AUTO, ENGINE, FUSED
from edgellm_ros.kernels import load_kernels
from edgellm_ros.runtime.batch.linear_kv_cache import LinearKVCache
from edgellm_ros.runtime.prompt.rope import make_rope_table
from fixtures import on_device
from fixtures.decoder_checkpoint import write_decoder_checkpoint
from fixtures.fused_decoding import SIZES
from fixtures.hybrid_checkpoints import add_action_expert
from fixtures.on_device import open_rows

pytestmark = [
    pytest.mark.only_on("cpu", "cuda", reason="TensorRT has no fused kernels"),
    pytest.mark.kernel_doubles,
]
on_host = pytest.mark.only_on("cpu", reason="the double of the kernels")
LENGTHS = 20, 33, 7  # of the cache's rows
CHUNK = np.linspace(-1, 1, 12, dtype=np.float32).reshape(6, 2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model whose action expert the kernels take.

    The expert's layers read both caches, the last one first.
    """
    folder = write_decoder_checkpoint(tmp_path_factory.mktemp("expert") / "checkpoint", "qwen3", **SIZES)
    sizes = {"layers": 3, "hidden_size": 64, "intermediate_size": 96}
    add_action_expert(folder, [1, 0, 1], rtc_max_delay=4, **sizes)
    return folder


@pytest.fixture(scope="module")
def engine(checkpoint):
    limits = {"max_input_len": 64, "max_kv_cache_capacity": 96}
    export(checkpoint, checkpoint.parent / "engine", precision="fp16", **limits)
    return checkpoint.parent / "engine"


@pytest.fixture(scope="module")
def fp8_engine(checkpoint):
    """The engine with an FP8 KV cache."""
    limits = {"max_input_len": 64, "max_kv_cache_capacity": 96}
    export(checkpoint, checkpoint.parent / "fp8", precision="fp16", kv_cache="fp8", **limits)
    return checkpoint.parent / "fp8"


class Actions:
    """An action runner with its fused kernels, and a KV cache of random values."""

    def __init__(self, engine, device) -> None:
        config, kernels = EngineConfig.load(engine), load_kernels(device)
        llm, builder = config.llm, config.builder
        self.device, self.cache_count = device, config.action.kv_caches
        dtype = float8() if config.kv_cache_type == "fp8" else np.dtype(np.float16)
        self.cache = LinearKVCache(
            device,
            kernels,
            layers=llm.num_hidden_layers,
            max_batch_size=3,
            kv_heads=llm.num_key_value_heads,
            capacity=builder.max_kv_cache_capacity,
            head_dim=llm.head_dim,
            dtype=dtype,
        )
        open_rows(device, self.cache, [(length, 0) for length in LENGTHS])
        random = np.random.default_rng(0)
        for tensor in self.cache.bindings(range(3)).values():
            device.upload(tensor, random.standard_normal(tensor.shape).astype(dtype))
        self.fused = fused_actions.load_fused_actions(engine, config, device, FUSED)
        executor = EngineExecutor.open(engine / "action" / "model.onnx", device, shared=self.fused.shared)
        table = make_rope_table(llm.rope, builder.max_kv_cache_capacity + 6, device)
        head = FlowExpertHead(config.action, builder.max_kv_cache_capacity, device, kernels, table)
        self.runner = ActionRunner(executor, head, device, kernels, 8, self.fused)

    def sample(self, fused: bool, row: int, samples: int, steps: int, condition=None) -> np.ndarray:
        self.runner.uses_fused = fused
        return self.runner.execute(self.cache.sequence(row), samples, steps, 5, lambda step: True, condition)

    def choose(self, caplog) -> list[str]:
        """Let the times choose; return what the log says."""
        one = self.cache.sequence(2)
        with caplog.at_level(logging.INFO, fused_actions.__name__):
            fused_actions.choose_by_time(self.device, self.runner, one, self.cache_count)
        return [record.getMessage() for record in caplog.records if record.name == fused_actions.__name__]


@pytest.fixture
def hosted(monkeypatch):
    """The kernels' double on a CPU; on a GPU the kernels are real."""
    if on_device.chosen == "cpu":
        monkeypatch.setattr(availability, "device_problem", lambda device: None)
        monkeypatch.setattr(fused_actions, "make_expert", HostFusedExpert)


@pytest.fixture
def actions(hosted, engine, device) -> Actions:
    return Actions(engine, device)


def test_trajectories_over_an_fp8_cache_are_those_of_the_engine(hosted, fp8_engine, device):
    actions = Actions(fp8_engine, device)
    expected, found = (actions.sample(fused, 1, 3, 4) for fused in (False, True))
    np.testing.assert_allclose(found, expected, atol=2e-2 * np.abs(expected).max())


@pytest.mark.parametrize(("row", "samples", "steps"), [(0, 1, 4), (1, 3, 1), (2, 8, STEPS_PER_GRAPH + 2)])
def test_trajectories_are_those_of_the_engine(actions, row, samples, steps):
    expected, found = (actions.sample(fused, row, samples, steps) for fused in (False, True))
    np.testing.assert_allclose(found, expected, atol=2e-2 * np.abs(expected).max())
    assert np.abs(found - expected).max() > 0  # two ways of rounding


@pytest.mark.parametrize("form", FORMS)
def test_chunks_are_continued_as_in_the_engine(actions, form):
    condition = ChunkCondition(actions=CHUNK, executed=1, delay=3, form=form)
    plain, steps = actions.sample(True, 1, 3, 4), STEPS_PER_GRAPH + 2
    for number in (4, steps):
        expected, found = (actions.sample(fused, 1, 3, number, condition) for fused in (False, True))
        np.testing.assert_allclose(found, expected, atol=2e-2 * np.abs(expected).max())
    np.testing.assert_array_equal(actions.sample(True, 1, 3, 4), plain)
    assert np.abs(found[:, 4] - plain[:, 4]).max() > 0.1


def test_the_same_seed_gives_the_same_bits(actions):
    first = actions.sample(True, 1, 2, 5)
    actions.sample(True, 0, 8, 3)
    for _ in range(3):
        np.testing.assert_array_equal(actions.sample(True, 1, 2, 5), first)


@on_host
def test_all_euler_steps_of_the_kernels_are_one_graph(hosted, engine):
    with queueing():
        actions = Actions(engine, WatchedDevice())
        first, expert = actions.sample(True, 1, 2, 5), actions.fused.expert
        steps = expert.steps
        assert steps == 2 * 5  # once run, once recorded
        np.testing.assert_array_equal(actions.sample(True, 1, 2, 5), first)
        assert expert.steps == steps
        actions.cache._sequences[1].kv_length += 40  # the graph is that of every length
        actions.sample(True, 1, 2, 5)
        assert expert.steps == steps


def test_the_engines_weights_are_where_the_description_says(engine, checkpoint):
    model = FusedExpertModel.load(engine / FUSED_EXPERT_FILE)
    tensors = load_file(checkpoint / "action_expert" / "model.safetensors")
    contents = (engine / "action" / model.file).read_bytes()

    def joined(names: str) -> np.ndarray:
        parts = [tensors[f"{name}.weight"].T for name in names.split()]
        return np.concatenate(parts, axis=-1).astype(np.float16)

    attention = "layers.1.self_attn"
    for weight, names in (
        (model.in_proj, "in_proj"),
        (model.time.first, "time_mlp.0"),
        (model.time.second, "time_mlp.2"),
        (model.layers[1].qkv, f"{attention}.q_proj {attention}.k_proj {attention}.v_proj"),
        (model.layers[1].k_norm, f"{attention}.k_norm"),
        (model.layers[1].o, f"{attention}.o_proj"),
        (model.layers[1].post_norm, "layers.1.post_attention_layernorm"),
        (model.layers[1].gate_up, "layers.1.mlp.gate_proj layers.1.mlp.up_proj"),
        (model.layers[1].down, "layers.1.mlp.down_proj"),
        (model.out_proj, "out_proj"),
    ):
        found = np.frombuffer(contents, np.float16, weight.size, weight.offset).reshape(weight.shape)
        np.testing.assert_array_equal(found, joined(names), err_msg=weight.name)


class TestTheChoice:
    """The faster one samples, if both sample the same trajectories."""

    pytestmark = on_host

    def test_the_faster_one_samples(self, actions, caplog, monkeypatch):
        clock = SimpleNamespace(now=0.0)

        def execute(*arguments):
            clock.now += 1e-3 if actions.runner.uses_fused else 4e-3
            return np.ones((1, 6, 2), np.float32)

        monkeypatch.setattr(agreement.time, "perf_counter", lambda: clock.now)
        monkeypatch.setattr(actions.runner, "execute", execute)
        assert actions.choose(caplog) == [
            "the fused kernels sample actions (ms for 4 Euler steps of one trajectory after 96 tokens: "
            "1.000 fused, 4.000 engine)"
        ]
        assert actions.runner.uses_fused

    def test_a_slower_kernel_is_not_used(self, actions, caplog, monkeypatch):
        step = actions.fused.expert.step

        def slow(*arguments):
            agreement.time.sleep(0.01)
            step(*arguments)

        monkeypatch.setattr(actions.fused.expert, "step", slow)
        (line,) = actions.choose(caplog)
        assert line.startswith("the engine samples actions (ms for 4 Euler steps")
        assert not actions.runner.uses_fused

    def test_other_trajectories_are_not_used(self, actions, caplog, monkeypatch):
        monkeypatch.setattr(actions.fused.expert, "step", lambda *arguments: None)
        (line,) = actions.choose(caplog)
        assert "the fused kernels' trajectories differ from the engine's by" in line
        assert not actions.runner.uses_fused

    def test_trajectories_that_do_not_repeat_are_not_used(self, actions, caplog, monkeypatch):
        random, step = np.random.default_rng(0), actions.fused.expert.step

        def shaken(tensors, *arguments):
            step(tensors, *arguments)
            tensors["trajectory"].array[...] += 1e-4 * random.standard_normal()

        monkeypatch.setattr(actions.fused.expert, "step", shaken)
        assert actions.choose(caplog) == [
            "the engine samples actions: the fused kernels' trajectories differ from run to run"
        ]
        assert not actions.runner.uses_fused


class TestWhenTheEngineSamples:
    """The reason is in the log with `auto`, and in the error with `fused`."""

    pytestmark = on_host

    def assert_reason(self, caplog, reason, engine, device, config=None):
        config = config or EngineConfig.load(engine)
        with pytest.raises(EngineError) as error:
            fused_actions.load_fused_actions(engine, config, device, FUSED)
        assert str(error.value) == f"the action head's fused kernels are not available: {reason}"
        with caplog.at_level(logging.INFO, fused_actions.__name__):
            assert fused_actions.load_fused_actions(engine, config, device, AUTO) is None
        assert [record.getMessage() for record in caplog.records] == [f"the engine samples actions: {reason}"]
        assert fused_actions.load_fused_actions(engine, config, device, ENGINE) is None

    def test_on_a_cpu(self, caplog, engine, device):
        self.assert_reason(caplog, "it needs the device 'cuda', not 'cpu'", engine, device)

    def test_in_fp32(self, hosted, caplog, engine, device):
        config = dataclasses.replace(EngineConfig.load(engine), precision="fp32")
        reason = "the engine has fp32, the kernels take fp16 and bf16"
        self.assert_reason(caplog, reason, engine, device, config)

    def test_without_a_description_of_the_weights(self, hosted, caplog, engine, device, tmp_path):
        reason = "the engine has no action/fused.json: export it again"
        self.assert_reason(caplog, reason, tmp_path, device, EngineConfig.load(engine))

    def test_with_a_shape_that_the_kernels_do_not_take(self, hosted, caplog, engine, device):
        config = EngineConfig.load(engine)
        config = dataclasses.replace(config, action=dataclasses.replace(config.action, num_attention_heads=3))
        reason = "the kernels do not take this action head: 3 heads share 2 KV heads"
        self.assert_reason(caplog, reason, engine, device, config)

    def test_with_kernels_that_cannot_be_compiled(self, hosted, caplog, engine, device, monkeypatch):
        def fail(*arguments):
            raise EngineError("no NVRTC")

        monkeypatch.setattr(fused_actions, "make_expert", fail)
        self.assert_reason(caplog, "no NVRTC", engine, device)
