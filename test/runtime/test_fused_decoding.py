# SPDX-License-Identifier: Apache-2.0
"""Decode steps in the fused kernels: the engine's answers, and when it decodes.

Without a GPU the kernels are their doubles in NumPy: the tests are about the runtime then, not the kernels.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import shutil
from contextlib import nullcontext

import numpy as np
import pytest

from doubles.deferred_runtime import WatchedDevice, queueing
from doubles.fused_decoder import HostFusedDecoder, HostFusedPrefill
from edgellm_ros.builder import export
from edgellm_ros.engine.device import CpuDevice
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.fused.description.decoder import FUSED_FILE
from edgellm_ros.fused.loading import decoder as loading
from edgellm_ros.runtime import prefill
from edgellm_ros.runtime.decoding import fused_choice as choice
from edgellm_ros.runtime.decoding.speculative.drafting_config import SpecDecodeDraftingConfig
from edgellm_ros.runtime.engines.llm_engine_runner import LLMEngineRunner
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures import on_device
from fixtures.fused_decoding import SIZES, export_decoder, fused_on_host
from fixtures.gguf_files import write_gguf
from fixtures.hybrid_checkpoints import write_nemotron_h_checkpoint, write_qwen3_5_checkpoint
from fixtures.quantized_checkpoint import write_quantized_checkpoint
from fixtures.requests_for_tests import IMAGE, request
from fixtures.tiny_adapter import write_adapter

pytestmark = [
    pytest.mark.only_on("cpu", "cuda", reason="TensorRT has no fused decoding"),
    pytest.mark.kernel_doubles,
]
on_host = pytest.mark.only_on("cpu", reason="the double of the kernels")
HYBRID = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
REQUESTS = [
    request("what do you see?", max_tokens=20),
    request("hello", max_tokens=12),
    request("x" * 100, max_tokens=30, repetition_penalty=1.3),
]


@pytest.fixture
def decoders():
    """The decoders that runtimes have made; none on a GPU, where the kernels are real."""
    with fused_on_host() if on_device.chosen == "cpu" else nullcontext([]) as made:
        yield made


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A decoder with biases and its own LM head of 306 tokens, for two hidden states."""
    changes = {"tie_word_embeddings": False, "num_key_value_heads": 1, "vocab_size": 306}
    root = tmp_path_factory.mktemp("llama")
    return export_decoder(root, "llama", changes, hidden_state_layers=(1, 2), max_batch_size=3)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    """A decoder with norms of heads, windows, and the embedding table as LM head."""
    return export_decoder(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="module")
def rounded(tmp_path_factory):
    """A decoder with layers in 4 bits and an LM head in 8."""
    changes = {"tie_word_embeddings": False, "vocab_size": 320}
    options = {"quantize": "int4", "group_size": 32}
    return export_decoder(tmp_path_factory.mktemp("rounded"), "qwen3", changes, **options)


@pytest.fixture(scope="module")
def fp8_weights(tmp_path_factory):
    """A decoder whose layers are published in FP8."""
    root = tmp_path_factory.mktemp("fp8_weights")
    write_quantized_checkpoint(root / "checkpoint", "fp8", sizes=SIZES)
    export(root / "checkpoint", root / "engine", precision="fp16")
    return root / "engine"


@pytest.fixture(scope="module")
def k_quants(tmp_path_factory):
    """A decoder whose layers have blocks of two types, as llama.cpp's Q4_K_M."""
    root = tmp_path_factory.mktemp("k_quants")
    others = dict.fromkeys(("blk.1.attn_v.weight", "blk.1.ffn_down.weight"), "Q6_K")
    write_gguf(root / "model.gguf", "llama", "Q4_K", kinds=others)
    export(root / "model.gguf", root / "engine", precision="fp16")
    return root / "engine"


@pytest.fixture(scope="module")
def act_order(tmp_path_factory):
    """A decoder whose layers are published in 4 bits, their inputs sorted by groups."""
    root = tmp_path_factory.mktemp("act_order")
    write_quantized_checkpoint(root / "checkpoint", "gptq", act_order=True, sizes=SIZES)
    export(root / "checkpoint", root / "engine", precision="fp16")
    return root / "engine"


