# SPDX-License-Identifier: Apache-2.0
"""LLMEngineRunner: decode steps compute what one prefill of all tokens computes."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.runtime.engines.llm_engine_runner import LLMEngineRunner
from edgellm_ros.runtime.engines.prompt_inputs import PromptRun, upload_prompts
from fixtures.on_device import assert_same_up_to_rounding, put

HIDDEN, VOCABULARY = 48, 302


@pytest.fixture(scope="module")
def runner(device, kernels, tiny_engine) -> LLMEngineRunner:
    config = EngineConfig.load(tiny_engine)
    executor = EngineExecutor.open(tiny_engine / "llm" / "model.onnx", device)
    return LLMEngineRunner(executor, config, device, kernels)


@pytest.fixture(scope="module")
def embeds() -> np.ndarray:
    """[4, 20, H] random inputs of four sequences."""
    return np.random.default_rng(0).standard_normal((4, 20, HIDDEN)).astype(np.float32)


@pytest.fixture(scope="module")
def opened() -> list:
    """The sequences in the KV cache, by row."""
    return []


@pytest.fixture(scope="module")
def prefill(device, runner, opened):
    """Function that prefills inputs [B, S, H] of these lengths; returns logits [B, V]."""

    def run(inputs, lengths) -> np.ndarray:
        batch, tokens, _ = inputs.shape
        opened.clear()
        for row in range(batch):
            opened.append(SimpleNamespace(kv_length=0, rope_delta=0))
            runner.kv_cache.open(row, opened[row])
        logits = device.empty((batch, 1, VOCABULARY), np.float32)
        positions = np.broadcast_to(np.arange(tokens, dtype=np.float32), (batch, 3, tokens))
        deepstack = [device.zeros(inputs.shape, np.float32) for _ in range(2)]
        runner.execute_prefill_step(
            put(device, inputs),
            upload_prompts(device, lengths, positions),
            PromptRun(tokens, range(batch), (), first=(True,) * batch),
            deepstack_embeds=deepstack,
            output_logits=logits,
        )
        for sequence, length in zip(opened, lengths, strict=True):
            sequence.kv_length = length
        return device.download(logits)[:, 0]

    return run


@pytest.fixture(scope="module")
def decode(device, runner, opened):
    """Function that decodes inputs [B, H], one token each; returns logits [B, V]."""

    def run(inputs) -> np.ndarray:
        logits = device.empty((len(inputs), 1, VOCABULARY), np.float32)
        runner.execute_vanilla_decoding_step(put(device, inputs[:, None]), logits)
        runner.kv_cache.commit(put(device, np.ones(len(inputs), np.int64)))
        for sequence in opened:
            sequence.kv_length += 1
        return device.download(logits)[:, 0]

    return run


def test_decoding_equals_prefill_of_the_longer_prompt(prefill, decode, embeds):
    prefill(embeds[:, :8], [8] * 4)
    for token in range(8, 14):
        step = decode(embeds[:, token])
    whole = prefill(embeds[:, :14], [14] * 4)
    np.testing.assert_allclose(step, whole, atol=1e-5)


def test_prompts_of_different_lengths_do_not_see_padding_or_each_other(prefill, embeds):
    lengths = [3, 20, 11, 2]
    together = prefill(embeds, lengths)
    for row, length in enumerate(lengths):
        alone = prefill(embeds[row : row + 1, :length], [length])
        assert_same_up_to_rounding(together[row], alone[0])


@pytest.mark.parametrize("ended", [0, 1, 2])
def test_evicting_a_sequence_does_not_change_the_others(runner, opened, prefill, decode, embeds, ended):
    lengths = [8, 6, 7]
    prefill(embeds[:3, :8], lengths)
    decode(embeds[:3, 8])
    order = [sequence for sequence in range(3) if sequence != ended]
    for target, source in enumerate(order):
        if source != target:
            runner.kv_cache.move(source, target)
    del opened[ended]
    steps = [decode(embeds[order, token]) for token in (9, 10)]
    for place, sequence in enumerate(order):
        mine = slice(sequence, sequence + 1)
        prefill(embeds[mine, :8], lengths[mine])
        decode(embeds[mine, 8])
        for step, token in zip(steps, (9, 10), strict=True):
            assert_same_up_to_rounding(step[place], decode(embeds[mine, token])[0])


def test_an_engine_of_another_capacity_is_an_error_that_names_both(device, kernels, tiny_engine):
    config = EngineConfig.load(tiny_engine)
    executor = EngineExecutor.open(tiny_engine / "llm" / "model.onnx", device)
    builder = dataclasses.replace(config.builder, max_kv_cache_capacity=500)
    other = dataclasses.replace(config, builder=builder)
    with pytest.raises(EngineError, match=r"448.*max_kv_cache_capacity 500"):
        LLMEngineRunner(executor, other, device, kernels)


def test_the_runner_has_the_engine_s_config(runner, tiny_engine):
    config = EngineConfig.load(tiny_engine)
    assert runner.config.rope_config == config.llm.rope
    assert runner.config.use_context_dependent_rope
    assert runner.config.num_attention_layers == runner.config.num_decoder_layers == 3
    assert (runner.config.num_kv_heads, runner.config.head_dim, runner.config.rotary_dim) == (2, 16, 16)
    assert (runner.config.hidden_size, runner.config.vocab_size) == (HIDDEN, VOCABULARY)
    assert (runner.config.reduced_vocab_size, runner.config.output_vocab_size) == (0, VOCABULARY)
    assert (runner.config.num_mamba_layers, runner.config.conv_kernel) == (0, 0)
    limits = config.builder
    assert runner.config.max_supported_batch_size == limits.max_batch_size
    assert runner.config.max_supported_input_length == limits.max_input_len
    assert runner.config.max_kv_cache_capacity == runner.kv_cache.capacity == limits.max_kv_cache_capacity
    assert runner.config.max_supported_lora_rank == limits.max_lora_rank
    assert not runner.config.enable_eagle_spec_decode
    assert runner.config.max_verify_tree_size == 61  # of the verification profile
    assert runner.config.num_deepstack_features == 2
    assert runner.config.image_token_id == config.special_tokens.image_token_id
    assert runner.config.audio_token_id == config.special_tokens.audio_token_id
