# SPDX-License-Identifier: Apache-2.0
"""One runtime for several clients: what each share has for itself."""

import dataclasses

import numpy as np
import pytest

from edgellm_ros.builder import export
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest
from edgellm_ros.runtime.sharing.shared_runtime import SharedRuntime
from fixtures.requests_for_tests import IMAGE, assert_same_answer, request
from fixtures.smolvla_checkpoint import CAMERAS, write_smolvla
from fixtures.tiny_adapter import write_adapter

WAIT_S = 60.0
SYSTEM = "you are a small robot that answers in few words"
WORDS = request("go to the red box", max_tokens=12)


@pytest.fixture(scope="module")
def adapters(tiny_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(folder / name, tiny_checkpoint, seed=seed, r=4) for seed, name in enumerate("ab")
    }


@pytest.fixture
def shared(tiny_lora_engine, device):
    shared = SharedRuntime(LLMInferenceRuntime(tiny_lora_engine, device))
    yield shared
    shared.runtime.close()


@pytest.fixture
def first(shared):
    return shared.share()


@pytest.fixture
def second(shared):
    return shared.share()


def answer(share, one):
    return share.submit(one).result(WAIT_S)


def test_answers_of_a_share_are_those_of_a_runtime(first, second, tiny_lora_engine, device):
    with LLMInferenceRuntime(tiny_lora_engine, device) as alone:
        for one in (WORDS, request(images=(IMAGE,), temperature=0.9, seed=2)):
            expected = alone.handle_request(one)
            handles = [share.submit(one) for share in (first, second)]
            for handle in handles:
                assert_same_answer(handle.result(WAIT_S), expected)
            assert_same_answer(first.handle_request(one), expected)


class TestAdapters:
    def test_the_active_adapter_of_a_share_does_not_change_answers_of_another(self, first, second, adapters):
        base = answer(second, WORDS)
        first.add_lora("a", adapters["a"])
        first.switch_lora_weights("a")
        of_a = answer(first, WORDS)
        assert (of_a.lora, first.active_lora) == ("a", "a")
        assert of_a.text != base.text
        other = answer(second, WORDS)
        assert (other.lora, second.active_lora) == ("", "")
        assert_same_answer(other, base)
        assert_same_answer(first.handle_request(WORDS), of_a)
        assert_same_answer(answer(first, dataclasses.replace(WORDS, lora="base")), base)

    def test_a_share_has_its_own_adapters(self, first, second, adapters):
        first.add_lora("a", adapters["a"])
        assert (first.lora_names(), second.lora_names()) == (["a"], [])
        with pytest.raises(ValueError, match="unknown LoRA adapter 'a'; loaded: none"):
            second.submit(dataclasses.replace(WORDS, lora="a"))
        with pytest.raises(ValueError, match="unknown LoRA adapter 'a'"):
            second.switch_lora_weights("a")
        with pytest.raises(ValueError, match="unknown LoRA adapter 'a'"):
            second.remove_lora("a")

    def test_an_adapter_of_two_shares_is_loaded_once_and_leaves_with_the_last(
        self, shared, first, second, adapters
    ):
        first.add_lora("a", adapters["a"])
        loaded = shared.runtime.pipeline.loras.get("a")
        second.add_lora("a", adapters["a"])
        assert shared.runtime.pipeline.loras.get("a") is loaded
        first.remove_lora("a")
        assert answer(second, dataclasses.replace(WORDS, lora="a")).lora == "a"
        second.close()
        assert shared.runtime.lora_names() == []

    def test_one_name_is_not_for_two_adapters(self, first, second, adapters):
        first.add_lora("a", adapters["a"])
        with pytest.raises(
            ValueError, match=r"adapter 'a' is loaded from .* for another share: choose another"
        ):
            second.add_lora("a", adapters["b"])
        with pytest.raises(ValueError, match="adapter 'a' is loaded already"):
            first.add_lora("a", adapters["a"])

    def test_the_active_adapter_is_not_removed(self, first, adapters):
        first.add_lora("a", adapters["a"])
        first.switch_lora_weights("a")
        with pytest.raises(ValueError, match="adapter 'a' is active"):
            first.remove_lora("a")

    def test_those_of_the_engine_directory_are_of_all_shares(self, acting_draft_engine, device):
        shared = SharedRuntime(LLMInferenceRuntime(acting_draft_engine, device, drafting="off"))
        with shared.share() as share:
            assert share.lora_names() == ["a", "b"]
            with pytest.raises(ValueError, match="adapter 'a' is of the engine directory"):
                share.remove_lora("a")


