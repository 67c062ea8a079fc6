# SPDX-License-Identifier: Apache-2.0
"""A draft head in the fused kernels: the engine's candidates, and when it drafts.

Without a GPU the kernels are their doubles in NumPy: the tests are about the runtime then, not the kernels.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
from contextlib import nullcontext

import numpy as np
import pytest

from doubles.deferred_runtime import WatchedDevice, queueing
from doubles.fused_draft import HostFusedChain
from doubles.scripted_drafter import draft_by_script
from edgellm_ros.builder import export
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.fused.description.draft import FUSED_DRAFT_FILE
from edgellm_ros.fused.loading import draft
from edgellm_ros.runtime.decoding.speculative.drafting_config import SpecDecodeDraftingConfig
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures import on_device
from fixtures.decoder_checkpoint import write_decoder_checkpoint
from fixtures.fused_decoding import SIZES as TINY
from fixtures.fused_decoding import fused_on_host
from fixtures.fused_drafting import SIZES, fused_head_on_host
from fixtures.mtp_checkpoints import WRITERS as MTP_WRITERS
from fixtures.random_head import base_config, write_random_head
from fixtures.requests_for_tests import request

pytestmark = [
    pytest.mark.only_on("cpu", "cuda", reason="TensorRT has no fused drafting"),
    pytest.mark.kernel_doubles,
]
on_host = pytest.mark.only_on("cpu", reason="the double of the kernels")
CHAIN = SpecDecodeDraftingConfig(1, 3, 4, falls_back=False)
TREE = SpecDecodeDraftingConfig(2, 3, 6, falls_back=False)
ONE = request("what do you see?", max_tokens=20, repetition_penalty=1.3)
BATCH = [ONE, request("hello", max_tokens=9), request("x" * 60, max_tokens=16, repetition_penalty=1.3)]
MTP_SIZES = {  # of tiny checkpoints with an MTP head that the kernels take
    "mimo": {**TINY, "num_attention_heads": 2, "num_key_value_heads": 1},
    "mimo, a window": {
        **TINY, "num_attention_heads": 2, "num_key_value_heads": 1, "use_sliding_window": True,
        "sliding_window": 4, "max_window_layers": 0, "layer_types": None,
    },
    "qwen3_5": {
        "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "hidden_size": 64, "head_dim": 64, "intermediate_size": 128, "linear_key_head_dim": 32,
        "linear_value_head_dim": 32, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
        "attention_bias": False,
    },
}  # fmt: skip
HEADS = {
    "plain": {},
    "biases, norms, normed states": {
        "biases": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        "head_norms": True, "norm_output": True, "fc_norm": True, "norm_before_residual": True,
    },
    "two layers, the base's LM head": {"layers": 2, "vocabulary": None},
}  # fmt: skip


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Function (name of a head) -> engine directory in fp16 with this head."""
    root, found = tmp_path_factory.mktemp("heads"), {}
    checkpoint = write_decoder_checkpoint(root / "checkpoint", "llama", vocab_size=304)

    def make(name="plain"):
        if name not in found:
            directory = root / str(len(found))
            head = write_random_head(directory / "head", base_config(checkpoint), **SIZES, **HEADS[name])
            export(checkpoint, directory / "engine", precision="fp16", draft=head, max_batch_size=3)
            found[name] = directory / "engine"
        return found[name]

    return make


@pytest.fixture
def heads():
    """The heads that runtimes have made; none on a GPU, where the kernels are real."""
    with fused_head_on_host() if on_device.chosen == "cpu" else nullcontext([]) as made:
        yield made


