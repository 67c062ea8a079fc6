# SPDX-License-Identifier: Apache-2.0
"""Answers with a reused prefix have the bits of answers without a prefix cache."""

import dataclasses
import json
import shutil
import threading

import numpy as np
import pytest

from edgellm_ros.builder import export
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.prefix.prefix_file import engine_fingerprint, load_prefix_cache
from fixtures.draws import draws
from fixtures.on_device import edited
from fixtures.prefix_requests import REQUESTS, SYSTEM
from fixtures.requests_for_tests import IMAGE, OTHER_IMAGE, OTHER_SOUND, SOUND, assert_same_answer, request
from fixtures.tiny_adapter import write_adapter


@pytest.fixture(scope="module")
def lora_engine(tiny_lora_engine, tiny_checkpoint, words, trigger_index, tmp_path_factory):
    """An engine with two adapters; its base model triggers as that of `acting_engine`."""
    directory = tmp_path_factory.mktemp("reuse") / "engine"
    shutil.copytree(tiny_lora_engine, directory)
    data = json.loads((directory / "config.json").read_text())
    data["action"]["future_start_token_id"] = words[trigger_index]
    data["stop_token_ids"] = [*data["stop_token_ids"], words[trigger_index]]
    (directory / "config.json").write_text(json.dumps(data))
    for seed, name in enumerate(("one", "two")):
        write_adapter(directory / "lora" / name, tiny_checkpoint, seed=seed, r=4)
    return directory


@pytest.fixture(scope="module")
def recomputing(lora_engine, device):
    """A runtime without prefix cache: it computes every prompt."""
    with LLMInferenceRuntime(lora_engine, device, prefix_cache_bytes=0) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def caching_runtime(lora_engine, device):
    with LLMInferenceRuntime(lora_engine, device) as runtime:
        yield runtime


@pytest.fixture
def reusing(caching_runtime):
    """A runtime with an empty prefix cache."""
    caching_runtime.clear_prefix_cache()
    return caching_runtime


def prefix_of(runtime, one, other) -> int:
    """Return the length of the common prefix of two text prompts in tokens."""
    ids = []
    for prompt in (one, other):
        runtime.handle_request(dataclasses.replace(prompt, sampling=request(max_tokens=1).sampling))
        ids += runtime.base_model_input_token_ids
    differing = [i for i, (a, b) in enumerate(zip(*ids, strict=False)) if a != b]
    return differing[0] if differing else min(map(len, ids))


class TestAnswersAreTheSame:
    @pytest.mark.slow
    def test_when_a_request_is_repeated(self, reusing, recomputing):
        for one in REQUESTS:
            expected = recomputing.handle_request(one)
            for _ in range(3):
                answer = reusing.handle_request(one)
                assert_same_answer(answer, expected)
            assert answer.reused_tokens == answer.prompt_tokens - 1
        assert recomputing.handle_request(REQUESTS[2]).actions is not None

    @pytest.mark.slow
    @pytest.mark.parametrize("seed", range(draws(3, 5)))
    def test_for_random_batches_of_random_adapters_in_a_cache_that_is_too_small(
        self, lora_engine, recomputing, seed, runtime_device
    ):
        rng = np.random.default_rng(seed)
        requests = [dataclasses.replace(one, lora=name) for one in REQUESTS for name in ("", "one", "two")]
        expected: dict[int, object] = {}
        reused = 0
        with LLMInferenceRuntime(lora_engine, runtime_device, prefix_cache_bytes=25 * 24576) as runtime:
            for _ in range(15):
                chosen = rng.choice(len(requests), rng.integers(1, 5), replace=False)
                answers = runtime.handle_request([requests[index] for index in chosen])
                for index, answer in zip(chosen, answers, strict=True):
                    if index not in expected:
                        expected[index] = recomputing.handle_request(requests[index])
                    assert_same_answer(answer, expected[index])
                    reused += answer.reused_tokens
        assert reused > 500

    def test_after_an_answer_that_was_cancelled(self, reusing, recomputing):
        cancel = threading.Event()

        def on_progress(progress):
            if progress.stage == "decode" and progress.step == 2:
                cancel.set()

        reusing.handle_request(dataclasses.replace(REQUESTS[2], cancel=cancel, on_progress=on_progress))
        answer = reusing.handle_request(REQUESTS[2])
        assert answer.reused_tokens > 0
        assert_same_answer(answer, recomputing.handle_request(REQUESTS[2]))

    def test_after_a_client_s_callback_failed(self, reusing, recomputing):
        def fail(progress):
            if progress.stage == "decode":
                raise RuntimeError("client bug")

        reusing.handle_request(REQUESTS[0])
        with pytest.raises(RuntimeError, match="client bug"):
            reusing.handle_request(dataclasses.replace(REQUESTS[1], on_progress=fail))
        answer = reusing.handle_request(REQUESTS[1])
        assert answer.reused_tokens > 0
        assert_same_answer(answer, recomputing.handle_request(REQUESTS[1]))

    def test_when_a_long_remainder_limits_the_reused_prefix(self, reusing, recomputing):
        long, other = request("x" * 280, max_tokens=4), request("y" * 285, max_tokens=4)
        reusing.handle_request(long)
        answers = reusing.handle_request([long, other])
        room = reusing.config.builder.max_kv_cache_capacity
        room -= answers[1].prompt_tokens - answers[1].reused_tokens
        assert answers[0].reused_tokens == room < answers[0].prompt_tokens - 1
        for answer, one in zip(answers, (long, other), strict=True):
            assert_same_answer(answer, recomputing.handle_request(one))


