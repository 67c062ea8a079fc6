# SPDX-License-Identifier: Apache-2.0
"""The two phases agree: what decoding computes token by token is what prefill computes at once."""

import numpy as np
import pytest

from edgellm_ros.engine.device import CpuDevice
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.kernels import load_kernels
from edgellm_ros.runtime.config import BuilderConfig, EngineConfig
from edgellm_ros.runtime.llm_engine_runner import LLMEngineRunner

DEVICE = CpuDevice()
HIDDEN, VOCABULARY = 48, 302


@pytest.fixture(scope="module")
def runner(tiny_engine) -> LLMEngineRunner:
    config = EngineConfig.load(tiny_engine)
    executor = EngineExecutor.open(tiny_engine / "llm" / "model.onnx", DEVICE)
    return LLMEngineRunner(executor, config.llm, config.builder, DEVICE, load_kernels(DEVICE))


@pytest.fixture(scope="module")
def embeds() -> np.ndarray:
    """[4, 20, H] random inputs of four sequences."""
    return np.random.default_rng(0).standard_normal((4, 20, HIDDEN)).astype(np.float32)


def put(array) -> object:
    tensor = DEVICE.empty(array.shape, array.dtype)
    DEVICE.upload(tensor, np.ascontiguousarray(array))
    return tensor


def prefill(runner, inputs, lengths) -> np.ndarray:
    """Logits [B, V] after prompts of the given lengths, inputs [B, S, H]."""
    batch, tokens, _ = inputs.shape
    logits = DEVICE.empty((batch, 1, VOCABULARY), np.float32)
    positions = np.broadcast_to(np.arange(tokens), (batch, 3, tokens))
    deepstack = [DEVICE.zeros(inputs.shape, np.float32) for _ in range(2)]
    runner.execute_prefill_step(put(inputs), lengths, positions, [0] * batch, deepstack, logits)
    return DEVICE.download(logits)[:, 0]


def decode(runner, inputs, advance) -> np.ndarray:
    logits = DEVICE.empty((len(inputs), 1, VOCABULARY), np.float32)
    runner.execute_vanilla_decoding_step(put(inputs[:, None]), np.array(advance), logits)
    return DEVICE.download(logits)[:, 0]


def test_decoding_equals_prefill_of_the_longer_prompt(runner, embeds):
    prefill(runner, embeds[:, :8], [8] * 4)
    for token in range(8, 14):
        step = decode(runner, embeds[:, token], [1] * 4)
    whole = prefill(runner, embeds[:, :14], [14] * 4)
    np.testing.assert_allclose(step, whole, atol=1e-5)


def test_prompts_of_different_lengths_do_not_see_padding_or_each_other(runner, embeds):
    lengths = [3, 20, 11, 2]
    together = prefill(runner, embeds, lengths)
    for row, length in enumerate(lengths):
        alone = prefill(runner, embeds[row : row + 1, :length], [length])
        np.testing.assert_array_equal(together[row], alone[0])


def test_a_sequence_that_has_ended_does_not_move_while_others_go_on(runner, embeds):
    prefill(runner, embeds[:2, :8], [5, 8])
    decode(runner, embeds[:2, 8], [1, 1])
    decode(runner, embeds[:2, 9], [0, 1])
    decode(runner, embeds[:2, 10], [0, 1])
    assert runner.kv_cache.lengths.tolist() == [6, 11]
    late = decode(runner, embeds[:2, 11], [1, 1])
    prefill(runner, embeds[:1, :5], [5])
    decode(runner, embeds[:1, 8], [1])
    np.testing.assert_array_equal(late[0], decode(runner, embeds[:1, 11], [1])[0])


def test_a_smaller_batch_goes_on_as_before(runner, embeds):
    prefill(runner, embeds[:3, :8], [8, 6, 7])
    runner.kv_cache.set_active_batch_size(1)
    step = decode(runner, embeds[:1, 8], [1])
    prefill(runner, embeds[:1, :8], [8])
    np.testing.assert_array_equal(step, decode(runner, embeds[:1, 8], [1]))


def test_the_cpu_captures_no_graph_and_goes_on_working(runner, embeds):
    tensors = DEVICE.empty((2, 1, HIDDEN), np.float32), DEVICE.empty((2, 1, VOCABULARY), np.float32)
    assert runner.capture_vanilla_decoding_cuda_graph(*tensors) is False
    assert np.isfinite(prefill(runner, embeds[:1, :4], [4])).all()


def test_an_engine_of_another_capacity_is_an_error_that_names_both(tiny_engine):
    config = EngineConfig.load(tiny_engine)
    executor = EngineExecutor.open(tiny_engine / "llm" / "model.onnx", DEVICE)
    other = BuilderConfig(max_kv_cache_capacity=500)
    with pytest.raises(EngineError, match=r"384.*max_kv_cache_capacity 500"):
        LLMEngineRunner(executor, config.llm, other, DEVICE, load_kernels(DEVICE))