def drafts(engine, device, drafting, batch, decode) -> list[dict[str, np.ndarray]]:
    """Answer a batch with rounds that accept some tokens; return all rounds' tables."""
    found = []
    with LLMInferenceRuntime(
        engine, device, decode=decode, drafting=drafting, prefix_cache_bytes=0
    ) as runtime:
        answers = {id(one): [7 + i for i in range(one.sampling.max_tokens)] for one in batch}
        scripted = draft_by_script(runtime, drafting.drafting_step, drafting.tree_size, right=0.7)
        scripted.answers = lambda one: answers[id(one)]
        eagle = scripted.drafter.drafter if hasattr(scripted.drafter, "drafter") else scripted.drafter
        propose = eagle.propose

        def watched(tree):
            batch, read = tree.tokens.shape[0], runtime.pipeline.device.download
            live = read(eagle._pending.counts.rows(0, batch)) > 0  # others have ended
            propose(tree)
            table = eagle._table.rows(0, batch)
            found.append({name: read(getattr(table, name))[live] for name in ("tokens", "scores")})

        eagle.propose = watched
        runtime.handle_request(batch)
        assert not runtime.pipeline.drafter.failed
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("drafting", [CHAIN, TREE], ids=["chain", "tree"])
def test_candidates_are_those_of_the_engine(heads, engines, device, name, drafting):
    batch = BATCH if name == "plain" else [ONE]
    expected = drafts(engines(name), device, drafting, batch, "engine")
    assert not heads
    found = drafts(engines(name), device, drafting, batch, "auto")
    if heads:
        accepted, level = drafting.tokens_per_round, drafting.drafting_top_k
        expected_runs = {(1, accepted), (1, level)} | ({(3, level)} if len(batch) == 3 else set())
        assert expected_runs <= set(heads[0].runs)
    assert len(found) == len(expected) > 3
    same = total = 0
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine["scores"], other["scores"], atol=3e-2)
        same += np.count_nonzero(mine["tokens"] == other["tokens"])
        total += mine["tokens"].size
    assert same > 0.95 * total  # near ties may rank the other way round


@pytest.mark.slow
@pytest.mark.parametrize("family", MTP_SIZES)
def test_candidates_of_an_mtp_head_are_those_of_the_engine(heads, tmp_path, device, family):
    checkpoint = MTP_WRITERS[family.partition(",")[0]](tmp_path / "checkpoint", 3, **MTP_SIZES[family])
    export(checkpoint, tmp_path / "engine", precision="fp16", max_batch_size=3)
    chain = dataclasses.replace(CHAIN, strategy="mtp")
    expected = drafts(tmp_path / "engine", device, chain, BATCH, "engine")
    assert not heads
    with fused_on_host() if on_device.chosen == "cpu" else nullcontext():
        found = drafts(tmp_path / "engine", device, chain, BATCH, "auto")
    if heads:
        assert {(1, chain.tokens_per_round), (3, 1)} <= set(heads[0].runs)
    assert len(found) == len(expected) > 3
    same = total = 0
    for mine, other in zip(found, expected, strict=True):
        agree = np.logical_and.accumulate(mine["tokens"] == other["tokens"], axis=1)
        np.testing.assert_allclose(mine["scores"][agree], other["scores"][agree], atol=6e-2)
        same, total = same + np.count_nonzero(agree), total + agree.size
    assert same > 0.9 * total  # after a near tie the two go different ways


@pytest.mark.slow
@pytest.mark.parametrize("family", MTP_SIZES)
def test_rounds_of_an_mtp_head_in_kernels_have_the_answers_of_the_engine(heads, tmp_path, device, family):
    checkpoint = MTP_WRITERS[family.partition(",")[0]](tmp_path / "checkpoint", 3, **MTP_SIZES[family])
    export(checkpoint, tmp_path / "engine", precision="fp16", max_batch_size=3)
    chain = dataclasses.replace(CHAIN, strategy="mtp")
    options = {"prefix_cache_bytes": 0}
    with LLMInferenceRuntime(tmp_path / "engine", device, decode="engine", **options, drafting=None) as plain:
        expected = [plain.handle_request(one).token_ids for one in BATCH]
    doubles = fused_on_host() if on_device.chosen == "cpu" else nullcontext()
    with (
        doubles,
        LLMInferenceRuntime(
            tmp_path / "engine", device, decode="fused", drafting=chain, **options
        ) as runtime,
    ):
        found = [runtime.handle_request(one).token_ids for one in BATCH]
        assert runtime.spec_decode_generation_metrics.total_runs > 10
        assert not runtime.pipeline.drafter.failed
    same = [mine == other for mine, other in zip(found, expected, strict=True)]
    assert sum(same) >= len(same) - 1  # rounding may decide a near tie


