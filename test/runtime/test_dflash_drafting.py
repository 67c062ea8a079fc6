# SPDX-License-Identifier: Apache-2.0
"""Block drafters draft chains: answers are those of vanilla decoding."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager

import numpy as np
import pytest

from edgellm_ros.builder import export
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.engine_directory.tensor_file import read_tensor
from edgellm_ros.kernels import load_kernels
from edgellm_ros.runtime.decoding.speculative.drafting_config import (
    SpecDecodeDraftingConfig,
    check_drafting,
    drafting_config,
    state_layers,
)
from edgellm_ros.runtime.engines.block_engine_runner import BlockEngineRunner
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.dflash_checkpoints import BLOCK, MASK_TOKEN, WRITERS, write_qwen3_with_drafter
from fixtures.drafted_chains import BATCH, DFLASH
from fixtures.head_reference import RecordedInputs
from fixtures.on_device import put
from fixtures.random_chains import LIMITS, TEXT
from fixtures.requests_for_tests import assert_same_with_drafting, request


@pytest.fixture(scope="module", params=WRITERS)
def engine(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = WRITERS[request.param](folder / "checkpoint", 2)
    export(checkpoint, folder / "engine", **LIMITS)
    return folder / "engine"


@pytest.fixture(scope="module")
def plain(engine, runtime_device):
    with LLMInferenceRuntime(engine, runtime_device, prefix_cache_bytes=0, drafting=None) as runtime:
        yield runtime


def test_hidden_states_of_answers_are_those_of_the_exported_layers(tmp_path, runtime_device):
    checkpoint = write_qwen3_with_drafter(tmp_path / "checkpoint", 2)
    export(checkpoint, tmp_path / "engine", hidden_state_layers=(2,), **LIMITS)
    one = request(TEXT, max_tokens=6, output_hidden_states=True)
    found = []
    for config in (None, DFLASH):
        with LLMInferenceRuntime(tmp_path / "engine", runtime_device, drafting=config) as runtime:
            answer = runtime.handle_request(one, output_thinker_embeddings=True)
            states = runtime.pipeline.device.download(runtime.base_model_hidden_states(2))
            assert list(answer.hidden_states) == [2]
            found.append((states, answer.hidden_states[2]))
            assert runtime.base_model_hidden_states(1) is None
    for mine, other in zip(*found, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)


@contextmanager
def watched_chains(runtime):
    """Watch a runtime inside the block; yield a list of its drafts.

    Each draft: the sequence, its committed length, the chain [M].
    """
    pipeline, found = runtime.pipeline, []
    drafter = pipeline.drafter.drafter
    drafter = getattr(drafter, "drafter", drafter)
    propose, read = drafter.propose, pipeline.device.download

    def watched(tree):
        propose(tree)
        lengths = read(drafter.kv_cache.lengths(range(tree.tokens.shape[0])))
        for row, sequence in enumerate(pipeline.batch.sequences):
            if sequence.decoding:
                found.append((sequence, int(lengths[row]), read(tree.tokens)[row]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "propose", watched)
        yield found


class RecordedStates(RecordedInputs):
    """A drafter that records the base's states of each token [layers,H]."""

    def __init__(self, runtime) -> None:
        super().__init__(runtime)
        self._layers = runtime.pipeline.config.draft.base_state_layers

    def prefilled(self, run, embeds, inputs) -> list:
        pipeline, count = self._pipeline, len(self.sequence.token_ids)
        outputs = pipeline.hidden_states.outputs(*embeds.shape[:2], self._layers)
        self.states = list(np.stack([pipeline.device.download(each)[0, :count] for each in outputs], axis=1))
        return []

    def started(self, rows, tokens, counts) -> None:
        pass

    def accepted(self, tokens, path, counts) -> None:
        steps = self._pipeline.runner.step_hidden_states(1, 1, self._layers)
        self.states.append(np.stack([self._pipeline.device.download(each)[0, 0] for each in steps]))