class TestWhatIsReused:
    def test_the_longest_common_prefix_of_two_prompts(self, reusing):
        common = prefix_of(reusing, *REQUESTS[:2])
        assert common > len(SYSTEM)
        reusing.clear_prefix_cache()
        assert reusing.handle_request(REQUESTS[0]).reused_tokens == 0
        assert reusing.handle_request(REQUESTS[1]).reused_tokens == common

    def test_a_repeated_image_is_not_encoded_again(self, reusing):
        one = request("what?", images=(IMAGE,))
        other = request("stop", images=(IMAGE.copy(),))
        reusing.handle_request(one)
        before = dataclasses.replace(reusing.multimodal_metrics)
        answer = reusing.handle_request(other)
        assert answer.reused_tokens > 12
        assert reusing.multimodal_metrics.total_images == before.total_images
        assert reusing.handle_request(request("what?", images=(OTHER_IMAGE,))).reused_tokens < 12
        assert reusing.multimodal_metrics.total_images == before.total_images + 1

    def test_another_pixel_is_another_image(self, reusing):
        changed = IMAGE.copy()
        changed[0, 0, 0] ^= 1
        first = reusing.handle_request(request(images=(IMAGE,)))
        other = reusing.handle_request(request(images=(changed,)))
        assert first.reused_tokens == 0
        assert other.reused_tokens < 12

    def test_a_repeated_sound_is_not_encoded_again(self, reusing):
        reusing.handle_request(request("what?", audio=(SOUND,)))
        before = reusing.multimodal_metrics.total_sounds
        again = Sound(SOUND.samples.copy(), SOUND.sample_rate)
        assert reusing.handle_request(request("stop", audio=(again,))).reused_tokens > 33
        assert reusing.multimodal_metrics.total_sounds == before

    def test_the_same_samples_at_another_rate_are_another_sound(self, reusing):
        reusing.handle_request(request("what?", audio=(SOUND,)))
        faster = Sound(SOUND.samples, SOUND.sample_rate + 100)
        reused = reusing.handle_request(request("what?", audio=(faster,))).reused_tokens
        assert reused == reusing.handle_request(request("what?", audio=(OTHER_SOUND,))).reused_tokens

    def test_adapters_share_no_prefix(self, reusing):
        one = dataclasses.replace(REQUESTS[0], lora="one")
        reusing.handle_request(one)
        assert reusing.handle_request(REQUESTS[0]).reused_tokens == 0
        assert reusing.handle_request(dataclasses.replace(one, lora="two")).reused_tokens == 0
        assert reusing.handle_request(one).reused_tokens > 0

    def test_an_adapter_of_the_same_name_with_other_weights_shares_no_prefix(
        self, lora_engine, tiny_checkpoint, tmp_path, runtime_device
    ):
        one = dataclasses.replace(REQUESTS[0], lora="new")
        with LLMInferenceRuntime(lora_engine, runtime_device) as runtime:
            for seed in (7, 8):
                runtime.add_lora("new", write_adapter(tmp_path / str(seed), tiny_checkpoint, seed=seed, r=2))
                answer = runtime.handle_request(one)
                assert answer.reused_tokens == 0
                runtime.remove_lora("new")
                shutil.rmtree(tmp_path / str(seed))

    def test_pages_of_a_removed_adapter_are_freed(self, lora_engine, tmp_path, runtime_device):
        with LLMInferenceRuntime(lora_engine, runtime_device) as runtime:
            prefixes = runtime.pipeline.prefixes
            runtime.handle_request(REQUESTS[0])
            kept = prefixes.used_bytes

            def remove(progress):  # during the batch that stores a prompt of this adapter at its end
                if progress.stage == "decode" and "one" in runtime.lora_names():
                    runtime.remove_lora("one")

            runtime.handle_request(dataclasses.replace(REQUESTS[0], lora="one", on_progress=remove))
            assert prefixes.used_bytes == 2 * kept
            runtime.save_prefix_cache(tmp_path / "prompts")
            assert prefixes.used_bytes == kept
            answer = runtime.handle_request(REQUESTS[0])
            assert answer.reused_tokens == answer.prompt_tokens - 1

    def test_prompts_of_one_batch_are_reused_by_the_next(self, reusing):
        reusing.handle_request(REQUESTS[:4])
        answers = reusing.handle_request(REQUESTS[:4])
        for answer in answers:
            assert answer.reused_tokens == answer.prompt_tokens - 1

    def test_tokens_of_an_answer_are_not_reused(self, reusing):
        answer = reusing.handle_request(REQUESTS[2])
        pages = [page for _, page in reusing.pipeline.prefixes.pages()]
        assert sum(len(page.keys) for page in pages) == answer.prompt_tokens

    def test_hidden_states_are_those_of_the_whole_prompt(self, reusing, recomputing, device):
        for _ in range(2):
            answer = reusing.handle_request(REQUESTS[0], output_thinker_embeddings=True)
            assert answer.reused_tokens == 0
        recomputing.handle_request(REQUESTS[0], output_thinker_embeddings=True)
        np.testing.assert_array_equal(
            device.download(reusing.base_model_hidden_states(0)),
            device.download(recomputing.base_model_hidden_states(0)),
        )

    def test_metrics_count_reused_and_computed_tokens(self, reusing):
        before = dataclasses.replace(reusing.prefill_metrics)
        answers = [reusing.handle_request(one) for one in REQUESTS[:2]]
        reused = reusing.prefill_metrics.reused_tokens - before.reused_tokens
        computed = reusing.prefill_metrics.computed_tokens - before.computed_tokens
        assert reused == sum(answer.reused_tokens for answer in answers) > 0
        assert reused + computed == sum(answer.prompt_tokens for answer in answers)

    def test_the_tokens_of_a_prompt_are_reported_in_full(self, reusing):
        first = reusing.handle_request(REQUESTS[0])
        reusing.handle_request(REQUESTS[0])
        assert len(reusing.base_model_input_token_ids[0]) == first.prompt_tokens


