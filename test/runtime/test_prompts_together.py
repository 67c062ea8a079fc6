# SPDX-License-Identifier: Apache-2.0
"""On a graph for CUDA, prompts of a batch of which nothing is cached run together.

Here the CPU loads the graph in half precision. Its GroupQueryAttention rotates the tokens of every sequence
as those of the first one, so here the first prompt is the longest, or the model has no RoPE.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import pytest

from doubles.deferred_runtime import WatchedDevice, queueing, used
from edgellm_ros.builder import export
from edgellm_ros.runtime import assemble
from edgellm_ros.runtime.batch.linear_kv_cache import LinearKVCache
from edgellm_ros.runtime.engines import engine_runs
from edgellm_ros.runtime.engines.attention_inputs import AttentionInputs
from edgellm_ros.runtime.engines.engine_runs import cut_rows
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.prefix.prefix_cache import PAGE
from edgellm_ros.runtime.prompt.buckets import bucket_of
from edgellm_ros.runtime.prompt.rope import make_rope_table
from fixtures.cuda_graphs import use_on_cpu
from fixtures.decoder_checkpoint import write_decoder_checkpoint
from fixtures.exported_graphs import knows_lengths
from fixtures.hybrid_checkpoints import write_nemotron_h_checkpoint
from fixtures.requests_for_tests import request

pytestmark = [pytest.mark.only_on("cpu", reason="a CUDA device takes the variant anyway"), knows_lengths]
LIMITS = {"max_batch_size": 4, "max_input_len": 128, "max_kv_cache_capacity": 320}
TEXT = "go to the red box and then turn left at the door "
TEXTS = [TEXT * 2, "what do you see?", TEXT, "stop"]  # the longest one is the first


def requests(texts: list[str] = TEXTS) -> list:
    return [request(text, max_tokens=6, logprobs=2) for text in texts]


def export_for_cpu(checkpoint: Path, engine: Path, **options) -> Path:
    """Export an engine whose graph for CUDA the CPU loads."""
    export(checkpoint, engine, **{**LIMITS, **options})
    use_on_cpu(engine, "llm/model")
    return engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("mistral")  # its norms are nodes, which a CPU runs too
    return export_for_cpu(write_decoder_checkpoint(root / "c", "mistral"), root / "engine", precision="fp16")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("nemotron_h")  # without RoPE
    return export_for_cpu(write_nemotron_h_checkpoint(root / "c"), root / "engine", precision="fp16")


@contextmanager
def opened(engine: Path, pads: bool = True, **options) -> Iterator[tuple[LLMInferenceRuntime, list]]:
    """Open a runtime; the list gets sequences and tokens of each prefill's run."""
    options = {"drafting": "off", "prefix_cache_bytes": 0, **options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "pads_prompts", lambda device: pads)
        runtime = LLMInferenceRuntime(engine, "cpu", **options)
    runs: list[tuple[int, int]] = []

    def note(tensors) -> None:
        sequences, tokens, _ = tensors["inputs_embeds"].shape
        if tokens > 1:
            runs.append((sequences, tokens))

    with runtime:
        runtime.pipeline.runner.prefill_executor.observe(note)
        yield runtime, runs


def assert_equal(answers, others) -> None:
    """Compare tokens, and their probabilities up to rounding."""
    for found, expected in zip(answers, others, strict=True):
        assert found.token_ids == expected.token_ids
        values = [[value for step in each.logprobs for _, value in step] for each in (found, expected)]
        np.testing.assert_allclose(*values, atol=2e-2)


@pytest.mark.parametrize("pads", [False, True], ids=["exact", "padded"])
def test_prompts_of_a_batch_run_together_and_answer_as_they_do_alone(engine, pads):
    with opened(engine, pads) as (runtime, runs):
        alone = [runtime.handle_request(each) for each in requests()]
        runs.clear()
        assert_equal(runtime.handle_request(requests()), alone)
        longest = alone[0].prompt_tokens
        assert runs == [(4, bucket_of(longest) if pads else longest)]


@pytest.mark.slow
def test_recurrent_layers_run_several_prompts_together(hybrid):
    texts = ["stop", TEXT * 2, "what do you see?"]
    with opened(hybrid) as (runtime, runs):
        alone = [runtime.handle_request(each) for each in requests(texts)]
        runs.clear()
        assert_equal(runtime.handle_request(requests(texts)), alone)
        assert [sequences for sequences, _ in runs] == [3]