@pytest.fixture(scope="module")
def fp8_cache(tmp_path_factory):
    """A decoder with an FP8 KV cache."""
    return export_decoder(tmp_path_factory.mktemp("fp8_cache"), "qwen3", kv_cache="fp8")


@pytest.fixture(scope="module")
def delta_net(tmp_path_factory):
    """A hybrid of gated delta nets and gated attention."""
    sizes = {**HYBRID, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32}
    sizes |= {"linear_value_head_dim": 32, "tie_word_embeddings": True}
    root = tmp_path_factory.mktemp("delta_net")
    export(write_qwen3_5_checkpoint(root / "c", **sizes), root / "engine", precision="fp16")
    return root / "engine"


@pytest.fixture(scope="module")
def mamba2(tmp_path_factory):
    """A hybrid of Mamba2, attention without RoPE and layers of one block."""
    sizes = {**HYBRID, "hybrid_override_pattern": "M-M*-M", "mamba_num_heads": 8, "mamba_head_dim": 16}
    sizes |= {"n_groups": 2, "ssm_state_size": 32, "use_bias": False, "vocab_size": 304}
    root = tmp_path_factory.mktemp("mamba2")
    export(write_nemotron_h_checkpoint(root / "c", **sizes), root / "engine", precision="fp16")
    return root / "engine"


@pytest.fixture(scope="module")
def omni(tiny_checkpoint, acting_engine, tmp_path_factory):
    """The model of `acting_engine` in fp16, with an adapter `a`."""
    directory = tmp_path_factory.mktemp("omni")
    export(tiny_checkpoint, directory, precision="fp16", max_lora_rank=4)
    write_adapter(directory / "lora" / "a", tiny_checkpoint, r=4)
    mine, acting = EngineConfig.load(directory), EngineConfig.load(acting_engine)
    dataclasses.replace(mine, action=acting.action, stop_token_ids=acting.stop_token_ids).save(directory)
    return directory


def answers(engine, requests, decode, device="cpu", **options):
    with LLMInferenceRuntime(engine, device, decode=decode, **options) as runtime:
        return [answer.token_ids for answer in runtime.handle_request(requests)]


def steps(decoders) -> int:
    return sum(decoder.steps for decoder in decoders)


@on_host
@pytest.mark.parametrize(
    "name",
    ["llama", "qwen3", "rounded", "fp8_weights", "k_quants", "act_order", "fp8_cache", "delta_net", "mamba2"],
)
def test_the_tokens_are_those_of_the_engine(request, decoders, name):
    engine = request.getfixturevalue(name)
    found = answers(engine, REQUESTS, "fused")
    assert found == answers(engine, REQUESTS, "engine")
    assert steps(decoders) == max(map(len, found)) - 1 >= 19  # the first token is from the prefill


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "rounded", "fp8_weights", "k_quants", "act_order", "fp8_cache"]
)
def test_a_step_has_the_engines_logits_and_kv_rows(request, decoders, device, name):
    found = {}
    for decode in ("engine", "fused"):
        with LLMInferenceRuntime(request.getfixturevalue(name), device, decode=decode) as runtime:
            found[decode] = [step_of(runtime, device, *sizes) for sizes in ((1, 0), (3, 40), (2, 200))]
    neighbours = 1 / 8 if name == "fp8_cache" else 0  # a value of E4M3 may be rounded to its neighbour
    for fused, engine in zip(found["fused"], found["engine"], strict=True):
        for mine, expected, rtol in zip(fused, engine, (0, neighbours), strict=True):
            np.testing.assert_allclose(mine, expected, atol=2e-2 * np.abs(expected).max(), rtol=rtol)


