# SPDX-License-Identifier: Apache-2.0
"""Drafted tokens verified by the fused kernels: the answers of vanilla decoding.

Without a GPU the kernels are their doubles in NumPy: the tests are about the runtime then, not the kernels.
"""

from __future__ import annotations

import dataclasses
import shutil
from contextlib import ExitStack

import numpy as np
import pytest

from doubles.deferred_runtime import WatchedDevice, queueing
from doubles.fused_decoder import HostFusedDecoder
from doubles.scripted_drafter import draft_by_script
from edgellm_ros.builder import export
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.fused.description.draft import FUSED_DRAFT_FILE
from edgellm_ros.runtime.decoding.speculative.drafting_config import SpecDecodeDraftingConfig
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures import on_device
from fixtures.decoder_checkpoint import write_decoder_checkpoint
from fixtures.fused_decoding import SIZES, fused_on_host
from fixtures.fused_drafting import SIZES as HEAD_SIZES
from fixtures.fused_drafting import fused_head_on_host
from fixtures.random_head import base_config, write_random_head
from fixtures.requests_for_tests import request

pytestmark = [
    pytest.mark.only_on("cpu", "cuda", reason="TensorRT has no fused decoding"),
    pytest.mark.kernel_doubles,
]
on_host = pytest.mark.only_on("cpu", reason="the doubles of the kernels")
LOOKUP = SpecDecodeDraftingConfig(1, 3, 4, "lookup", falls_back=False)
CHAIN = SpecDecodeDraftingConfig(1, 3, 4, falls_back=False)
TREE = SpecDecodeDraftingConfig(2, 3, 8, falls_back=False)
LARGE = SpecDecodeDraftingConfig(3, 5, 12, falls_back=False)  # two are more than a decode step's kernels take
ALL = {"lookup": LOOKUP, "chain": CHAIN, "tree": TREE}
DRAFTINGS = pytest.mark.parametrize("drafting", ALL.values(), ids=ALL)
DRAFTINGS_AND_LARGE = pytest.mark.parametrize("drafting", [*ALL.values(), LARGE], ids=[*ALL, "large"])
ONE = request("what do you see?", max_tokens=20, repetition_penalty=1.3)
BATCH = [ONE, request("hello", max_tokens=9, temperature=1.0, seed=3)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """A model with norms of heads and windows; its head takes all kinds of its states."""
    root = tmp_path_factory.mktemp("trees")
    checkpoint = write_decoder_checkpoint(root / "checkpoint", "qwen3", **SIZES)
    states = {"layout": "speculators", "base_states": (0, 1, 2), "fc_norm": True, "fc_bias": True}
    head = write_random_head(root / "head", base_config(checkpoint), **HEAD_SIZES, **states)
    export(
        checkpoint,
        root / "engine",
        precision="fp16",
        draft=head,
        max_batch_size=2,
        hidden_state_layers=(1, 2),
    )
    return root / "engine"


@pytest.fixture
def decoders():
    """The decoders that runtimes have made; none on a GPU, where the kernels are real."""
    with ExitStack() as stack:
        made = []
        if on_device.chosen == "cpu":
            made = stack.enter_context(fused_on_host())
            stack.enter_context(fused_head_on_host())
        yield made


@pytest.fixture(scope="module")
def plain(engine, device):
    with LLMInferenceRuntime(engine, device, decode="engine", prefix_cache_bytes=0) as runtime:
        yield runtime


def drafted(runtime, drafting, batch, expected, right=0.8):
    """Answer a batch with rounds whose tokens are partly those of expected answers."""
    known = {id(one): answer.token_ids for one, answer in zip(batch, expected, strict=True)}
    drafter = draft_by_script(runtime, drafting.drafting_step, drafting.tree_size, right=right)
    drafter._back = 1 if drafting.is_chain else 3
    drafter.answers = lambda one: known[id(one)]
    return runtime.handle_request(batch)


@DRAFTINGS_AND_LARGE
@pytest.mark.parametrize("batch", [[ONE], BATCH], ids=["one", "batch"])
def test_the_tokens_are_those_of_vanilla_decoding(decoders, device, engine, plain, drafting, batch):
    expected = [plain.handle_request(one) for one in batch]
    with LLMInferenceRuntime(
        engine, device, decode="fused", drafting=drafting, prefix_cache_bytes=0
    ) as runtime:
        found = drafted(runtime, drafting, batch, expected)
        rounds, vanilla = (
            getattr(runtime.spec_decode_generation_metrics, name) for name in ("total_runs", "vanilla_runs")
        )
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    assert rounds > 0
    assert vanilla == 0
    if decoders:
        fused = [size for size in decoders[0].sizes if size[1] > 1]
        assert len(fused) == rounds
        assert (len(batch), drafting.tree_size) in fused


@on_host
@DRAFTINGS
def test_a_verification_has_the_logits_of_the_engine(decoders, device, engine, drafting):
    found = []
    for decode in ("engine", "fused"):
        with LLMInferenceRuntime(engine, device, decode=decode, drafting=drafting) as runtime:
            found.append(verification(runtime, device, drafting))
    for mine, expected in zip(*reversed(found), strict=True):
        np.testing.assert_allclose(mine, expected, atol=2e-2 * np.abs(expected).max())


def verification(runtime, device, drafting) -> list[np.ndarray]:
    """Verify a tree after random KV rows; return the outputs.

    The outputs are logits, hidden states, states for the head if there is one, and the new rows.
    """
    pipeline, rng, nodes = runtime.pipeline, np.random.default_rng(0), drafting.tree_size
    runner, cache = pipeline.runner, pipeline.runner.kv_cache
    device.upload(cache._slots, rng.standard_normal(cache._slots.shape).astype(cache.dtype))
    device.upload(cache.lengths(range(1)), np.array([40]))
    rounds = pipeline.method._rounds
    tree, logits = rounds.tree(1, nodes), rounds.logits(1, nodes)
    parents = np.arange(-1, nodes - 1) if drafting.is_chain else np.array([-1, 0, 0, 1, 1, 3, 2, 6])
    depths = np.zeros(nodes, np.int64)
    for node in range(1, nodes):
        depths[node] = depths[parents[node]] + 1
    for target, values in ((tree.tokens, 10 + depths), (tree.parents, parents), (tree.depths, depths)):
        device.upload(target, values[None].astype(np.int64))
    embeds = pipeline.embedder.embed_tokens(tree.tokens)
    runner.execute_tree_decoding_step(embeds, tree, rounds.kernels, logits)
    outputs = [
        logits,
        *(buffer.view(1, nodes, 64) for buffer in runner._tensors.hidden_state_buffers.values()),
    ]
    if drafting.strategy == "eagle":
        outputs.append(runner.fused_hidden_states(1, nodes))
    rows = device.download(cache._slots)[:, 0, :, 40 : 40 + nodes]
    return [each.astype(np.float32) for each in (*map(device.download, outputs), rows)]


@on_host
@pytest.mark.parametrize("drafting", [CHAIN, TREE], ids=["chain", "tree"])
def test_recorded_rounds_run_the_kernels(decoders, engine, plain, drafting):
    expected = plain.handle_request(ONE)
    with (
        queueing(),
        LLMInferenceRuntime(
            engine, WatchedDevice(), decode="fused", drafting=drafting, prefix_cache_bytes=0
        ) as runtime,
    ):
        assert runtime.capture_decoding_cuda_graph()
        recorded = decoders[0].steps
        assert runtime.handle_request(ONE).token_ids == expected.token_ids
        assert runtime.pipeline.device.calls["launch"] > 0
    assert decoders[0].steps - recorded < 5  # smaller trees at the end are not recorded


@on_host
def test_vanilla_steps_between_rounds_run_the_kernels_too(decoders, device, engine, plain):
    expected = plain.handle_request(ONE)
    off = request("what do you see?", max_tokens=20, repetition_penalty=1.3, disable_spec_decode=True)
    with LLMInferenceRuntime(engine, device, decode="fused", drafting=CHAIN) as runtime:
        assert runtime.handle_request(off).token_ids == expected.token_ids
    assert decoders[0].sizes == [(1, 1)] * 19


@on_host
def test_a_tree_too_large_for_the_kernels_of_steps_is_verified_by_those_of_prefills(
    decoders, device, engine, plain
):
    class OnSmallGpu(HostFusedDecoder):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.max_rows = 4

    expected = [plain.handle_request(ONE)]
    with (
        fused_on_host(OnSmallGpu) as small,
        LLMInferenceRuntime(engine, device, decode="fused", drafting=TREE) as runtime,
    ):
        assert runtime.fused_rows == 2
        assert drafted(runtime, TREE, [ONE], expected)[0].token_ids == expected[0].token_ids
    assert set(small[0].sizes) == {(1, 8)}


@on_host
def test_a_head_without_a_description_leaves_all_steps_to_the_engine(decoders, device, engine, tmp_path):
    shutil.copytree(engine, tmp_path / "engine")
    (tmp_path / "engine" / FUSED_DRAFT_FILE).unlink()
    config = EngineConfig.load(engine)
    files = tuple(entry for entry in config.files if entry.path != FUSED_DRAFT_FILE)
    dataclasses.replace(config, files=files).save(tmp_path / "engine")
    reason = "fused decoding is not available: the engine has no draft/fused.json: export it again"
    with pytest.raises(EngineError, match=reason):
        LLMInferenceRuntime(tmp_path / "engine", device, decode="fused", drafting=CHAIN)