@on_host
def test_recorded_rounds_run_the_kernels(heads, engines):
    with (
        queueing(),
        LLMInferenceRuntime(engines(), WatchedDevice(), drafting=CHAIN, prefix_cache_bytes=0) as runtime,
    ):
        assert runtime.capture_decoding_cuda_graph()
        recorded = len(heads[0].runs)
        found = runtime.handle_request(ONE).token_ids
        assert runtime.spec_decode_generation_metrics.total_runs > 3
    with LLMInferenceRuntime(engines(), prefix_cache_bytes=0) as plain:
        assert found == plain.handle_request(ONE).token_ids
    assert recorded
    assert len(heads[0].runs) == recorded  # a replayed round does not pass the head


@on_host
@pytest.mark.slow
def test_whole_chains_are_those_of_the_engine(engines, device):
    """Batches of more sequences than fit at once are drafted token by token."""
    expected = drafts(engines(), device, CHAIN, BATCH, "engine")
    with fused_head_on_host(chain=HostFusedChain) as made:
        found = drafts(engines(), device, CHAIN, BATCH, "auto")
    head, chain = made
    assert {1, 2} == set(chain.drafts)
    assert {(3, CHAIN.tokens_per_round), (3, 1)} == set(head.runs)
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine["scores"], other["scores"], atol=3e-2)
        assert np.count_nonzero(mine["tokens"] != other["tokens"]) <= 1


@pytest.mark.slow
@pytest.mark.only_on("cuda", reason="the kernel of whole chains, which needs clusters of blocks")
def test_whole_chains_of_the_kernel_are_those_of_the_engine(device, tmp_path, caplog):
    if int(device.arch.removeprefix("sm_")) < 90:
        pytest.skip("the GPU has no clusters")
    sizes = {"hidden_size": 256, "intermediate_size": 256}  # the smallest for 16 blocks
    checkpoint = write_decoder_checkpoint(tmp_path / "checkpoint", "llama", vocab_size=304, **sizes)
    head = write_random_head(tmp_path / "head", base_config(checkpoint), **(SIZES | sizes))
    export(checkpoint, tmp_path / "engine", precision="fp16", draft=head, max_batch_size=3)
    expected = drafts(tmp_path / "engine", device, CHAIN, [ONE], "engine")
    with caplog.at_level(logging.INFO, draft.__name__):
        found = drafts(tmp_path / "engine", device, CHAIN, [ONE], "auto")
    assert "token by token" not in caplog.text
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine["scores"], other["scores"], atol=3e-2)
        assert np.count_nonzero(mine["tokens"] != other["tokens"]) <= 1


@on_host
def test_recorded_rounds_draft_whole_chains(engines):
    with (
        fused_head_on_host(chain=HostFusedChain) as made, queueing(),
        LLMInferenceRuntime(engines(), WatchedDevice(), drafting=CHAIN, prefix_cache_bytes=0) as runtime,
    ):  # fmt: skip
        head, chain = made
        assert runtime.capture_decoding_cuda_graph()
        recorded = len(chain.drafts)
        found = runtime.handle_request(ONE).token_ids
        assert runtime.spec_decode_generation_metrics.total_runs > 3
    with LLMInferenceRuntime(engines(), prefix_cache_bytes=0) as plain:
        assert found == plain.handle_request(ONE).token_ids
    assert recorded
    assert len(chain.drafts) == recorded
    assert not [sequences for sequences, _ in head.runs if sequences <= chain.max_batch]


@on_host
@pytest.mark.parametrize("tokens, in_vain", [(8, 0), (32, 1)])
def test_only_later_rounds_of_an_answer_are_queued_ahead(engines, tokens, in_vain):
    one = request("hello", max_tokens=tokens, repetition_penalty=1.3)
    with LLMInferenceRuntime(engines(), prefix_cache_bytes=0) as plain:
        answer = plain.handle_request(one).token_ids
    with (
        queueing(),
        LLMInferenceRuntime(engines(), WatchedDevice(), drafting=CHAIN, prefix_cache_bytes=0) as runtime,
    ):
        drafter = draft_by_script(runtime, CHAIN.drafting_step, CHAIN.tree_size, right=1.0)
        drafter._back, drafter.answers = 1, lambda one: answer
        assert runtime.handle_request(one).token_ids == answer
        found = runtime.spec_decode_generation_metrics
    assert found.total_runs == found.verified_trees + in_vain


