# SPDX-License-Identifier: Apache-2.0
"""Hybrids in the runtime: batches, evictions, recorded steps, reused prefixes."""

from __future__ import annotations

import dataclasses
import json

import pytest

from edgellm_ros.builder import export
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, LLMGenerationResponse, SamplingParams
from fixtures.hybrid_checkpoints import write_nemotron_h_checkpoint, write_qwen3_5_checkpoint
from fixtures.requests_for_tests import assert_same_answer

pytestmark = pytest.mark.slow
WRITERS = {"nemotron_h": write_nemotron_h_checkpoint, "qwen3_5": write_qwen3_5_checkpoint}
SYSTEM = "turn left at the red box "
LIMITS = {"go": 12, "go to the red box and then turn left at the door " * 2: 3, "turn": 12, "to the door": 5}


@pytest.fixture(scope="module", params=WRITERS)
def engine(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    export(WRITERS[request.param](folder / "checkpoint"), folder / "engine")
    return folder / "engine"


@pytest.fixture(scope="module")
def batch() -> list[LLMGenerationRequest]:
    return [
        LLMGenerationRequest(text, SYSTEM, sampling=SamplingParams(max_tokens=limit), logprobs=3)
        for text, limit in LIMITS.items()
    ]


@pytest.fixture(scope="module")
def alone(engine, batch, runtime_device) -> list[LLMGenerationResponse]:
    """The answer to each request in a batch of its own, without a prefix cache."""
    with LLMInferenceRuntime(engine, runtime_device, prefix_cache_bytes=0) as runtime:
        return [runtime.handle_request(request) for request in batch]


def test_the_config_has_the_sizes_of_the_recurrent_layers(engine):
    config = EngineConfig.load(engine)
    told = json.loads((engine.parent / "checkpoint" / "config.json").read_text())
    if config.model_type == "nemotron_h":
        inner = told["mamba_num_heads"] * told["mamba_head_dim"]
        sizes = told["mamba_num_heads"], told["mamba_head_dim"], told["ssm_state_size"]
        convolved = inner + 2 * told["n_groups"] * told["ssm_state_size"], told["conv_kernel"]
        layers = [told["hybrid_override_pattern"].count(letter) for letter in "M*"]
    else:
        told = told.get("text_config", told)
        keys = told["linear_num_key_heads"] * told["linear_key_head_dim"]
        values = told["linear_num_value_heads"] * told["linear_value_head_dim"]
        sizes = told["linear_num_value_heads"], told["linear_value_head_dim"], told["linear_key_head_dim"]
        convolved = 2 * keys + values, told["linear_conv_kernel_dim"]
        layers = [told["layer_types"].count(kind) for kind in ("linear_attention", "full_attention")]
    assert [config.num_mamba_layers, config.num_attention_layers] == layers
    assert (config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size) == sizes
    assert (config.conv_dim, config.conv_kernel) == convolved


def tokens(responses) -> list[list[int]]:
    return [response.token_ids for response in responses]


def test_requests_of_a_batch_are_answered_as_alone_while_others_leave(engine, batch, alone, runtime_device):
    with LLMInferenceRuntime(engine, runtime_device, prefix_cache_bytes=0) as runtime:
        for order in (slice(None), slice(None, None, -1)):
            for answer, expected in zip(runtime.handle_request(batch[order]), alone[order], strict=True):
                assert_same_answer(answer, expected)


def test_recorded_steps_give_the_same_answers(engine, batch, alone, runtime_device):
    with LLMInferenceRuntime(engine, runtime_device, prefix_cache_bytes=0) as runtime:
        runtime.capture_decoding_cuda_graph()
        for size in (4, 3):
            for answer, expected in zip(runtime.handle_request(batch[:size]), alone[:size], strict=True):
                assert_same_answer(answer, expected)


def test_a_saved_system_prompt_is_reused_with_its_state(engine, batch, alone, runtime_device):
    with LLMInferenceRuntime(engine, runtime_device) as runtime:
        saved = runtime.gen_and_save_system_prompt_kv_cache(SYSTEM)
        found = runtime.handle_request(batch)
        assert [response.reused_tokens for response in found] == [saved] * len(batch)
        assert tokens(found) == tokens(alone)


def test_a_prompt_without_a_saved_state_reuses_nothing(engine, batch, alone, runtime_device):
    other = dataclasses.replace(batch[1], prompt="to the door")
    with LLMInferenceRuntime(engine, runtime_device) as runtime:
        runtime.handle_request(batch[0])
        assert runtime.handle_request(other).reused_tokens == 0
        again = runtime.handle_request(batch[0]).reused_tokens  # the other prompt left it here
        assert 0 < again < 40
        assert runtime.handle_request(batch[2]).token_ids == alone[2].token_ids


def test_a_budget_without_room_for_a_state_is_named(engine, runtime_device):
    with (
        LLMInferenceRuntime(engine, runtime_device, prefix_cache_bytes=0) as runtime,
        pytest.raises(ValueError, match="has room for 0 of"),
    ):
        runtime.gen_and_save_system_prompt_kv_cache(SYSTEM)
