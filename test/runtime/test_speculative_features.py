# SPDX-License-Identifier: Apache-2.0
"""Drafting with adapters, reduced vocabularies, hidden states and conversations."""

import dataclasses
import logging
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from doubles.deferred_runtime import WatchedDevice, queueing
from edgellm_ros.builder import export
from edgellm_ros.cli.quantization.token_runs import record_runs
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.runtime.conversation import Message
from edgellm_ros.runtime.decoding.speculative.drafting_config import (
    SpecDecodeDraftingConfig,
    check_drafting,
    drafting_config,
)
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest
from fixtures.cuda_graphs import use_on_cpu
from fixtures.exported_graphs import knows_lengths
from fixtures.random_head import base_config, write_random_head
from fixtures.requests_for_tests import IMAGE, assert_close, assert_same_with_drafting, request

pytestmark = pytest.mark.slow
EAGLE = SpecDecodeDraftingConfig(3, 3, 10, falls_back=False)
CHAIN = SpecDecodeDraftingConfig(1, 4, 5, falls_back=False)
LOOKUP = SpecDecodeDraftingConfig(1, 7, 8, "lookup", falls_back=False)
TALKING = request("abc abc abc what do you see?", max_tokens=30, logprobs=2)
DRAWING = request("stop", temperature=1.2, seed=3, repetition_penalty=1.2, max_tokens=25)


@pytest.fixture(scope="module", params=[EAGLE, LOOKUP], ids=["eagle", "lookup"])
def drafting(request):
    return request.param


@pytest.fixture(scope="module")
def pair(draft_engine, device, drafting):
    """Runtimes without and with drafting."""
    with (
        LLMInferenceRuntime(draft_engine, device, prefix_cache_bytes=0) as plain,
        LLMInferenceRuntime(draft_engine, device, prefix_cache_bytes=0, drafting=drafting) as runtime,
    ):
        yield plain, runtime


def compare(engine, device, drafting, *batch, **options):
    """Answer a batch without and with drafting; return the second runtime's metrics."""
    with LLMInferenceRuntime(engine, device, **options) as runtime:
        expected = runtime.handle_request(list(batch))
    with LLMInferenceRuntime(engine, device, drafting=drafting, **options) as runtime:
        for one, other in zip(runtime.handle_request(list(batch)), expected, strict=True):
            assert_same_with_drafting(one, other)
        assert runtime.spec_decode_generation_metrics.total_runs > 0
        return runtime.spec_decode_generation_metrics


def test_adapters_of_a_batch_verify_in_groups(pair):
    plain, runtime = pair
    batch = [dataclasses.replace(TALKING, lora=name) for name in ("a", "base", "b", "a")]
    answers = runtime.handle_request(batch)
    for one, other in zip(answers, plain.handle_request(batch), strict=True):
        assert_same_with_drafting(one, other)
    assert len({tuple(answer.token_ids) for answer in answers}) == 3


def test_an_adapter_that_is_added_and_removed(pair, draft_engine):
    for runtime in pair:
        runtime.add_lora("late", draft_engine / "lora" / "b")
    one = dataclasses.replace(TALKING, lora="late")
    assert_same_with_drafting(*(runtime.handle_request(one) for runtime in pair))
    for runtime in pair:
        runtime.remove_lora("late")
    assert_same_with_drafting(*(runtime.handle_request(TALKING) for runtime in pair))


def test_hidden_states_of_prompts(pair):
    plain, runtime = pair
    states = []
    for each in pair:
        each.handle_request([TALKING, DRAWING], output_thinker_embeddings=True)
        states.append(each.pipeline.device.download(each.base_model_hidden_states(0)))
    assert_close(*states)
    assert plain.base_model_input_token_ids == runtime.base_model_input_token_ids


def test_an_engine_with_hidden_states_as_outputs(tiny_checkpoint, tmp_path, device, drafting):
    head = write_random_head(tmp_path / "head", base_config(tiny_checkpoint))
    export(tiny_checkpoint, tmp_path / "engine", draft=head, hidden_state_layers=(1, 3))
    compare(tmp_path / "engine", device, drafting, TALKING, DRAWING)


