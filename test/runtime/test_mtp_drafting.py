# SPDX-License-Identifier: Apache-2.0
"""MTP heads draft chains: answers are those of vanilla decoding."""

from __future__ import annotations

import pytest

from edgellm_ros.builder import export
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.runtime.decoding.speculative.drafting_config import (
    SpecDecodeDraftingConfig,
    check_drafting,
    drafting_config,
)
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.drafted_chains import MTP, draft_right_tokens
from fixtures.head_reference import assert_scores, reference_of, watched_drafts
from fixtures.mtp_checkpoints import WRITERS, write_whole_qwen3_5_with_head
from fixtures.random_chains import LIMITS, TEXT
from fixtures.requests_for_tests import IMAGE, assert_same_with_drafting
from fixtures.requests_for_tests import request as make_request


@pytest.fixture(scope="module", params=WRITERS)
def engine(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = WRITERS[request.param](folder / "checkpoint", 2)
    export(checkpoint, folder / "engine", **LIMITS)
    return folder / "engine"


@pytest.fixture(params=["an image", "chosen tokens"])
def special(request, tmp_path):
    """Engine and request with which a head may go wrong while answers stay right."""
    if request.param == "an image":
        checkpoint = write_whole_qwen3_5_with_head(tmp_path / "checkpoint")
        export(checkpoint, tmp_path / "engine", max_input_len=200)
        return tmp_path / "engine", make_request("what do you see", images=(IMAGE,), max_tokens=20)
    export(WRITERS["mimo"](tmp_path / "checkpoint", 2), tmp_path / "engine", draft_vocab_size=40, **LIMITS)
    assert EngineConfig.load(tmp_path / "engine").draft.vocab_size < 302
    return tmp_path / "engine", make_request(TEXT, max_tokens=20)


@pytest.mark.only_on("cpu", "cuda", reason="the reference runs the engine's other graphs")
def test_candidates_are_those_of_a_head_that_sees_the_whole_text(special, runtime_device):
    engine, one = special
    with LLMInferenceRuntime(engine, runtime_device, prefix_cache_bytes=0, drafting=None) as runtime:
        expected = runtime.handle_request(one)
    with LLMInferenceRuntime(engine, runtime_device, prefix_cache_bytes=0, drafting=MTP) as runtime:
        draft_right_tokens(runtime, MTP, [one], [expected])
        with watched_drafts(runtime) as drafts:
            assert_same_with_drafting(runtime.handle_request(one), expected)
    with reference_of(engine, runtime_device, MTP) as reference:
        recorded = reference(one)
        assert len(drafts) > 3
        for draft in drafts:
            assert_scores(draft, *recorded)


class TestChoice:
    @pytest.mark.parametrize(("on_cpu", "length"), [(False, 3), (True, 2)])
    def test_auto_takes_the_head_with_a_short_chain(self, engine, on_cpu, length):
        found = drafting_config("auto", EngineConfig.load(engine), on_cpu)
        assert found == SpecDecodeDraftingConfig(1, length, length + 1, "mtp")

    def test_a_head_of_another_kind_is_refused(self, engine):
        config = EngineConfig.load(engine)
        with pytest.raises(ValueError, match="drafting eagle: this engine's draft head is of kind mtp"):
            check_drafting(SpecDecodeDraftingConfig(1, 3, 4), config, on_cpu=True)

    def test_an_engine_without_a_head_is_refused(self, tiny_engine):
        with pytest.raises(ValueError, match=r"no draft head \(export a checkpoint with an MTP head\)"):
            check_drafting(MTP, EngineConfig.load(tiny_engine), on_cpu=True)