class TestSystemPrompt:
    def test_a_saved_system_prompt_is_reused_by_every_request_with_it(self, reusing, recomputing):
        tokens = reusing.gen_and_save_system_prompt_kv_cache(SYSTEM)
        assert tokens > len(SYSTEM)
        for index in (0, 1, 3, 5):
            answer = reusing.handle_request(REQUESTS[index])
            assert answer.reused_tokens >= tokens
            assert_same_answer(answer, recomputing.handle_request(REQUESTS[index]))

    def test_a_saved_system_prompt_is_reused_only_with_its_adapter(self, reusing, recomputing):
        tokens = reusing.gen_and_save_system_prompt_kv_cache(SYSTEM, "one")
        assert reusing.handle_request(REQUESTS[0]).reused_tokens == 0
        answer = reusing.handle_request(dataclasses.replace(REQUESTS[0], lora="one"))
        assert answer.reused_tokens == tokens
        assert_same_answer(answer, recomputing.handle_request(dataclasses.replace(REQUESTS[0], lora="one")))

    def test_saving_a_system_prompt_again_computes_one_token(self, reusing):
        first = reusing.gen_and_save_system_prompt_kv_cache(SYSTEM)
        before = reusing.prefill_metrics.computed_tokens
        assert reusing.gen_and_save_system_prompt_kv_cache(SYSTEM) == first
        assert reusing.prefill_metrics.computed_tokens == before + 1

    @pytest.mark.parametrize(
        ("system_prompt", "lora", "message"),
        [
            ("", "", "the system prompt is empty"),
            ("word " * 100, "", r"the prompt has \d{3} tokens; this engine takes at most 447"),
            (SYSTEM, "missing", "unknown LoRA adapter 'missing'"),
        ],
    )
    def test_a_system_prompt_that_cannot_be_saved_is_an_error(self, reusing, system_prompt, lora, message):
        with pytest.raises(ValueError, match=message):
            reusing.gen_and_save_system_prompt_kv_cache(system_prompt, lora)

    def test_a_cache_without_room_for_a_system_prompt_is_an_error(
        self, lora_engine, recomputing, runtime_device
    ):
        with pytest.raises(ValueError, match=r"the prefix cache of 0 bytes has room for 0 of \d+ tokens"):
            recomputing.gen_and_save_system_prompt_kv_cache(SYSTEM)
        with (
            LLMInferenceRuntime(lora_engine, runtime_device, prefix_cache_bytes=2 * 24576) as runtime,
            pytest.raises(ValueError, match=r"49152 bytes has room for 64 of \d+ tokens"),
        ):
            runtime.gen_and_save_system_prompt_kv_cache(SYSTEM)

    def test_a_saved_system_prompt_stays_until_it_is_released(self, lora_engine, recomputing, runtime_device):
        page = 24576
        with LLMInferenceRuntime(lora_engine, runtime_device, prefix_cache_bytes=12 * page) as runtime:
            tokens = runtime.gen_and_save_system_prompt_kv_cache(SYSTEM, "one")
            one = dataclasses.replace(REQUESTS[0], lora="one")

            def fill() -> None:  # the cache with other prompts, several times
                for letter in "abcdefgh":
                    runtime.handle_request(request(letter * 150, max_tokens=1))

            fill()
            answer = runtime.handle_request(one)
            assert answer.reused_tokens == tokens
            assert_same_answer(answer, recomputing.handle_request(one))
            runtime.release_system_prompt_kv_cache(SYSTEM, "one")
            with pytest.raises(ValueError, match="is not saved for the adapter 'one'"):
                runtime.release_system_prompt_kv_cache(SYSTEM, "one")
            fill()
            assert runtime.handle_request(one).reused_tokens == 0

    def test_saved_system_prompts_that_leave_no_room_for_another_are_named(self, lora_engine, runtime_device):
        page = 24576
        with LLMInferenceRuntime(lora_engine, runtime_device, prefix_cache_bytes=6 * page) as runtime:
            runtime.gen_and_save_system_prompt_kv_cache("a" * 120)
            saved = runtime.pipeline.prefixes.pinned_bytes
            assert 4 * page <= saved < 6 * page
            with pytest.raises(ValueError, match=f"{saved} bytes of it are saved system prompts: release"):
                runtime.gen_and_save_system_prompt_kv_cache("b" * 120)
            answer = runtime.handle_request(REQUESTS[0])  # needs no room in the cache
            assert answer.token_ids
            runtime.release_system_prompt_kv_cache("a" * 120)
            assert runtime.gen_and_save_system_prompt_kv_cache("b" * 120) > 120

    def test_what_drops_a_saved_system_prompt(self, reusing, tmp_path):
        reusing.gen_and_save_system_prompt_kv_cache(SYSTEM)
        reusing.save_prefix_cache(tmp_path / "prompts")
        for drop in (reusing.clear_prefix_cache, lambda: reusing.load_prefix_cache(tmp_path / "prompts")):
            reusing.gen_and_save_system_prompt_kv_cache(SYSTEM)
            drop()
            with pytest.raises(ValueError, match="is not saved for the base model"):
                reusing.release_system_prompt_kv_cache(SYSTEM)
        assert reusing.handle_request(REQUESTS[0]).reused_tokens > len(SYSTEM)  # from the file