def test_a_reduced_vocabulary(tiny_checkpoint, tmp_path, device, drafting):
    from safetensors.numpy import save_file

    ids = np.sort(np.random.default_rng(0).permutation(300)[:150])
    stops = EngineConfig.load(export_plain(tiny_checkpoint, tmp_path / "plain")).stop_token_ids
    save_file({"vocab_map": np.union1d(ids, stops).astype(np.int64)}, tmp_path / "map.safetensors")
    head = write_random_head(tmp_path / "head", base_config(tiny_checkpoint))
    engine = tmp_path / "engine"
    export(tiny_checkpoint, engine, draft=head, vocab_map=tmp_path / "map.safetensors")
    compare(engine, device, drafting, TALKING, DRAWING)


def export_plain(checkpoint, directory, **options):
    export(checkpoint, directory, **options)
    return directory


def test_a_conversation_goes_on_from_stored_rows(draft_engine, device, drafting):
    turns = [Message("user", "what do you see?"), Message("assistant", "a box"), Message("user", "where?")]
    ends = []
    for config in (None, drafting):
        with LLMInferenceRuntime(draft_engine, device, drafting=config) as runtime:
            for count in (1, 3):
                sampling = request(max_tokens=12, repetition_penalty=1.3).sampling
                one = LLMGenerationRequest(messages=turns[:count], sampling=sampling)
                ends.append(runtime.handle_request(one))
    for one, other in zip(ends[:2], ends[2:], strict=True):
        assert_same_with_drafting(other, one)
    assert ends[3].reused_tokens > 5


def test_requests_that_turn_drafting_off_alternate_with_others(pair, drafting):
    plain, runtime = pair
    for off in (False, True, False, True):
        one = dataclasses.replace(DRAWING, disable_spec_decode=off)
        runs = runtime.spec_decode_generation_metrics.total_runs
        assert_same_with_drafting(runtime.handle_request(one), plain.handle_request(one))
        assert (runtime.spec_decode_generation_metrics.total_runs == runs) == off


def test_without_drafting_nothing_of_it_is_loaded(draft_engine, device, monkeypatch):
    opened, start = [], EngineExecutor.open.__func__

    def watched(cls, path, *rest):
        opened.append(path.relative_to(draft_engine).as_posix())
        return start(cls, path, *rest)

    monkeypatch.setattr(EngineExecutor, "open", classmethod(watched))
    with LLMInferenceRuntime(draft_engine, device, drafting="off") as runtime:
        assert "llm/model.onnx" in opened
        assert not {"llm/verify.onnx", "draft/model.onnx"} & set(opened)
        assert runtime.speculative_decoding_strategy_name == ""
        assert not runtime.has_draft_model
        runtime.handle_request(TALKING)
        assert vars(runtime.spec_decode_generation_metrics) == vars(
            type(runtime.spec_decode_generation_metrics)()
        )


@pytest.mark.only_on("cpu", reason="brings its own device")
def test_without_drafting_a_head_takes_no_memory_of_the_device(draft_engine, tiny_checkpoint, tmp_path):
    plain = export_plain(tiny_checkpoint, tmp_path / "plain", max_lora_rank=8)
    shutil.copytree(draft_engine / "lora", plain / "lora")
    found = []
    with queueing():
        for engine, drafting in ((draft_engine, None), (plain, None), (draft_engine, LOOKUP)):
            device = WatchedDevice()
            with LLMInferenceRuntime(engine, device, drafting=drafting) as runtime:
                runtime.capture_decoding_cuda_graph()
                runtime.handle_request([TALKING, dataclasses.replace(DRAWING, lora="a")])
            found.append(device.allocations)
    without, expected, with_drafting = found
    assert without == expected
    assert sum(with_drafting) > sum(without)


def test_metrics_name_the_drafter_and_count_what_it_yields(pair, drafting):
    _, runtime = pair
    before = dataclasses.replace(runtime.spec_decode_generation_metrics)
    answer = runtime.handle_request(TALKING)
    found = runtime.spec_decode_generation_metrics
    assert found.strategy == runtime.speculative_decoding_strategy_name == drafting.strategy
    assert runtime.has_draft_model == (drafting is EAGLE)
    assert found.generated_tokens - before.generated_tokens == len(answer.token_ids) - 1
    assert found.tokens_per_verification >= 1
    if runtime.pipeline.device.max_queued_steps == 0:
        assert min(found.draft_seconds, found.verify_seconds, found.accept_seconds) > 0
        assert found.timed_runs == found.total_runs