def step_of(runtime, device, rows: int, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Return logits and new KV rows of a step of sequences with random KV rows."""
    pipeline, cache = runtime.pipeline, runtime.pipeline.runner.kv_cache
    rng = np.random.default_rng(0)
    contents = rng.standard_normal(cache._slots.shape).astype(cache.dtype)
    device.upload(cache._slots, contents)
    lengths = context + np.arange(rows)
    device.upload(cache.lengths(range(rows)), lengths)
    tokens = device.empty((rows, 1), np.int64)
    device.upload(tokens, 7 + np.arange(rows)[:, None])
    logits = pipeline.logits.rows(0, rows)
    pipeline.runner.execute_vanilla_decoding_step(pipeline.embedder.embed_tokens(tokens), logits)
    slots = device.download(cache._slots)
    unchanged = np.ones(contents.shape, bool)
    unchanged[:, np.arange(rows), :, lengths] = False
    assert (slots[unchanged] == contents[unchanged]).all()
    return device.download(logits), slots[:, np.arange(rows), :, lengths].astype(np.float32)


def test_hidden_states_of_a_step_are_written(decoders, device, llama):
    found = []
    for decode in ("engine", "fused"):
        with LLMInferenceRuntime(llama, device, decode=decode) as runtime:
            runtime.handle_request(request("hello", max_tokens=4))
            buffers = runtime.pipeline.runner._tensors.hidden_state_buffers
            found.append([device.download(buffers[f"hidden_states_{i}"].rows(0, 1)) for i in (1, 2)])
    for expected, mine in zip(*found, strict=True):
        expected = expected.astype(np.float32)
        np.testing.assert_allclose(mine.astype(np.float32), expected, atol=2e-2 * np.abs(expected).max())


@on_host
def test_recorded_steps_run_the_kernels(decoders, llama):
    expected = answers(llama, REQUESTS, "engine")
    with queueing(), LLMInferenceRuntime(llama, WatchedDevice(), decode="fused") as runtime:
        assert runtime.capture_decoding_cuda_graph()
        recorded = steps(decoders)
        found = [answer.token_ids for answer in runtime.handle_request(REQUESTS)]
        assert runtime.pipeline.device.calls["launch"] >= 29
    assert found == expected
    assert steps(decoders) == recorded  # a replayed step does not pass the decoder


@on_host
def test_the_first_prompt_that_joins_a_batch_in_a_row_replays_a_graph(decoders, llama):
    with queueing(), LLMInferenceRuntime(llama, WatchedDevice(), decode="fused") as runtime:
        pipeline = runtime.pipeline
        assert pipeline.runner.fuses_prompts
        for row in range(runtime.config.builder.max_batch_size):
            [sequence] = pipeline.preparer.prepare([request("hello", max_tokens=1)], 0)
            pipeline.batch.admit([sequence])
            pipeline.device.calls.clear()
            pipeline.prefills.compute([sequence], range(row, row + 1))
            assert (pipeline.device.calls["launch"], pipeline.device.calls["capture"]) == (1, 0)


@on_host
def test_all_parts_of_the_first_long_prompt_of_a_row_replay_graphs(decoders, llama, monkeypatch):
    monkeypatch.setattr(prefill, "PART_TOKENS", 32)
    with queueing(), LLMInferenceRuntime(llama, WatchedDevice(), decode="fused") as runtime:
        pipeline = runtime.pipeline
        for row, words in enumerate(("go on " * 20, "stop " * 33)):
            [sequence] = pipeline.preparer.prepare([request(words, max_tokens=1)], 0)
            pipeline.batch.admit([sequence])
            pipeline.device.calls.clear()
            parts = list(pipeline.prefills.parts([sequence], lambda row=row: range(row, row + 1), most=32))
            assert len(parts) > 2
            calls = pipeline.device.calls
            assert (calls["launch"], calls["capture"]) == (len(parts), 0)


@pytest.mark.only_on("cuda", reason="the kernels themselves, in graphs")
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_recorded_steps_give_the_bits_of_steps_one_by_one(request, name, device):
    found = []
    for recorded in (False, True):
        with LLMInferenceRuntime(request.getfixturevalue(name), device, decode="fused") as runtime:
            assert not recorded or runtime.capture_decoding_cuda_graph()
            found.append([runtime.handle_request(REQUESTS) for _ in range(3)])
    expected = [answer.token_ids for answer in found[0][0]]
    assert all([answer.token_ids for answer in answers] == expected for runs in found for answers in runs)


@on_host
def test_an_lm_head_that_is_an_input_is_replaced_for_the_kernels_too(decoders, tmp_path):
    engine = export_decoder(tmp_path, "llama", lm_head_input=True)
    config, found = EngineConfig.load(engine), []
    matrix = np.random.default_rng(1).standard_normal((config.hidden_size, config.vocab_size))
    for decode in ("engine", "fused"):
        with LLMInferenceRuntime(engine, decode=decode) as runtime:
            before = runtime.handle_request(REQUESTS[0]).token_ids
            runtime.set_lm_head_weights("lm_head.weight", matrix)
            found.append((before, runtime.handle_request(REQUESTS[0]).token_ids))
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


@on_host
def test_the_kernels_give_the_hidden_states_of_tokens(decoders, llama):
    one, found = request("hello", max_tokens=8, output_hidden_states=True), []
    for decode in ("engine", "fused"):
        with LLMInferenceRuntime(llama, decode=decode) as runtime:
            found.append(runtime.handle_request(one))
    assert steps(decoders) == 7
    assert found[0].token_ids == found[1].token_ids
    for layer in (1, 2):
        states = [answer.hidden_states[layer].astype(np.float32) for answer in found]
        assert states[0].shape[0] == 8
        np.testing.assert_allclose(*states, atol=0.02 * np.abs(states[0]).max())


@on_host
def test_the_kernels_use_the_lm_head_that_a_batch_has_in_common(decoders, tmp_path):
    engine = export_decoder(tmp_path, "llama", lm_head_input=True)
    config, found = EngineConfig.load(engine), []
    shape = config.hidden_size, config.vocab_size
    one = [request("hello", max_tokens=6, lm_head="other")] * 2
    mixed = [request("hello", max_tokens=6, lm_head=name) for name in ("base", "other")]
    for decode in ("engine", "fused"):
        with LLMInferenceRuntime(engine, decode=decode) as runtime:
            runtime.add_lm_head("other", np.random.default_rng(1).standard_normal(shape))
            found.append(
                [[answer.token_ids for answer in runtime.handle_request(batch)] for batch in (one, mixed)]
            )
            if decode == "fused":
                assert steps(decoders) == 5  # of the first batch: the second needs a run for each head
    assert found[0] == found[1]
    assert found[0][1][0] != found[0][1][1] == found[0][0][0]


@on_host
@pytest.mark.slow
def test_sequences_of_a_step_have_their_own_adapters(decoders, omni, monkeypatch):
    _every_shape(monkeypatch)
    batch = [request("hello", max_tokens=6), request("hello", max_tokens=6, lora="a")]
    with LLMInferenceRuntime(omni, decode="fused") as runtime:
        mixed = [answer.token_ids for answer in runtime.handle_request(batch)]
        assert steps(decoders) == 5
    assert mixed == answers(omni, batch, "engine")
    assert mixed[0] != mixed[1]


@on_host
@pytest.mark.slow
def test_a_step_of_different_adapters_is_recorded(decoders, omni, monkeypatch):
    _every_shape(monkeypatch)
    batch = [request("hello", max_tokens=9), request("hello", max_tokens=9, lora="a")]
    with queueing(), LLMInferenceRuntime(omni, WatchedDevice(), decode="fused") as runtime:
        assert runtime.capture_decoding_cuda_graph()
        runtime.handle_request(batch)
        before = steps(decoders)
        found = [answer.token_ids for answer in runtime.handle_request(batch)]
        assert steps(decoders) == before  # a replayed step does not pass the decoder
    assert found == answers(omni, batch, "engine")


@on_host
@pytest.mark.slow
def test_an_adapter_of_a_rank_that_the_kernels_do_not_take_is_run_by_the_engine(decoders, omni, monkeypatch):
    _every_shape(monkeypatch)
    monkeypatch.setattr("edgellm_ros.fused.plan.shape.MOST_LORA_RANK", 3)
    adapted = request("hello", max_tokens=6, lora="a")
    with LLMInferenceRuntime(omni, decode="fused") as runtime:
        assert runtime.handle_request(adapted).token_ids == answers(omni, [adapted], "engine")[0]
        assert steps(decoders) == 0


@on_host
@pytest.mark.slow
def test_with_auto_the_engine_decodes_batches_with_an_adapter(decoders, omni, monkeypatch):
    _every_shape(monkeypatch)
    turns = itertools.count(1)  # a later measurement is a faster one: that of the kernels
    monkeypatch.setattr(choice, "_time", lambda device, step, graphs: step() or 1 / next(turns))
    plain, adapted = request("hello", max_tokens=6), request("hello", max_tokens=6, lora="a")
    with LLMInferenceRuntime(omni, decode="auto") as runtime:
        assert runtime.fused_rows >= 2
        before = steps(decoders)
        found = [answer.token_ids for answer in runtime.handle_request([plain, adapted])]
        assert steps(decoders) == before
        runtime.handle_request([plain, plain])
        assert steps(decoders) == before + 5
    assert found == answers(omni, [plain, adapted], "engine")


@on_host
def test_a_batch_of_more_rows_than_the_kernels_take_is_decoded_by_the_engine(decoders, llama, monkeypatch):
    with LLMInferenceRuntime(llama, decode="fused") as runtime:
        runtime.pipeline.runner.most_fused_rows = 2
        runtime.handle_request([request("hello", max_tokens=4)] * 3)
        assert steps(decoders) == 0
        runtime.handle_request([request("hello", max_tokens=4)] * 2)
        assert steps(decoders) == 3


@on_host
@pytest.mark.slow
def test_images_and_trajectories_are_those_of_the_engine(decoders, omni, monkeypatch):
    _every_shape(monkeypatch)
    asked = request(images=(IMAGE,), max_tokens=30, action_samples=2, noise_seed=5)
    found = []
    for decode in ("engine", "fused"):
        with LLMInferenceRuntime(omni, decode=decode) as runtime:
            found.append(runtime.handle_request(asked))
    assert steps(decoders) > 0
    assert found[0].token_ids == found[1].token_ids
    np.testing.assert_allclose(found[1].actions, found[0].actions, atol=2e-2)


def _every_shape(monkeypatch) -> None:
    """Let the double take shapes that the kernels do not take."""
    from edgellm_ros.fused.plan.expert_shape import ExpertShape
    from edgellm_ros.fused.plan.shape import FusedShape

    for shape in (FusedShape, ExpertShape):
        monkeypatch.setattr(shape, "unsupported", lambda shape: None)


class TestWhenTheEngineDecodes:
    """The reason is in the log with `auto`, and in the error with `fused`."""

    pytestmark = on_host

    def assert_reason(self, caplog, reason, engine, device="cpu", error=EngineError, **options):
        with pytest.raises(error, match=f"^fused decoding is not available: {reason}$"):
            LLMInferenceRuntime(engine, device, decode="fused", **options)
        with caplog.at_level(logging.INFO, loading.__name__):
            LLMInferenceRuntime(engine, device, **options).close()
        assert [record.getMessage() for record in caplog.records if record.name == loading.__name__] == [
            f"the engine decodes: {reason}".replace("\\", "")
        ]

    def test_on_a_cpu(self, caplog, llama):
        self.assert_reason(caplog, "it needs the device 'cuda', not 'cpu'", llama)

    def test_on_a_gpu_older_than_sm_80(self, monkeypatch, caplog, llama):
        class OldGpu(CpuDevice):
            name, arch, description = "cuda", "sm_75", "Tesla T4 (sm_75)"

        reason = r"it needs a GPU of sm_80 or later, not Tesla T4 \(sm_75\)"
        self.assert_reason(caplog, reason, llama, OldGpu())

    def test_in_fp32(self, decoders, caplog, tiny_engine):
        self.assert_reason(caplog, "the engine has fp32, the kernels take fp16 and bf16", tiny_engine)

    def test_without_a_description_of_the_weights(self, decoders, caplog, llama, tmp_path):
        shutil.copytree(llama, tmp_path / "engine")
        (tmp_path / "engine" / FUSED_FILE).unlink()
        config = EngineConfig.load(llama)
        files = tuple(entry for entry in config.files if entry.path != FUSED_FILE)
        dataclasses.replace(config, files=files).save(tmp_path / "engine")
        reason = "the engine has no llm/fused.json: export it again"
        self.assert_reason(caplog, reason, tmp_path / "engine")

    def test_with_a_shape_that_the_kernels_do_not_take(self, decoders, caplog, tmp_path):
        engine = export_decoder(tmp_path, "llama", {"head_dim": 16})
        reason = r"the kernels do not take this model: head_dim is 16, not one of \(64, 96, 128, 256\)"
        self.assert_reason(caplog, reason, engine)

    def test_with_a_hybrid_whose_blocks_the_kernels_lack(self, decoders, caplog, tmp_path):
        checkpoint = write_nemotron_h_checkpoint(tmp_path / "checkpoint", use_bias=True)
        export(checkpoint, tmp_path / "engine", precision="fp16")
        reason = "the engine has no llm/fused.json: export it again"
        self.assert_reason(caplog, reason, tmp_path / "engine")

    def test_with_recurrent_layers_of_sizes_that_the_kernels_do_not_take(self, decoders, caplog, tmp_path):
        sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 64, "linear_key_head_dim": 24}
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
        export(write_qwen3_5_checkpoint(tmp_path / "c", **sizes), tmp_path / "engine", precision="fp16")
        reason = "recurrent layers: key_dim is 24, not a multiple of 32 up to 128"
        reason = f"the kernels do not take this model: {reason}"
        self.assert_reason(caplog, reason, tmp_path / "engine")

    def test_with_states_that_no_mixer_begins_with(self, decoders, caplog, tmp_path):
        sizes = {**HYBRID, "hybrid_override_pattern": "M-M*-M", "mamba_num_heads": 8, "mamba_head_dim": 16}
        sizes |= {"n_groups": 2, "ssm_state_size": 32, "use_bias": False, "vocab_size": 304}
        checkpoint = write_nemotron_h_checkpoint(tmp_path / "c", **sizes)
        export(checkpoint, tmp_path / "2", precision="fp16", hidden_state_layers=[2, 6])
        with LLMInferenceRuntime(tmp_path / "2", decode="fused"):
            pass
        export(checkpoint, tmp_path / "1", precision="fp16", hidden_state_layers=[1])
        reason = "layer 1 is a feed-forward block alone, and the states before it are asked for"
        self.assert_reason(caplog, reason, tmp_path / "1")

    def test_with_weights_in_a_form_without_kernels(self, decoders, caplog, tmp_path):
        order = {"model.layers.0.self_attn.q_proj.g_idx": np.arange(64, dtype=np.int32) % 2}
        export(write_quantized_checkpoint(tmp_path / "c", "gptq", replaced=order), tmp_path, precision="fp16")
        reason = "the layers of model.layers.0.self_attn.qkv_proj are stored in different ways"
        self.assert_reason(caplog, f"the kernels do not take this model: {reason}", tmp_path)

    def test_without_memory_for_fp8_weights_in_both_forms(self, decoders, caplog, fp8_weights, monkeypatch):
        monkeypatch.setattr(CpuDevice, "memory_info", lambda device: (200_000, 1_000_000))
        reason = r"FP8 weights take 0.1 MB beside 0.3 MB in ONNX Runtime, and 0.2 MB are free"
        self.assert_reason(caplog, reason, fp8_weights)

    def test_with_kernels_that_cannot_be_compiled(self, caplog, llama):
        def fail(*arguments):
            raise EngineError("cannot compile the CUDA kernels for 'sm_90': no NVRTC")

        with fused_on_host(fail):
            self.assert_reason(caplog, "cannot compile the CUDA kernels for 'sm_90': no NVRTC", llama)

    def test_with_another_decode_backend(self, decoders, caplog, llama):
        self.assert_reason(caplog, "decode_backend is 'onnxruntime'", llama, decode_backend="onnxruntime")

    def test_if_asked_to_without_a_word(self, decoders, caplog, llama):
        with caplog.at_level(logging.INFO), LLMInferenceRuntime(llama, decode="engine") as runtime:
            assert runtime.fused_rows == 0
        assert not decoders
        assert not [record for record in caplog.records if record.name == loading.__name__]


def test_an_unknown_value_is_refused(llama):
    with pytest.raises(ValueError, match="decode must be one of auto, engine, fused, got 'gpu'"):
        LLMInferenceRuntime(llama, decode="gpu")


def test_a_weights_file_that_is_too_short_is_refused(decoders, llama, device, tmp_path):
    shutil.copytree(llama, tmp_path / "engine")
    data, config = tmp_path / "engine" / "llm" / "model.onnx.data", EngineConfig.load(llama)
    data.write_bytes(data.read_bytes()[:1000])
    files = tuple(
        dataclasses.replace(entry, size=1000) if entry.path.endswith(".data") else entry
        for entry in config.files
    )
    dataclasses.replace(config, files=files).save(tmp_path / "engine")
    with pytest.raises(ValueError, match=r"has 1000 bytes, but model.layers.0.* ends at .*export"):
        LLMInferenceRuntime(tmp_path / "engine", device, decode="fused")


class TestChoice:
    """`auto` measures both and takes the faster one for each batch size."""

    pytestmark = on_host
    PROMPT = "; the fused kernels compute prompts (ms per prompt of 128 tokens: 0.500 fused, 3.000 engine)"

    def choose(self, engine, caplog, monkeypatch, times, prompt=(3.0, 0.5), **options):
        """Load an engine whose steps take `times`; return its fused rows and log lines.

        `times`: milliseconds of the engine and of the kernels for each batch size; `prompt`: of a prompt.
        """
        monkeypatch.setattr(choice, "_time", self.timed([*times, *prompt]))
        caplog.clear()
        told = caplog.at_level(logging.INFO, choice.__name__)
        with told, LLMInferenceRuntime(engine, cuda_graphs=False, **options) as runtime:
            line = [record.getMessage() for record in caplog.records if record.name == choice.__name__]
            cache = runtime.pipeline.runner.kv_cache
            assert not runtime.pipeline.device.download(cache._slots).any()
            assert not runtime.pipeline.device.download(cache._lengths).any()
            self.verified_rows = runtime.pipeline.runner.most_verified_rows
            self.fuses_prompts = runtime.pipeline.runner.fuses_prompts
            return runtime.fused_rows, line

    def timed(self, times):
        turns = iter(times)

        def time(device, step, cuda_graphs):
            step()
            return next(turns) * 1e-3

        return time

    def test_the_kernels_decode_batches_up_to_the_first_that_the_engine_decodes_faster(
        self, decoders, llama, caplog, monkeypatch
    ):
        rows, line = self.choose(llama, caplog, monkeypatch, [2.0, 1.0, 2.1, 1.5, 2.2, 2.3])
        assert rows == 2
        assert line == [
            "the fused kernels decode batches of up to 2 (ms per step of 500 tokens of context, "
            "batch 1: 1.000 fused, 2.000 engine, batch 2: 1.500 fused, 2.100 engine, "
            "batch 3: 2.300 fused, 2.200 engine)" + self.PROMPT
        ]
        assert self.fuses_prompts

    def test_the_engine_decodes_if_it_is_faster_with_one_row(self, decoders, llama, caplog, monkeypatch):
        rows, line = self.choose(llama, caplog, monkeypatch, [1.0, 2.0])
        assert rows == 0
        assert line[0].startswith("the engine decodes (ms per step")

    def test_the_engine_computes_prompts_if_it_is_faster(self, decoders, llama, caplog, monkeypatch):
        rows, line = self.choose(llama, caplog, monkeypatch, [1.0, 2.0], prompt=(1.0, 1.5))
        assert (rows, self.fuses_prompts) == (0, False)
        assert line[0].endswith(
            "; the engine computes prompts (ms per prompt of 128 tokens: 1.500 fused, 1.000 engine)"
        )

    @pytest.mark.parametrize("hybrid", ["delta_net", "mamba2"])
    def test_prompts_of_hybrids_are_compared_from_the_same_states(
        self, decoders, caplog, monkeypatch, hybrid, request
    ):
        engine = request.getfixturevalue(hybrid)
        _, line = self.choose(engine, caplog, monkeypatch, [1.0, 2.0])
        assert line[0].endswith(self.PROMPT)
        assert self.fuses_prompts

    def test_prompts_that_fail_leave_decode_steps_to_the_kernels(self, decoders, llama, caplog, monkeypatch):
        def fail(prefill, tensors):
            raise EngineError("cuBLASLt has no kernel for [128,64] times [64,96]")

        monkeypatch.setattr(HostFusedPrefill, "run", fail)
        rows, lines = self.choose(llama, caplog, monkeypatch, [2.0, 1.0, 2.0, 1.0, 2.0, 1.0])
        assert (rows, self.fuses_prompts) == (3, False)
        reason, chosen = lines
        assert reason == (
            "the fused kernels do not compute prompts: cuBLASLt has no kernel for [128,64] times [64,96]"
        )
        assert chosen.endswith("; the engine computes prompts")

    def test_verifications_are_measured_beside_decode_steps(self, decoders, llama, caplog, monkeypatch):
        drafting = SpecDecodeDraftingConfig(1, 5, 6, "lookup")
        times = [1.0, 2.0, 3.0, 1.5, 3.1, 1.6, 3.2, 1.7]
        rows, line = self.choose(llama, caplog, monkeypatch, times, drafting=drafting)
        assert (rows, self.verified_rows) == (0, 18)
        assert line == [
            "the engine decodes (ms per step of 500 tokens of context, batch 1: 2.000 fused, 1.000 engine); "
            "the fused kernels verify batches of up to 3 (ms per verification of 6 tokens, "
            "batch 1: 1.500 fused, 3.000 engine, batch 2: 1.600 fused, 3.100 engine, "
            "batch 3: 1.700 fused, 3.200 engine)" + self.PROMPT
        ]
        assert decoders[0].sizes[-1] == (3, 6)

    def test_the_engine_verifies_if_it_is_faster(self, decoders, llama, caplog, monkeypatch):
        times = [2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 1.0, 1.5]
        rows, line = self.choose(llama, caplog, monkeypatch, times, drafting="lookup")
        assert (rows, self.verified_rows) == (3, 0)
        assert "; the engine verifies (ms per verification of 8 tokens, batch 1: 1.500 fused" in line[0]

    def test_measured_steps_attend_to_computed_rows(self, decoders, llama, caplog, monkeypatch):
        """A trained model amplifies rounding where it sees no text before a token."""
        step, filled = LLMEngineRunner.execute_vanilla_decoding_step, []

        def look(runner, embeds, logits):
            cache = runner.kv_cache
            lengths = cache.lengths(range(logits.shape[0])).array
            slots = cache._slots.array
            filled.extend(slots[:, row, :, :length].any(-1).all() for row, length in enumerate(lengths))
            return step(runner, embeds, logits)

        monkeypatch.setattr(LLMEngineRunner, "execute_vanilla_decoding_step", look)
        rows, _ = self.choose(llama, caplog, monkeypatch, [2.0, 1.0, 2.0, 1.0, 2.0, 1.0])
        assert rows == 3
        assert filled
        assert all(filled)

    @pytest.mark.parametrize(
        ("factors", "problem"),
        [
            ([np.nan] * 9, "differ from the engine's by nan, of"),
            ([3.0] * 9, "differ from the engine's by"),
            ([1.0, 1.01, 1.0], "differ from run to run"),
        ],
    )
    def test_kernels_with_wrong_logits_are_not_used(
        self, decoders, llama, caplog, monkeypatch, factors, problem
    ):
        run, factors = HostFusedDecoder._run, iter(factors)

        def run_wrong(decoder, tensors):
            run(decoder, tensors)
            tensors["logits"].array[...] *= next(factors)

        monkeypatch.setattr(HostFusedDecoder, "_run", run_wrong)
        rows, line = self.choose(llama, caplog, monkeypatch, [2.0, 1.0])
        assert rows == 0
        assert line[0].startswith(
            f"the engine decodes: with 1 rows the logits of the fused kernels {problem}"
        )

    def test_kernels_that_fail_are_not_used(self, decoders, llama, caplog, monkeypatch):
        def fail(decoder, tensors):
            raise EngineError("launching the kernel qkv: out of registers")

        monkeypatch.setattr(HostFusedDecoder, "_run", fail)
        rows, line = self.choose(llama, caplog, monkeypatch, [2.0, 1.0])
        assert rows == 0
        expected = "the engine decodes: the fused kernels failed: launching the kernel qkv: out of registers"
        assert line == [expected]
