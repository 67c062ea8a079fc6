# SPDX-License-Identifier: Apache-2.0
"""The two phases agree: what decoding computes token by token is what prefill computes at once."""

import dataclasses

import numpy as np
import pytest

from edgellm_ros.engine.device import CpuDevice
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.kernels import load_kernels
from edgellm_ros.runtime.config import EngineConfig
from edgellm_ros.runtime.llm_engine_runner import LLMEngineRunner
from edgellm_ros.runtime.llm_engine_runner_config import LLMEngineRunnerConfig

DEVICE = CpuDevice()
HIDDEN, VOCABULARY = 48, 302


@pytest.fixture(scope="module")
def runner(tiny_engine) -> LLMEngineRunner:
    config = EngineConfig.load(tiny_engine)
    executor = EngineExecutor.open(tiny_engine / "llm" / "model.onnx", DEVICE)
    return LLMEngineRunner(executor, LLMEngineRunnerConfig.from_engine(config), DEVICE, load_kernels(DEVICE))


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


def decode(runner, inputs) -> np.ndarray:
    logits = DEVICE.empty((len(inputs), 1, VOCABULARY), np.float32)
    runner.execute_vanilla_decoding_step(put(inputs[:, None]), logits)
    return DEVICE.download(logits)[:, 0]


def test_decoding_equals_prefill_of_the_longer_prompt(runner, embeds):
    prefill(runner, embeds[:, :8], [8] * 4)
    for token in range(8, 14):
        step = decode(runner, embeds[:, token])
    whole = prefill(runner, embeds[:, :14], [14] * 4)
    np.testing.assert_allclose(step, whole, atol=1e-5)


def test_prompts_of_different_lengths_do_not_see_padding_or_each_other(runner, embeds):
    lengths = [3, 20, 11, 2]
    together = prefill(runner, embeds, lengths)
    for row, length in enumerate(lengths):
        alone = prefill(runner, embeds[row : row + 1, :length], [length])
        np.testing.assert_array_equal(together[row], alone[0])


@pytest.mark.parametrize("ended", [0, 1, 2])
def test_when_one_sequence_ends_the_others_go_on_as_if_alone(runner, embeds, ended):
    lengths = [8, 6, 7]
    prefill(runner, embeds[:3, :8], lengths)
    decode(runner, embeds[:3, 8])
    runner.kv_cache.evict(ended)
    order = [sequence for sequence in range(3) if sequence != ended]
    steps = [decode(runner, embeds[order, token]) for token in (9, 10)]
    for place, sequence in enumerate(order):
        mine = slice(sequence, sequence + 1)
        prefill(runner, embeds[mine, :8], lengths[mine])
        decode(runner, embeds[mine, 8])
        for step, token in zip(steps, (9, 10), strict=True):
            np.testing.assert_array_equal(step[place], decode(runner, embeds[mine, token])[0])


def test_the_cpu_captures_no_graph_and_goes_on_working(runner, embeds):
    tensors = DEVICE.empty((2, 1, HIDDEN), np.float32), DEVICE.empty((2, 1, VOCABULARY), np.float32)
    assert runner.capture_vanilla_decoding_cuda_graph(*tensors) is False
    assert np.isfinite(prefill(runner, embeds[:1, :4], [4])).all()


def test_an_engine_of_another_capacity_is_an_error_that_names_both(tiny_engine):
    config = EngineConfig.load(tiny_engine)
    executor = EngineExecutor.open(tiny_engine / "llm" / "model.onnx", DEVICE)
    other = dataclasses.replace(LLMEngineRunnerConfig.from_engine(config), max_kv_cache_capacity=500)
    with pytest.raises(EngineError, match=r"448.*max_kv_cache_capacity 500"):
        LLMEngineRunner(executor, other, DEVICE, load_kernels(DEVICE))


def test_the_runner_tells_what_it_was_made_for(runner, tiny_engine):
    config = EngineConfig.load(tiny_engine)
    assert runner.config.rope_config == config.llm.rope
    assert runner.config.use_context_dependent_rope
    assert runner.config.num_attention_layers == runner.config.num_decoder_layers == 3
    assert (runner.config.num_kv_heads, runner.config.head_dim, runner.config.rotary_dim) == (2, 16, 16)
    assert (runner.config.hidden_size, runner.config.vocab_size) == (HIDDEN, VOCABULARY)
    limits = config.builder
    assert runner.config.max_supported_batch_size == limits.max_batch_size
    assert runner.config.max_supported_input_length == limits.max_input_len
    assert runner.config.max_kv_cache_capacity == runner.kv_cache.capacity == limits.max_kv_cache_capacity
    assert runner.config.max_supported_lora_rank == limits.max_lora_rank
    assert runner.config.num_deepstack_features == 2
    assert runner.config.image_token_id == config.special_tokens.image_token_id
    assert runner.config.audio_token_id == config.special_tokens.audio_token_id