@pytest.mark.only_on("cpu", reason="brings its own device")
def test_an_asynchronous_device(draft_engine, pair, drafting):
    plain, _ = pair
    batch = [TALKING, DRAWING, request(images=(IMAGE,), max_tokens=9)]
    with queueing(), LLMInferenceRuntime(draft_engine, WatchedDevice(), drafting=drafting) as runtime:
        for _ in range(2):  # the second time from stored prefixes
            answers = runtime.handle_request(batch)
            for one, other in zip(answers, map(plain.handle_request, batch), strict=True):
                assert_same_with_drafting(one, other)
        assert runtime.pipeline.device.most_host_copies > 1


def test_falling_back_and_forth_gives_the_same_answers(draft_engine, device, pair, drafting):
    plain, _ = pair
    config = dataclasses.replace(drafting, falls_back=True)
    with LLMInferenceRuntime(draft_engine, device, prefix_cache_bytes=0, drafting=config) as runtime:
        long = request("stop", max_tokens=120, temperature=1.2, seed=3)
        for one in (long, TALKING):
            assert_same_with_drafting(runtime.handle_request(one), plain.handle_request(one))
        assert runtime.spec_decode_generation_metrics.vanilla_runs > 0


def test_a_failing_draft_engine_ends_in_vanilla_decoding(draft_engine, device, pair, caplog):
    plain, _ = pair
    options = {"prefix_cache_bytes": 0, "drafting": EAGLE, "cuda_graphs": False}  # each run is a call
    with LLMInferenceRuntime(draft_engine, device, **options) as runtime:
        head = runtime.pipeline.drafter.drafter._head
        calls, execute = [], head._engine.executor.execute

        def fails_later(stream):
            calls.append(stream)
            if len(calls) > 6:
                raise EngineError("draft/model.onnx: out of luck")
            execute(stream)

        head._engine.executor.execute = fails_later
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                answers = runtime.handle_request([TALKING, DRAWING])
                for one, other in zip(answers, plain.handle_request([TALKING, DRAWING]), strict=True):
                    assert_same_with_drafting(one, other)
    assert [record.getMessage() for record in caplog.records] == [
        "drafting (eagle) has failed, decoding goes on without it: draft/model.onnx: out of luck"
    ]
    assert len(calls) == 7


def test_the_config_tells_how_many_tokens_an_engine_verifies(draft_engine, tiny_engine):
    with_head, without = EngineConfig.load(draft_engine), EngineConfig.load(tiny_engine)
    assert (with_head.enable_eagle_spec_decode, with_head.max_verify_tree_size) == (True, 64)
    assert (without.enable_eagle_spec_decode, without.max_verify_tree_size) == (False, 61)


class TestRefused:
    @pytest.mark.parametrize(
        ("sizes", "text"),
        [
            ((0, 3, 10), "drafting_top_k must be an integer from 1, got 0"),
            ((2, 0, 10), "drafting_step must be an integer from 1, got 0"),
            ((2, 3, 1), "verify_tree_size must be an integer from 2, got 1"),
            ((2, 3, 10, "medusa"), "strategy must be one of eagle, mtp, dflash, lookup, got 'medusa'"),
            ((10, 4, 200), "verify_tree_size 200: this engine verifies at most 64 tokens"),
            ((30, 4, 20), "need 90 rows of drafted tokens; this engine has 64 (max_draft_tree_size)"),
            ((41, 1, 20), "drafting_top_k 41 exceeds the draft's 40 tokens"),
        ],
    )
    def test_sizes(self, draft_engine, sizes, text):
        with pytest.raises(ValueError, match=text.replace("(", r"\(").replace(")", r"\)")):
            LLMInferenceRuntime(draft_engine, drafting=SpecDecodeDraftingConfig(*sizes))

    @pytest.mark.parametrize(
        ("sizes", "text"),
        [
            ((33, 1, 20), "drafting_top_k 33: on a GPU at most 32"),
            ((1, 257, 20), "drafting_step 257: on a GPU at most 256"),
            (
                (32, 9, 20),
                "the candidates of drafting_top_k 32 and drafting_step 9: 8225: on a GPU at most 8192",
            ),
        ],
    )
    def test_sizes_that_only_a_cpu_takes(self, draft_engine, sizes, text):
        gpu = SimpleNamespace(name="tensorrt", memory="cuda")
        with pytest.raises(ValueError, match=text):
            LLMInferenceRuntime(draft_engine, gpu, drafting=SpecDecodeDraftingConfig(*sizes))

    def test_an_engine_without_a_head(self, tiny_engine):
        with pytest.raises(ValueError, match=r"this engine has no draft head \(edgellm export --draft\)"):
            LLMInferenceRuntime(tiny_engine, drafting="eagle")

    def test_a_tree_larger_than_lookup_may_verify(self, tiny_engine):
        config = SpecDecodeDraftingConfig(1, 100, 90, "lookup")
        with pytest.raises(ValueError, match="verify_tree_size 90: this engine verifies at most 61 tokens"):
            LLMInferenceRuntime(tiny_engine, drafting=config)

    def test_another_word(self, tiny_engine):
        expected = "drafting must be one of auto, off, eagle, mtp, dflash, lookup, got 'fast'"
        with pytest.raises(ValueError, match=expected):
            LLMInferenceRuntime(tiny_engine, drafting="fast")

    def test_a_damaged_table_of_tokens(self, draft_engine, tmp_path):
        from safetensors.numpy import save_file

        engine = tmp_path / "engine"
        shutil.copytree(draft_engine, engine)
        save_file({"token_of_draft_logit": np.full(40, 9999)}, engine / "draft" / "d2t.safetensors")
        with pytest.raises(ValueError, match="d2t"):
            LLMInferenceRuntime(engine, drafting=EAGLE)

    def test_a_request_with_another_type(self):
        with pytest.raises(ValueError, match="disable_spec_decode must be True or False, got 1"):
            LLMGenerationRequest("", disable_spec_decode=1)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_auto_drafts_where_the_engine_has_a_head(draft_engine, on_cpu):
    config = EngineConfig.load(draft_engine)
    assert drafting_config("auto", config, on_cpu) == drafting_config("eagle", config, on_cpu)
    assert drafting_config("auto", dataclasses.replace(config, draft=None), on_cpu) is None