@on_host
def test_the_first_round_is_not_queued_ahead_after_an_answer_without_drafting(engines):
    with (
        queueing(),
        LLMInferenceRuntime(engines(), WatchedDevice(), drafting=CHAIN, prefix_cache_bytes=0) as runtime,
    ):
        runtime.handle_request(request("hello", max_tokens=9, disable_spec_decode=True))
        one = request("hello", max_tokens=3)
        answer = runtime.handle_request(dataclasses.replace(one, disable_spec_decode=True)).token_ids
        drafter = draft_by_script(runtime, CHAIN.drafting_step, CHAIN.tree_size, right=1.0)
        drafter._back, drafter.answers = 1, lambda one: answer
        runtime.handle_request(dataclasses.replace(one, disable_spec_decode=True))
        assert runtime.handle_request(one).token_ids == answer
        found = runtime.spec_decode_generation_metrics
    assert found.total_runs == found.verified_trees == 1


@on_host
def test_runs_of_more_tokens_than_the_kernels_take_are_the_engines(heads, engines):
    with LLMInferenceRuntime(engines(), drafting=TREE, prefix_cache_bytes=0) as runtime:
        head = runtime.pipeline.drafter.drafter._head
        head._fused = dataclasses.replace(head._fused, most_tokens=2)
        runtime.handle_request(ONE)
        assert set(heads[0].runs) == {(1, TREE.drafting_top_k)}


class TestWhenTheEngineDrafts:
    """The reason is in the log, once."""

    pytestmark = on_host

    def assert_reason(self, caplog, reason, engine, **options):
        with caplog.at_level(logging.INFO, draft.__name__):
            LLMInferenceRuntime(engine, drafting=CHAIN, **options).close()
        lines = [record.getMessage() for record in caplog.records if record.name == draft.__name__]
        assert lines == [f"the engine drafts: {reason}"]

    def test_on_a_cpu(self, caplog, engines):
        self.assert_reason(caplog, "it needs the device 'cuda', not 'cpu'", engines())

    def test_without_a_description_of_the_weights(self, heads, caplog, engines, tmp_path):
        shutil.copytree(engines(), tmp_path / "engine")
        (tmp_path / "engine" / FUSED_DRAFT_FILE).unlink()
        config = EngineConfig.load(engines())
        files = tuple(entry for entry in config.files if entry.path != FUSED_DRAFT_FILE)
        dataclasses.replace(config, files=files).save(tmp_path / "engine")
        self.assert_reason(caplog, "the engine has no draft/fused.json: export it again", tmp_path / "engine")

    def test_in_fp32_and_with_a_shape_that_the_kernels_do_not_take(self, heads, caplog, engines, tmp_path):
        checkpoint = engines().parent.parent / "checkpoint"
        head = write_random_head(tmp_path / "head", base_config(checkpoint))
        export(checkpoint, tmp_path / "fp32", draft=head)
        self.assert_reason(caplog, "the head has fp32, the kernels take fp16 and bf16", tmp_path / "fp32")
        caplog.clear()
        export(checkpoint, tmp_path / "fp16", precision="fp16", draft=head)
        reason = "the kernels do not take this head: head_dim is 16, not one of (64, 96, 128, 256)"
        self.assert_reason(caplog, reason, tmp_path / "fp16")

    def test_with_kernels_that_cannot_be_compiled(self, caplog, engines):
        def fail(*arguments):
            raise EngineError("cannot compile the CUDA kernels for 'sm_90': no NVRTC")

        with fused_head_on_host(fail):
            self.assert_reason(caplog, "cannot compile the CUDA kernels for 'sm_90': no NVRTC", engines())

    @pytest.mark.parametrize("options", [{"decode": "engine"}, {"decode_backend": "onnxruntime"}])
    def test_if_asked_to_without_a_word(self, heads, caplog, engines, options):
        with caplog.at_level(logging.INFO, draft.__name__):
            LLMInferenceRuntime(engines(), drafting=CHAIN, **options).close()
        assert not heads
        assert not [record for record in caplog.records if record.name == draft.__name__]