class TestOnDisk:
    def test_another_process_reuses_saved_prompts(
        self, reusing, lora_engine, recomputing, tmp_path, runtime_device
    ):
        reusing.handle_request(REQUESTS[3])
        reusing.gen_and_save_system_prompt_kv_cache(SYSTEM, "two")
        reusing.save_prefix_cache(tmp_path / "prompts")
        with LLMInferenceRuntime(lora_engine, runtime_device) as runtime:
            assert runtime.load_prefix_cache(tmp_path / "prompts") > 0
            for one in (REQUESTS[3], REQUESTS[5], dataclasses.replace(REQUESTS[0], lora="two")):
                answer = runtime.handle_request(one)
                assert answer.reused_tokens > len(SYSTEM)
                assert_same_answer(answer, recomputing.handle_request(one))

    def test_prompts_saved_by_another_engine_are_refused(
        self, reusing, tiny_checkpoint, tmp_path, runtime_device
    ):
        reusing.handle_request(REQUESTS[0])
        reusing.save_prefix_cache(tmp_path / "prompts")
        export(tiny_checkpoint, tmp_path / "other", max_lora_rank=8, max_batch_size=2)
        with LLMInferenceRuntime(tmp_path / "other", runtime_device) as other:
            before = other.handle_request(REQUESTS[0])
            with pytest.raises(ValueError, match="saved by another engine"):
                other.load_prefix_cache(tmp_path / "prompts")
            answer = other.handle_request(REQUESTS[0])
            assert answer.reused_tokens == answer.prompt_tokens - 1
            assert_same_answer(answer, before)


