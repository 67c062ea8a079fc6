# SPDX-License-Identifier: Apache-2.0
"""Engines whose KV cache has 8 bits per value (E4M3)."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from doubles.scripted_drafter import draft_by_script
from edgellm_ros.builder import export, inspect
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.runtime.batch.linear_kv_cache import check_cache_type
from edgellm_ros.runtime.decoding.speculative.drafting_config import drafting_config
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.hybrid_checkpoints import write_qwen3_5_checkpoint
from fixtures.on_device import for_runtime
from fixtures.prefix_requests import REQUESTS, SYSTEM
from fixtures.random_head import base_config, write_random_head
from fixtures.requests_for_tests import IMAGE, assert_same_answer, assert_same_with_drafting, request

pytestmark = pytest.mark.only_on("cpu", "cuda", reason="TensorRT writes to no FP8 cache")
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)


@pytest.fixture(scope="module")
def engine(tiny_checkpoint, tmp_path_factory):
    """An engine whose model triggers a trajectory when it is asked about IMAGE."""
    directory = tmp_path_factory.mktemp("fp8") / "engine"
    config = export(tiny_checkpoint, directory, kv_cache="fp8")
    with LLMInferenceRuntime(directory, for_runtime("cpu")) as runtime:
        words = runtime.handle_request(request(images=(IMAGE,), max_tokens=30)).token_ids
    token = next(word for i, word in enumerate(words) if i >= 5 and word not in words[:i])
    action = dataclasses.replace(config.action, future_start_token_id=token)
    dataclasses.replace(config, action=action, stop_token_ids=(*config.stop_token_ids, token)).save(directory)
    return directory


@pytest.fixture(scope="module")
def recomputing(engine, runtime_device):
    """A runtime without prefix cache."""
    with LLMInferenceRuntime(engine, runtime_device, prefix_cache_bytes=0) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def reusing(engine, runtime_device):
    with LLMInferenceRuntime(engine, runtime_device) as runtime:
        yield runtime


def test_keys_values_and_pages_take_one_byte_per_value(reusing):
    llm, builder = reusing.config.llm, reusing.config.builder
    row = 2 * llm.num_attention_layers * llm.num_key_value_heads * llm.head_dim
    cache = reusing.pipeline.runner.kv_cache
    assert cache.dtype == FLOAT8
    assert cache.nbytes == row * builder.max_kv_cache_capacity * builder.max_batch_size
    pages = reusing.pipeline.reuse.pages
    assert pages.page_bytes == row * 32
    assert pages.capacity_bytes == cache.nbytes


def test_inspect_reports_a_quarter_of_the_memory_of_an_fp32_cache(engine, tiny_engine):
    small, large = inspect(engine).memory, inspect(tiny_engine).memory
    assert 4 * small.kv_cache == large.kv_cache
    assert 4 * small.kv_cache_per_token == large.kv_cache_per_token
    assert large.total - small.total == 2 * (large.kv_cache - small.kv_cache)


@pytest.mark.slow
@pytest.mark.only_on("cpu", reason="prefills of other lengths differ in last bits on a GPU")
def test_answers_and_trajectories_with_reuse_have_the_bits_of_those_without(reusing, recomputing):
    expected = [recomputing.handle_request(each) for each in REQUESTS]
    assert any(answer.actions is not None for answer in expected)
    for _ in range(2):
        for each, answer in zip(REQUESTS, expected, strict=True):
            assert_same_answer(reusing.handle_request(each), answer)
    assert reusing.prefill_metrics.reused_tokens > 400


@pytest.mark.only_on("cpu", reason="batches of other sizes differ in last bits on a GPU")
def test_a_batch_gives_the_answers_of_its_requests_alone(recomputing):
    several = [REQUESTS[index] for index in (0, 3, 1, 9)]  # they end one after the other
    for each, answer in zip(several, recomputing.handle_request(several), strict=True):
        assert_same_answer(answer, recomputing.handle_request(each))


@pytest.mark.only_on("cpu", reason="prefills of other lengths differ in last bits on a GPU")
def test_a_saved_prefix_is_reused_by_another_runtime(engine, reusing, recomputing, runtime_device, tmp_path):
    reusing.clear_prefix_cache()
    reusing.gen_and_save_system_prompt_kv_cache(SYSTEM)
    reusing.save_prefix_cache(tmp_path / "pages.safetensors")
    with LLMInferenceRuntime(engine, runtime_device) as other:
        assert other.load_prefix_cache(tmp_path / "pages.safetensors") > 0
        assert_same_answer(other.handle_request(REQUESTS[0]), recomputing.handle_request(REQUESTS[0]))
        assert other.prefill_metrics.reused_tokens > 32


def test_pages_of_a_cache_of_another_type_are_refused(reusing, tiny_engine, runtime_device, tmp_path):
    reusing.gen_and_save_system_prompt_kv_cache(SYSTEM)
    reusing.save_prefix_cache(tmp_path / "pages.safetensors")
    with (
        LLMInferenceRuntime(tiny_engine, runtime_device) as other,
        pytest.raises(ValueError, match="saved by another engine"),
    ):
        other.load_prefix_cache(tmp_path / "pages.safetensors")


@pytest.mark.slow
@pytest.mark.only_on("cpu", reason="prefills of other lengths differ in last bits on a GPU")
def test_a_hybrid_model_reuses_prefixes_of_its_fp8_cache(tmp_path, runtime_device):
    export(write_qwen3_5_checkpoint(tmp_path / "checkpoint"), tmp_path / "engine", kv_cache="fp8")
    with (
        LLMInferenceRuntime(tmp_path / "engine", runtime_device, prefix_cache_bytes=0) as recomputing,
        LLMInferenceRuntime(tmp_path / "engine", runtime_device) as reusing,
    ):
        assert reusing.pipeline.runner.kv_cache.dtype == FLOAT8
        for prompt in ("go to the red box", "go to the red box", "go to the red box and wait"):
            one = request(prompt, system_prompt=SYSTEM, max_tokens=8)
            assert reusing.handle_request(one).token_ids == recomputing.handle_request(one).token_ids
        assert reusing.prefill_metrics.reused_tokens > 0


@pytest.mark.parametrize("decode", ["auto", "engine", "fused"])
def test_a_gpu_without_the_type_is_refused_before_anything_is_loaded(engine, decode):
    older = SimpleNamespace(memory="cuda", arch="sm_87", description="Orin (sm_87)")
    with pytest.raises(EngineError, match=r"needs a GPU of sm_89 or later, not Orin \(sm_87\)"):
        LLMInferenceRuntime(engine, older, decode=decode)


def test_a_gpu_with_the_type_and_other_caches_on_older_ones_are_not_refused():
    check_cache_type(SimpleNamespace(arch="sm_89", description=""), "fp8")
    check_cache_type(SimpleNamespace(arch="sm_87", description=""), "fp16")


def test_a_config_with_another_type_is_refused(engine):
    with pytest.raises(ValueError, match="kv_cache must be fp8 or None, got 'int8'"):
        dataclasses.replace(EngineConfig.load(engine).builder, kv_cache="int8")


@pytest.mark.slow
def test_a_draft_head_drafts_chains(tiny_checkpoint, tmp_path, runtime_device):
    head = write_random_head(tmp_path / "head", base_config(tiny_checkpoint))
    config = export(tiny_checkpoint, tmp_path / "engine", kv_cache="fp8", draft=head)
    chain = drafting_config("auto", config, runtime_device == "cpu")
    assert chain.is_chain
    asked = request(images=(IMAGE,), max_tokens=30)
    options = {"prefix_cache_bytes": 0}
    with LLMInferenceRuntime(tmp_path / "engine", runtime_device, drafting=None, **options) as runtime:
        expected = runtime.handle_request(asked)
    chain = dataclasses.replace(chain, falls_back=False)
    with LLMInferenceRuntime(tmp_path / "engine", runtime_device, drafting=chain, **options) as runtime:
        draft_by_script(runtime, chain.drafting_step, chain.tree_size, right=0.7).answers = lambda one: (
            expected.token_ids
        )
        assert_same_with_drafting(runtime.handle_request(asked), expected)
        assert runtime.spec_decode_generation_metrics.tokens_per_verification > 1.3