def test_each_share_has_its_own_noise_seed(acting_engine, device):
    shared = SharedRuntime(LLMInferenceRuntime(acting_engine, device))
    with shared.share() as first, shared.share() as second:
        first.set_action_noise_seed(7)
        one = request(images=(IMAGE,), action_samples=1, max_tokens=30)
        assert [answer(share, one).noise_seed for share in (first, second)] == [7, 0]


def test_each_share_has_its_own_active_lm_head(tiny_checkpoint, tmp_path, device):
    export(tiny_checkpoint, tmp_path / "engine", lm_head_input=True)
    shared = SharedRuntime(LLMInferenceRuntime(tmp_path / "engine", device))
    with shared.share() as first, shared.share() as second:
        llm = shared.runtime.config.llm
        first.add_lm_head("zeros", np.zeros((llm.hidden_size, llm.vocab_size), np.float32))
        first.switch_lm_head("zeros")
        assert [answer(share, WORDS).lm_head for share in (first, second)] == ["zeros", ""]
        assert (first.active_lm_head, second.active_lm_head) == ("zeros", "")
        with pytest.raises(ValueError, match="unknown LM head 'none'; added: zeros"):
            second.switch_lm_head("none")


class TestSystemPrompts:
    def is_saved(self, shared) -> bool:
        return shared.runtime.pipeline.prefixes.pinned_bytes > 0

    def test_a_prompt_of_two_shares_stays_until_both_release_it(self, shared, first, second):
        for share in (first, second):
            share.gen_and_save_system_prompt_kv_cache(SYSTEM)
        first.release_system_prompt_kv_cache(SYSTEM)
        assert self.is_saved(shared)
        with pytest.raises(ValueError, match="is not saved for the base model"):
            first.release_system_prompt_kv_cache(SYSTEM)
        second.release_system_prompt_kv_cache(SYSTEM)
        assert not self.is_saved(shared)

    def test_a_share_that_is_closed_releases_its_prompts(self, shared, first, second):
        first.gen_and_save_system_prompt_kv_cache(SYSTEM)
        with pytest.raises(ValueError, match="is not saved for the base model"):
            second.release_system_prompt_kv_cache(SYSTEM)
        first.close()
        assert not self.is_saved(shared)


def test_the_runtime_is_open_until_its_last_share_is_closed(shared, first, second):
    first.close()
    first.close()
    assert (first.closed, second.closed, shared.runtime.closed) == (True, False, False)
    with pytest.raises(EngineError, match="the runtime is closed"):
        first.submit(WORDS)
    assert answer(second, WORDS).token_ids
    second.close()
    assert shared.runtime.closed
    with pytest.raises(EngineError, match="the runtime is closed"):
        shared.share()


def test_tokens_are_counted_for_each_share(shared, first, second):
    response = answer(first, WORDS)
    assert first.share_tokens == response.prompt_tokens + len(response.token_ids)
    assert second.share_tokens == 0


def test_weights_and_rows_out_of_range_are_refused(shared, first):
    with pytest.raises(ValueError, match=r"weight must be a number from 0.01 to 100, got 0"):
        shared.share(weight=0)
    with pytest.raises(ValueError, match="rows must be an integer from 1 to"):
        shared.share(rows=0)
    assert (first.rows, shared.share(rows=1).rows) == (shared.runtime.rows, 1)


def test_shares_of_a_policy(tmp_path, device):
    export(write_smolvla(tmp_path / "checkpoint"), tmp_path / "engine")
    frames = tuple(np.full((*size, 3), 90, np.uint8) for size in CAMERAS.values())
    one = LLMGenerationRequest("pick it up", images=frames, state=np.array([0.3, -1, 2]))
    shared = SharedRuntime(LLMInferenceRuntime(tmp_path / "engine", device))
    with shared.share() as first, shared.share() as second:
        first.set_action_noise_seed(7)
        expected = shared.runtime.handle_request(dataclasses.replace(one, noise_seed=7)).actions
        np.testing.assert_array_equal(answer(first, one).actions, expected)
        assert answer(second, one).noise_seed == 0
        assert first.lora_names() == []
        with pytest.raises(EngineError, match="it has no language model"):
            first.switch_lora_weights("a")