def test_a_runtime_drafts_by_default_where_the_engine_has_a_head(draft_engine, tiny_engine, device):
    for engine, strategy in ((draft_engine, "eagle"), (tiny_engine, "")):
        with LLMInferenceRuntime(engine, device) as runtime:
            assert runtime.speculative_decoding_strategy_name == strategy


@pytest.mark.only_on("cpu", reason="runs are recorded on the CPU")
def test_runs_for_calibration_have_the_inputs_of_each_token_once(draft_engine):
    """The draft head is not used, as a verification has inputs of guesses too."""
    one = request("what do you see?", max_tokens=9)
    (run,) = record_runs(draft_engine, {"one": one})
    with LLMInferenceRuntime(draft_engine) as runtime:
        prompt = runtime.handle_request(one).prompt_tokens
    assert run.tokens == prompt + len(run.answer) - 1


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_auto_takes_a_head_with_little_room_for_drafts(draft_engine, rows, on_cpu, monkeypatch):
    """The longest chain that fits; no draft where not even a chain of one token does."""
    for limit in ("SMALL_HIDDEN_SIZE", "SMALL_HIDDEN_SIZE_ON_GPU"):
        monkeypatch.setattr(f"edgellm_ros.runtime.decoding.speculative.drafting_config.{limit}", 0)
    config = EngineConfig.load(draft_engine)
    assert config.draft is not None
    config = dataclasses.replace(config, draft=dataclasses.replace(config.draft, max_draft_tree_size=rows))
    chosen = drafting_config("auto", config, on_cpu)
    if rows == 1:
        assert chosen is None
        return
    assert chosen is not None
    assert chosen.drafting_step == rows - 1
    check_drafting(chosen, config, on_cpu)


def test_small_dense_models_draft_chains_of_the_kernels_rows_on_a_gpu(draft_engine, monkeypatch):
    config = EngineConfig.load(draft_engine)
    chosen = drafting_config("eagle", config, on_cpu=False)
    assert chosen is not None
    assert chosen.is_chain
    assert chosen.tree_size == 8
    limit = "edgellm_ros.runtime.decoding.speculative.drafting_config.SMALL_HIDDEN_SIZE_ON_GPU"
    monkeypatch.setattr(limit, config.hidden_size)
    larger = drafting_config("eagle", config, on_cpu=False)
    assert larger is not None
    assert not larger.is_chain


def test_large_models_with_an_fp8_kv_cache_draft_chains_on_a_gpu(draft_engine, monkeypatch):
    config = EngineConfig.load(draft_engine)
    limit = "edgellm_ros.runtime.decoding.speculative.drafting_config.SMALL_HIDDEN_SIZE_ON_GPU"
    monkeypatch.setattr(limit, config.hidden_size)
    config = dataclasses.replace(config, builder=dataclasses.replace(config.builder, kv_cache="fp8"))
    chosen = drafting_config("eagle", config, on_cpu=False)
    check_drafting(chosen, config, on_cpu=False)
    assert chosen.is_chain