class WholeText:
    """Drafts blocks after a text from the states of the whole text, in one run."""

    def __init__(self, engine, runtime, one) -> None:
        pipeline = runtime.pipeline
        recorded = pipeline.drafter.drafter = RecordedStates(runtime)
        answer = runtime.handle_request(dataclasses.replace(one, disable_spec_decode=True))
        self._device, config, draft = pipeline.device, pipeline.config, pipeline.config.draft
        self._states, self._table = recorded.states, pipeline.device.download(pipeline.embedder.table)
        self._tokens = [*recorded.sequence.token_ids, *answer.token_ids]
        self._vocabulary = np.arange(draft.vocab_size)
        if (engine / "draft/d2t.safetensors").is_file():
            shape = (draft.vocab_size,)
            self._vocabulary = read_tensor(engine / "draft/d2t.safetensors", "token_of_draft_logit", shape)
        names, kernels = ("model", "context"), load_kernels(self._device)
        graphs = [EngineExecutor.open(engine / f"draft/{name}.onnx", self._device) for name in names]
        drafted = DFLASH.drafting_step
        self._engines = BlockEngineRunner(
            *graphs, config, device=self._device, kernels=kernels, drafted=drafted
        )

    def draft(self, length: int) -> tuple[int, np.ndarray, np.ndarray]:
        """Return the token after the first `length`, and what a block drafts after it.

        Logits [7,Vd] of the drafted tokens, and the token [Vd] of each logit.
        """
        states = np.stack(self._states[:length], axis=1)[:, None]
        positions = np.broadcast_to(np.arange(length, dtype=np.float32), (1, 3, length))
        cache, newest = self._engines.kv_cache, self._tokens[length]
        cache.clear()
        self._device.fill_zero(cache.lengths(range(1)))
        rows = [put(self._device, each) for each in states]
        self._engines.execute_prompts(rows, put(self._device, positions.copy()), range(1))
        cache.commit_rows(range(1), put(self._device, [length], np.int64))
        embeds = self._table[[newest, *[MASK_TOKEN] * (BLOCK - 1)]]
        logits = self._engines.execute_block(put(self._device, embeds[None]))
        return newest, self._device.download(logits)[0], self._vocabulary


@pytest.mark.only_on("cpu", "cuda", reason="the reference runs the engine's standard graphs")
@pytest.mark.parametrize("pauses", [False, True])
@pytest.mark.parametrize("vocabulary", [None, 40])
def test_drafts_are_those_of_a_drafter_that_sees_the_whole_text(tmp_path, runtime_device, vocabulary, pauses):
    checkpoint, engine = write_qwen3_with_drafter(tmp_path / "checkpoint", 2), tmp_path / "engine"
    export(checkpoint, engine, draft_vocab_size=vocabulary, **LIMITS)
    one = request(TEXT, max_tokens=60)
    options = {"prefix_cache_bytes": 0, "drafting": DFLASH, "cuda_graphs": False}
    with LLMInferenceRuntime(engine, runtime_device, **options) as runtime, watched_chains(runtime) as chains:
        if pauses:  # vanilla steps between rounds, more than wait at once
            rounds = iter([1, 1, *[0] * 20, 1, 0, 1, 0, 0, *[1] * 100])
            runtime.pipeline.method._chosen_size = lambda most: most if next(rounds) else 1
            runtime.pipeline.drafter.drafter._most_waiting = 8
        runtime.handle_request(one)
    assert len(chains) > 20
    with LLMInferenceRuntime(engine, runtime_device, **options) as runtime:
        whole = WholeText(engine, runtime, one)
        for _, length, chain in chains:
            newest, logits, tokens = whole.draft(length)
            assert chain[0] == newest
            found = np.array([[np.flatnonzero(tokens == token)[0]] for token in chain[1:]])
            drafted = np.take_along_axis(logits, found, -1)[:, 0]
            np.testing.assert_allclose(drafted, logits.max(-1), atol=1e-4)


class TestChoice:
    @pytest.mark.parametrize(("on_cpu", "length"), [(False, 7), (True, 4)])
    def test_auto_takes_the_drafter(self, engine, on_cpu, length):
        found = drafting_config("auto", EngineConfig.load(engine), on_cpu)
        assert found == SpecDecodeDraftingConfig(1, length, length + 1, "dflash")

    def test_a_longer_chain_than_a_block_is_refused(self, engine):
        config = SpecDecodeDraftingConfig(1, 8, 8, "dflash")
        with pytest.raises(ValueError, match="drafts at most 7 tokens in a block of 8"):
            check_drafting(config, EngineConfig.load(engine), on_cpu=True)

    def test_another_kind_is_refused(self, engine):
        with pytest.raises(ValueError, match="drafting mtp: this engine's draft head is of kind dflash"):
            check_drafting(SpecDecodeDraftingConfig(1, 3, 4, "mtp"), EngineConfig.load(engine), on_cpu=True)

    def test_drafting_by_lookup_binds_the_states_that_the_graph_has(self, engine, plain, runtime_device):
        config = EngineConfig.load(engine)
        assert state_layers(None, config) == ()
        with LLMInferenceRuntime(engine, runtime_device, drafting="lookup") as runtime:
            one = BATCH[0]
            assert_same_with_drafting(runtime.handle_request(one), plain.handle_request(one))