def test_non_finite_rows_fail_one_request_and_are_dropped(lora_engine, recomputing, device):
    with LLMInferenceRuntime(lora_engine, device) as runtime:
        runtime.handle_request(REQUESTS[0])
        with edited(device, runtime.pipeline.prefixes.pool) as rows:
            rows[:] = np.nan
        with pytest.raises(EngineError, match="not finite"):
            runtime.handle_request(REQUESTS[0])
        answer = runtime.handle_request(REQUESTS[0])
        assert answer.reused_tokens == 0
        assert_same_answer(answer, recomputing.handle_request(REQUESTS[0]))


class FailingCopies:
    """Kernels and device of a prefix cache whose copies fail."""

    def copy_cache_ranges(self, *arguments):
        raise EngineError("the copy failed")

    upload = copy_cache_ranges


def test_a_system_prompt_whose_copy_failed_is_not_stored(lora_engine, device, monkeypatch):
    with LLMInferenceRuntime(lora_engine, device) as runtime:
        prefixes = runtime.pipeline.prefixes
        monkeypatch.setattr(prefixes, "_kernels", FailingCopies())
        with pytest.raises(EngineError, match="the copy failed"):
            runtime.gen_and_save_system_prompt_kv_cache(SYSTEM)
        assert prefixes.used_bytes == 0


def test_pages_of_a_file_whose_copy_failed_are_not_stored(reusing, tmp_path):
    pipeline = reusing.pipeline
    reusing.gen_and_save_system_prompt_kv_cache(SYSTEM)
    reusing.save_prefix_cache(tmp_path / "prompts")
    with pytest.raises(EngineError, match="the copy failed"):
        load_prefix_cache(
            tmp_path / "prompts", pipeline.prefixes, FailingCopies(), engine_fingerprint(reusing.config)
        )
    assert pipeline.prefixes.used_bytes == 0


def test_the_time_to_save_a_system_prompt_counts_as_prefill(reusing):
    before = reusing.prefill_metrics.seconds
    reusing.gen_and_save_system_prompt_kv_cache(SYSTEM)
    assert reusing.prefill_metrics.seconds > before


@pytest.mark.slow
@pytest.mark.only_on("cpu", reason="in half precision sums in another order give other tokens")
def test_half_precision_answers_are_the_same_with_reuse(tiny_checkpoint, tmp_path, runtime_device):
    export(tiny_checkpoint, tmp_path, precision="fp16")
    with (
        LLMInferenceRuntime(tmp_path, runtime_device, prefix_cache_bytes=0) as recomputing,
        LLMInferenceRuntime(tmp_path, runtime_device) as reusing,
    ):
        for index in (0, 1, 3, 4, 5, 7, 0, 3):
            assert_same_answer(
                reusing.handle_request(REQUESTS[index]), recomputing.handle_request(REQUESTS[index])
            )
        assert reusing.prefill_metrics.reused_tokens > 400


@pytest.mark.slow
@pytest.mark.only_on("cpu", reason="threads of the CPU")
@pytest.mark.parametrize("threads", [1, 3])
def test_reuse_does_not_depend_on_the_number_of_threads(lora_engine, threads, runtime_device):
    with (
        LLMInferenceRuntime(
            lora_engine, runtime_device, threads=threads, prefix_cache_bytes=0
        ) as recomputing,
        LLMInferenceRuntime(lora_engine, runtime_device, threads=threads) as reusing,
    ):
        for one in (*REQUESTS[:6], *REQUESTS[:6]):
            assert_same_answer(reusing.handle_request(one), recomputing.handle_request(one))


def test_an_engine_with_room_for_less_than_a_page_keeps_nothing(tiny_checkpoint, tmp_path, device):
    export(tiny_checkpoint, tmp_path / "engine", max_batch_size=1, max_input_len=28, max_kv_cache_capacity=30)
    with LLMInferenceRuntime(tmp_path / "engine", device) as runtime:
        assert runtime.pipeline.prefixes.capacity_bytes == 0