def test_small_dense_models_draft_longer_chains_on_a_cpu(draft_engine, monkeypatch):
    config = EngineConfig.load(draft_engine)
    sizes = {"drafting_step": 8, "verify_tree_size": 9}
    chosen = drafting_config("eagle", config, on_cpu=True)
    assert chosen is not None
    assert chosen.is_chain
    assert {name: getattr(chosen, name) for name in sizes} == sizes
    monkeypatch.setattr(
        "edgellm_ros.runtime.decoding.speculative.drafting_config.SMALL_HIDDEN_SIZE", config.hidden_size
    )
    larger = drafting_config("eagle", config, on_cpu=True)
    assert larger is not None
    assert (larger.drafting_step, larger.verify_tree_size) == (5, 6)


def test_the_default_chain_fits_the_engine(draft_engine):
    config = EngineConfig.load(draft_engine)
    assert config.draft is not None
    draft = dataclasses.replace(config.draft, max_draft_tree_size=7, max_verify_tree_size=4)
    config = dataclasses.replace(config, draft=draft)
    chosen = drafting_config("eagle", config, on_cpu=True)
    assert chosen is not None
    assert chosen.drafted_rows <= 7
    assert chosen.tree_size <= 4


@pytest.mark.only_on("cpu", reason="a CUDA device takes the variant anyway")
@knows_lengths
def test_engines_that_take_lengths_beside_the_mask(draft_engine, tmp_path):
    """The CPU runs the graphs for CUDA on several tokens of one sequence at a time."""
    engine = tmp_path / "engine"
    shutil.copytree(draft_engine, engine)
    use_on_cpu(engine, "llm/verify", "draft/model")
    answers, trees = zip(*(answers_and_trees(each) for each in (draft_engine, engine)), strict=True)
    for one, other in zip(*answers, strict=True):
        assert_same_with_drafting(one, other)
    assert trees[0] == trees[1]
    assert len(trees[0]) > 10


@pytest.mark.only_on("cpu", reason="a CUDA device takes the variant anyway")
@knows_lengths
def test_chains_run_on_engines_without_a_mask(draft_engine, tmp_path):
    """The graphs for CUDA and chains, on the CPU."""
    engine = tmp_path / "engine"
    shutil.copytree(draft_engine, engine)
    for graph in (engine / "llm" / "verify", engine / "draft" / "model"):
        shutil.copy(f"{graph}.chain.cuda.onnx", f"{graph}.chain.cpu.onnx")
    answers, trees = zip(*(answers_and_trees(each, CHAIN) for each in (draft_engine, engine)), strict=True)
    for one, other in zip(*answers, strict=True):
        assert_same_with_drafting(one, other)
    assert trees[0] == trees[1]
    assert len(trees[0]) > 10


@pytest.mark.only_on("cpu", reason="a CUDA device takes the variant anyway")
@knows_lengths
def test_lookup_verifies_chains_on_an_engine_that_takes_lengths_only(draft_engine, tmp_path):
    """The graph for CUDA of an engine without a head, on the CPU."""
    engine = tmp_path / "engine"
    shutil.copytree(draft_engine, engine)
    config = EngineConfig.load(engine)
    dataclasses.replace(config, draft=None).save(engine)
    use_on_cpu(engine, "llm/model")
    batch = [TALKING, DRAWING, request(images=(IMAGE,), max_tokens=9)]
    answers = []
    for drafting in (None, LOOKUP):
        with LLMInferenceRuntime(engine, "cpu", drafting=drafting) as runtime:
            assert not runtime.pipeline.runner._decode.inputs.has_mask
            answers.append(runtime.handle_request(batch))
    for one, other in zip(*answers, strict=True):
        assert_same_with_drafting(one, other)
    assert runtime.spec_decode_generation_metrics.tokens_per_verification > 1


def answers_and_trees(engine, drafting=EAGLE):
    """Answer a batch; return the tokens of all trees too."""
    batch, trees = [TALKING, DRAWING, request(images=(IMAGE,), max_tokens=9)], []
    with LLMInferenceRuntime(engine, drafting=drafting) as runtime:
        runner, execute = runtime.pipeline.runner, runtime.pipeline.runner.execute_tree_decoding_step

        def watched(embeds, tree, *rest):
            trees.append(tree.tokens.array.tolist())
            execute(embeds, tree, *rest)

        runner.execute_tree_decoding_step = watched
        return runtime.handle_request(batch), trees