def test_a_prompt_with_a_cached_prefix_runs_alone(engine):
    with opened(engine, prefix_cache_bytes=1 << 22) as (runtime, runs), opened(engine) as (plain, _):
        runtime.handle_request(requests([TEXT * 2]))
        runs.clear()
        texts = [TEXT * 2 + "go", "what do you see?", "stop", TEXT * 2 + "stop"]
        answers = runtime.handle_request(requests(texts))
        assert [answer.reused_tokens > PAGE for answer in answers] == [True, False, False, True]
        assert [sequences for sequences, _ in runs] == [1, 2, 1]
        assert_equal(answers, [plain.handle_request(each) for each in requests(texts)])


def test_prompts_of_a_batch_do_not_reuse_the_few_tokens_that_all_prompts_begin_with(engine):
    with opened(engine, prefix_cache_bytes=1 << 22) as (runtime, runs):
        runtime.handle_request(request("stop"))
        assert 0 < runtime.handle_request(request("what do you see?")).reused_tokens < PAGE
        runs.clear()
        answers = runtime.handle_request(requests([TEXT, "left"]))
        assert [answer.reused_tokens for answer in answers] == [0, 0]
        assert [sequences for sequences, _ in runs] == [2]


def test_only_the_first_parts_of_long_prompts_run_together(engine):
    texts = [TEXT * 4, TEXT * 4 + "go", TEXT * 3]
    with opened(engine) as (runtime, runs):
        alone = [runtime.handle_request(each) for each in requests(texts)]
        assert min(answer.prompt_tokens for answer in alone) > LIMITS["max_input_len"]
        assert len(runs) == 2 * len(texts)
        runs.clear()
        answers = runtime.handle_request(requests(texts))
        assert [sequences for sequences, _ in runs] == [3, 1, 1, 1]
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in alone]


def test_a_run_has_a_limited_number_of_tokens(engine, monkeypatch):
    with opened(engine) as (runtime, runs):
        runtime.handle_request(requests())
        ((_, tokens),) = runs
        for most, expected in ((3 * tokens, [3, 1]), (2 * tokens + 1, [2, 2]), (tokens - 1, [1] * 4)):
            monkeypatch.setattr(engine_runs, "MOST_PROMPT_TOKENS", most)
            runs.clear()
            runtime.handle_request(requests())
            assert runs == [(sequences, tokens) for sequences in expected]


def test_a_batch_of_prompts_is_recorded_when_it_runs_for_the_second_time(engine):
    batch = [request(text, max_tokens=1) for text in TEXTS]
    options = {"drafting": "off", "prefix_cache_bytes": 0}
    with queueing(), LLMInferenceRuntime(engine, WatchedDevice(), **options) as runtime:
        assert [used(runtime, *batch) for _ in range(3)] == [(0, 0), (0, 2), (2, 0)]


CASES = [("fp32", None, False), ("fp16", None, True), ("bf16", None, True), ("fp16", "fp8", False)]


@pytest.mark.parametrize(("precision", "kv_cache", "expected"), CASES)
def test_prompts_run_together_in_half_precision_unless_the_cache_is_fp8(
    tiny_checkpoint, tmp_path, device, kernels, precision, kv_cache, expected
):
    config = export(tiny_checkpoint, tmp_path, precision=precision, kv_cache=kv_cache, **LIMITS)
    graph = onnx.load(tmp_path / "llm" / "model.cuda.onnx", load_external_data=False).graph
    (key_cache,) = (each for each in graph.input if each.name == "key_cache_0")
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(key_cache.type.tensor_type.elem_type))
    sizes = {"layers": 1, "max_batch_size": 2, "kv_heads": 1, "capacity": 8, "head_dim": 16}
    inputs = AttentionInputs(
        [each.name for each in graph.input],
        config.rope_config,
        device=device,
        kernels=kernels,
        cache=LinearKVCache(device, kernels, **sizes, dtype=dtype),
        rope_table=make_rope_table(config.rope_config, 8, device),
        max_tokens=4,
    )
    assert inputs.needs_one_sequence_per_run(2)
    assert inputs.takes_first_prompts == expected


def test_groups_are_adjacent_rows_with_one_adapter_that_may_join():
    a, b = object(), object()

    def cut(adapters, joins, most=9):
        return [(rows.start, rows.stop) for rows in cut_rows(adapters, joins, most)]

    assert cut([a], [False]) == [(0, 1)]
    assert cut([a] * 4, [True] * 4) == [(0, 4)]
    assert cut([a, a, b, b], [True] * 4) == [(0, 2), (2, 4)]
    assert cut([a] * 5, [True, True, False, True, True]) == [(0, 2), (2, 3), (3, 5)]
    assert cut([a] * 3, [False] * 3) == [(0, 1), (1, 2), (2, 3)]
    assert cut([a] * 5, [True] * 5, most=2) == [(0, 2), (2, 4), (4, 5)]
    assert cut([a] * 2, [True] * 2, most=0) == [(0, 1), (1, 2)]
