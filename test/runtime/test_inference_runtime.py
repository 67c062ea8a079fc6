# SPDX-License-Identifier: Apache-2.0
"""LLMInferenceRuntime: answers, actions, cancellation, errors and metrics."""

import dataclasses
import itertools
import json
import shutil
import threading

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgellm_ros.diffusion.chunking import ChunkCondition
from edgellm_ros.diffusion.sampling import Sampling
from edgellm_ros.engine.errors import DeviceLostError, EngineError
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.engine_directory.files import list_files
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.prefix_reuse import PrefixReuse
from fixtures.on_device import error_without_gpu
from fixtures.requests_for_tests import (
    IMAGE,
    OTHER_IMAGE,
    OTHER_SOUND,
    SOUND,
    assert_same_answer,
    assert_same_bits,
    request,
)

DIFFERENT_REQUESTS = [
    request(images=(IMAGE,), action_samples=3, noise_seed=5, max_tokens=30),
    request("what do you see in front of you?", temperature=1.2, top_k=40, seed=3, logprobs=2, max_tokens=25),
    request("", images=(OTHER_IMAGE, IMAGE), temperature=0.8, top_p=0.9, seed=4, repetition_penalty=1.3),
    request(images=(IMAGE,), action_samples=1, noise_seed=6, denoise_steps=7, speed=0.4, max_tokens=30),
    request("stop", system_prompt="be brief", min_p=0.05, temperature=1.5, stop=("a", "q"), max_tokens=20),
    request("", images=(IMAGE,), audio=(SOUND,), action_samples=1, noise_seed=2, logprobs=1, max_tokens=20),
    request("and now?", audio=(OTHER_SOUND, SOUND), temperature=1.0, seed=5, max_tokens=15),
]


@pytest.mark.slow
def test_the_same_request_gives_the_same_answer_on_every_run(acting_runtime):
    for one in DIFFERENT_REQUESTS:
        assert_same_bits(acting_runtime.handle_request(one), acting_runtime.handle_request(one))


@pytest.mark.slow
def test_the_same_request_gives_the_same_answer_in_every_batch(acting_runtime):
    alone = [acting_runtime.handle_request(one) for one in DIFFERENT_REQUESTS]
    assert alone[0].actions is not None
    for size in (2, 3, 4):
        chosen_ones = itertools.permutations(range(len(DIFFERENT_REQUESTS)), size)
        for chosen in itertools.islice(chosen_ones, 0, None, 17):
            answers = acting_runtime.handle_request([DIFFERENT_REQUESTS[index] for index in chosen])
            for index, answer in zip(chosen, answers, strict=True):
                assert_same_answer(answer, alone[index])


@pytest.mark.slow
def test_a_new_runtime_gives_the_same_answer(acting_runtime, acting_engine, runtime_device):
    with LLMInferenceRuntime(acting_engine, runtime_device) as other:
        for one in DIFFERENT_REQUESTS:
            assert_same_answer(other.handle_request(one), acting_runtime.handle_request(one))


def test_a_batch_of_one_returns_a_list(runtime):
    (answer,) = runtime.handle_request([request()])
    assert_same_answer(answer, runtime.handle_request(request()))


def test_other_images_give_other_answers(runtime):
    answers = [runtime.handle_request(request(images=images)) for images in [(), (IMAGE,), (OTHER_IMAGE,)]]
    assert len({tuple(answer.token_ids) for answer in answers}) == 3


def test_other_sounds_or_another_order_give_other_answers(runtime):
    choices = [(), (SOUND,), (OTHER_SOUND,), (SOUND, OTHER_SOUND), (OTHER_SOUND, SOUND)]
    answers = [runtime.handle_request(request("", audio=sounds, logprobs=1)) for sounds in choices]
    assert len({str(answer.logprobs) for answer in answers}) == len(choices)


def test_rows_of_earlier_images_do_not_reach_a_later_sound(tiny_engine, runtime, runtime_device):
    """Neither embeddings nor deepstack features of earlier images reach a sound."""
    spoken = request("", images=(IMAGE,), audio=(SOUND,), logprobs=1)
    runtime.handle_request([request(images=(OTHER_IMAGE, IMAGE))] * 4)
    with LLMInferenceRuntime(tiny_engine, runtime_device) as other:
        assert_same_answer(runtime.handle_request(spoken), other.handle_request(spoken))


def test_seeds_change_answers_only_with_a_temperature(runtime):
    sampled = [runtime.handle_request(request(temperature=1.5, seed=seed)).token_ids for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    greedy = [runtime.handle_request(request(seed=seed)).token_ids for seed in (1, 2)]
    assert greedy[0] == greedy[1]


def test_max_tokens_ends_an_answer_with_length(runtime, words):
    answer = runtime.handle_request(request(images=(IMAGE,), max_tokens=4))
    assert answer.token_ids == words[:4]
    assert answer.finish_reason == "length"


@pytest.mark.slow
def test_the_cache_s_capacity_ends_an_answer_with_length(runtime):
    never = request("x" * 100, max_tokens=10_000, temperature=2.0)
    config = runtime.config
    for seed in range(20):
        one = dataclasses.replace(never, sampling=dataclasses.replace(never.sampling, seed=seed))
        answer = runtime.handle_request(one)
        if answer.finish_reason == "length":
            assert answer.prompt_tokens + len(answer.token_ids) == config.builder.max_kv_cache_capacity
            return
    pytest.fail("no answer was long enough")


def test_a_stop_token_ends_the_answer_and_is_not_in_the_text(acting_runtime, runtime, words, trigger_index):
    answer = acting_runtime.handle_request(request(images=(IMAGE,), max_tokens=30))
    assert answer.finish_reason == "stop"
    assert answer.token_ids == words[: trigger_index + 1]
    before = runtime.handle_request(request(images=(IMAGE,), max_tokens=trigger_index))
    assert answer.text == before.text
    assert answer.actions is None  # none were requested


def test_a_stop_string_ends_the_answer_and_is_not_in_the_text(runtime):
    whole = runtime.handle_request(request("what do you see?", max_tokens=30)).text
    stop = whole[5:8]
    answer = runtime.handle_request(request("what do you see?", max_tokens=30, stop=("never there", stop)))
    assert answer.finish_reason == "stop"
    assert answer.text == whole[: whole.index(stop)]


def test_progress_text_only_grows(runtime):
    whole = runtime.handle_request(request("what do you see?", max_tokens=30)).text
    seen = []
    answer = runtime.handle_request(
        request("what do you see?", images=(), max_tokens=30, stop=(whole[8:11],), on_progress=seen.append)
    )
    texts = [progress.text for progress in seen]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert texts[-1] == answer.text
    assert [progress.tokens for progress in seen if progress.stage == "decode"] == list(
        range(1, len(answer.token_ids) + 1)
    )


def test_progress_names_the_stages_in_order(acting_runtime):
    seen = []
    one = request(images=(IMAGE,), action_samples=1, denoise_steps=3, max_tokens=30, on_progress=seen.append)
    acting_runtime.handle_request(one)
    stages = [stage for stage, _ in itertools.groupby(progress.stage for progress in seen)]
    assert stages == ["vision", "prefill", "decode", "action"]
    assert [progress.step for progress in seen if progress.stage == "action"] == [0, 1, 2]
    seen.clear()
    acting_runtime.handle_request(dataclasses.replace(one, audio=(SOUND, OTHER_SOUND)))
    stages = [(progress.stage, progress.step) for progress in seen if progress.stage != "decode"]
    assert stages[:4] == [("vision", 0), ("audio", 0), ("audio", 1), ("prefill", 0)]


def test_every_token_has_log_probabilities(runtime):
    answer = runtime.handle_request(request(logprobs=3, temperature=1.5, seed=1))
    assert len(answer.logprobs) == len(answer.token_ids)
    for token, entries in zip(answer.token_ids, answer.logprobs, strict=True):
        best = entries[:3]
        assert best == sorted(best, key=lambda entry: -entry[1])
        assert token in dict(entries)
        assert len(entries) == 3 or (len(entries) == 4 and entries[3][0] == token)
        assert sum(np.exp(value) for _, value in entries) <= 1
    assert runtime.handle_request(request()).logprobs is None


def test_a_repetition_penalty_avoids_tokens_of_prompt_and_answer(runtime):
    answer = runtime.handle_request(request("abc", repetition_penalty=1e6, max_tokens=40))
    assert len(set(answer.token_ids)) == len(answer.token_ids)


class TestActions:
    def act(self, runtime, **parameters):
        return runtime.handle_request(request(images=(IMAGE,), max_tokens=30, **parameters))

    def test_trajectories_have_paths(self, acting_runtime):
        answer = self.act(acting_runtime, action_samples=3)
        space = acting_runtime.config.action.action_space
        assert answer.actions.shape == (3, space.horizon, 2)
        assert answer.paths.shape == (3, space.horizon + 1, 4)
        assert answer.actions.dtype == answer.paths.dtype == np.float32
        assert (answer.actions >= space.low).all()
        assert (answer.actions <= space.high).all()
        assert not answer.paths[:, 0].any()  # from the origin, at speed 0

    def test_the_noise_seed_determines_the_trajectory_and_is_reported(self, acting_runtime):
        first, again, other = (self.act(acting_runtime, action_samples=1, noise_seed=s) for s in (1, 1, 2))
        assert (first.noise_seed, other.noise_seed) == (1, 2)
        assert_same_answer(first, again)
        assert np.abs(first.actions - other.actions).max() > 0.01
        assert first.token_ids == other.token_ids

    def test_requests_without_noise_seed_use_the_runtime_s(self, acting_runtime):
        acting_runtime.set_action_noise_seed(77)
        try:
            default = self.act(acting_runtime, action_samples=1)
        finally:
            acting_runtime.set_action_noise_seed(0)
        assert_same_answer(default, self.act(acting_runtime, action_samples=1, noise_seed=77))
        with pytest.raises(ValueError, match="noise seed must be from 0"):
            acting_runtime.set_action_noise_seed(-1)

    def test_a_speed_without_a_history_means_a_straight_past(self, acting_runtime):
        """A past at standstill would contradict the speed."""
        history = np.column_stack([0.07 * np.arange(-3, 1), np.zeros(4)])
        expected = self.act(acting_runtime, action_samples=1, speed=0.7, history=history)
        given = self.act(acting_runtime, action_samples=1, speed=0.7)
        np.testing.assert_array_equal(given.actions, expected.actions)

    def test_speed_is_the_request_s_or_follows_from_the_history(self, acting_runtime):
        history = np.stack([np.linspace(-0.15, 0, 4), np.zeros(4), np.zeros(4)], axis=1)
        given = self.act(acting_runtime, action_samples=1, speed=0.7)
        assert given.paths[0, 0, 3] == np.float32(0.7)
        # another history is another prompt: the answer may have other tokens before the trigger
        points = acting_runtime.handle_request(request(images=(IMAGE,), history=history, action_samples=1))
        if points.paths is not None:
            assert points.paths[0, 0, 3] == pytest.approx(0.5)

    def test_the_client_sets_the_number_of_denoising_steps(self, acting_runtime):
        default, same, more = (
            self.act(acting_runtime, action_samples=1, denoise_steps=n) for n in (None, 4, 50)
        )
        assert_same_answer(default, same)
        assert 0 < np.abs(more.actions - same.actions).max() < 1.5

    def test_an_answer_without_trigger_token_has_no_actions(self, acting_runtime):
        answer = acting_runtime.handle_request(request(images=(IMAGE,), max_tokens=2, action_samples=1))
        assert answer.finish_reason == "length"
        assert answer.actions is None
        assert answer.paths is None

    def test_the_prompt_is_stored_while_the_device_samples_the_actions(self, acting_runtime, monkeypatch):
        acting_runtime.pipeline.reuse.clear()
        events, owners = [], {Sampling: "read", PrefixReuse: "store"}
        for owner, name in owners.items():
            original = getattr(owner, name)

            def watched(*args, original=original, name=name):
                events.append(name)
                return original(*args)

            monkeypatch.setattr(owner, name, watched)
        self.act(acting_runtime, action_samples=1)
        assert events == ["store", "read"]

    def test_the_trigger_token_is_in_the_cache_before_the_head_reads_it(
        self, acting_runtime, device, monkeypatch
    ):
        action, lengths = acting_runtime.pipeline.action, []
        queue = action.queue_part

        def watched(cache, *rest):
            lengths.extend(device.download(cache.length).tolist())
            return queue(cache, *rest)

        monkeypatch.setattr(action, "queue_part", watched)
        answer = self.act(acting_runtime, action_samples=1)
        assert lengths == [answer.prompt_tokens + len(answer.token_ids)]


class TestCancel:
    def test_a_request_cancelled_while_its_sounds_are_encoded_ends_there(self, runtime):
        cancel = threading.Event()
        seen = []

        def on_progress(progress):
            seen.append((progress.stage, progress.step))
            if progress.stage == "audio":
                cancel.set()

        one = request("", audio=(SOUND, SOUND))
        cancelled = dataclasses.replace(one, on_progress=on_progress, cancel=cancel)
        answers = runtime.handle_request([cancelled, one])
        assert answers[0].finish_reason == "cancelled"
        assert seen == [("audio", 0)]
        assert_same_answer(answers[1], runtime.handle_request(one))

    @pytest.mark.parametrize("stage", ["vision", "prefill", "decode", "action"])
    def test_a_request_can_be_cancelled_in_every_stage_while_others_go_on(self, acting_runtime, stage):
        cancel = threading.Event()

        def on_progress(progress):
            if progress.stage == stage and progress.step == (2 if stage in ("decode", "action") else 0):
                cancel.set()

        one = request(images=(IMAGE,), action_samples=1, max_tokens=30)
        cancelled = dataclasses.replace(one, on_progress=on_progress, cancel=cancel)
        answers = acting_runtime.handle_request([one, cancelled, one])
        whole = acting_runtime.handle_request(one)
        assert_same_answer(answers[0], whole)
        assert_same_answer(answers[2], whole)
        assert answers[1].finish_reason == "cancelled"
        assert answers[1].actions is None
        assert whole.text.startswith(answers[1].text)
        expected = {"vision": 0, "prefill": 0, "decode": 3, "action": len(whole.token_ids)}
        assert answers[1].token_ids == whole.token_ids[: expected[stage]]

    def test_a_batch_whose_requests_are_all_cancelled_ends_at_once(self, runtime):
        cancel = threading.Event()
        cancel.set()
        answers = runtime.handle_request([request(cancel=cancel), request(images=(IMAGE,), cancel=cancel)])
        assert [answer.finish_reason for answer in answers] == ["cancelled"] * 2
        assert [answer.token_ids for answer in answers] == [[], []]
        assert_same_answer(runtime.handle_request(request()), runtime.handle_request(request()))

    def test_an_error_in_a_callback_reaches_the_caller_and_harms_no_other_request(self, runtime):
        before = runtime.handle_request(request())

        def fail(progress):
            if progress.stage == "decode":
                raise RuntimeError("client bug")

        with pytest.raises(RuntimeError, match="client bug"):
            runtime.handle_request(request(on_progress=fail))
        assert_same_answer(runtime.handle_request(request()), before)


class TestRefusals:
    @pytest.mark.parametrize(
        ("parameters", "message"),
        [
            ({"prompt": "word " * 10_000}, r"the prompt has \d{5} tokens; this engine takes at most 447"),
            ({"audio": (np.zeros(16),)}, "audio must be Sound objects, got ndarray"),
            (
                {"audio": (Sound(np.zeros(16_000 * 600, np.float32), 16_000),)},
                r"a sound of 600\.00 s becomes 7800 tokens, the .* at most 320 \(less than 24\.65 s\)",
            ),
            ({"audio": (Sound(np.zeros(100, np.float32), 8_000),)}, r"a sound of 0\.013 s is too short"),
            ({"prompt": "word " * 40, "audio": (SOUND,) * 12}, r"the prompt has \d{3} tokens"),
            ({"lora": "racing"}, "unknown LoRA adapter 'racing'; loaded: none"),
            ({"action_samples": 10_000}, r"action_samples is 10000; this engine takes at most \d+"),
            ({"images": (np.zeros((4, 4), np.uint8),)}, r"got uint8 \[4, 4\]"),
            ({"images": (np.zeros((0, 4, 3), np.uint8),)}, "must not be empty"),
            ({"history": np.zeros((2, 2))}, r"history must have shape \[4, 2 or 3\]"),
            ({"history": np.full((4, 2), np.inf)}, "not finite"),
            ({"prompt": "\ud800"}, "not valid Unicode"),
        ],
    )
    def test_a_request_that_cannot_be_served_says_why(self, runtime, parameters, message):
        with pytest.raises(ValueError, match=message):
            runtime.handle_request(request(**parameters))

    def test_in_a_batch_the_request_is_named(self, runtime):
        with pytest.raises(ValueError, match="request 1: unknown LoRA adapter"):
            runtime.handle_request([request(), request(lora="x")])

    @pytest.mark.parametrize("count", [0, 5])
    def test_a_batch_that_is_too_large_or_empty_names_the_limit(self, runtime, count):
        with pytest.raises(ValueError, match=f"a batch of {count} requests; this engine takes 1 to 4"):
            runtime.handle_request([request()] * count)

    def test_using_a_closed_runtime_is_an_error(self, tiny_engine, runtime_device):
        runtime = LLMInferenceRuntime(tiny_engine, runtime_device)
        runtime.close()
        runtime.close()
        for call in (
            lambda: runtime.handle_request(request()),
            lambda: runtime.embedding_table,
            lambda: runtime.base_model_hidden_states(0),
            lambda: runtime.base_model_input_token_ids,
            lambda: runtime.batch_index_mapping,
            lambda: runtime.base_model_prefill_length,
        ):
            with pytest.raises(EngineError, match="closed"):
                call()


class TestEnginesWithoutEncoders:
    @pytest.fixture
    def engine(self, tiny_engine, tmp_path):
        shutil.copytree(tiny_engine, tmp_path / "engine")
        return tmp_path / "engine"

    def test_without_a_vision_encoder_images_are_refused(self, tiny_checkpoint, tmp_path, runtime_device):
        from edgellm_ros.builder import export

        checkpoint = tmp_path / "text"
        shutil.copytree(tiny_checkpoint, checkpoint)
        shutil.rmtree(checkpoint / "action_expert")
        export(checkpoint, tmp_path / "engine")
        with LLMInferenceRuntime(tmp_path / "engine", runtime_device) as runtime:
            assert runtime.handle_request(request(images=(IMAGE,))).token_ids
            chunk = ChunkCondition(actions=np.zeros((6, 2)), executed=0, delay=1)
            refused = ({"action_samples": 1}, {"history": np.zeros((4, 2))}, {"previous_chunk": chunk})
            for parameters in refused:
                with pytest.raises(ValueError, match="no action head"):
                    runtime.handle_request(request(**parameters))

    def test_without_an_audio_encoder_sounds_are_refused(self, engine_without_audio, runtime_device):
        with LLMInferenceRuntime(engine_without_audio, runtime_device) as runtime:
            assert runtime.config.audio is None
            assert runtime.handle_request(request()).token_ids
            with pytest.raises(ValueError, match="this engine has no audio encoder"):
                runtime.handle_request(request(audio=(SOUND,)))

    @pytest.mark.slow
    @pytest.mark.only_on("cpu", reason="in half precision sums in another order give other tokens")
    def test_half_precision_answers_do_not_depend_on_the_batch(
        self, tiny_checkpoint, tmp_path, runtime_device
    ):
        from edgellm_ros.builder import export

        export(tiny_checkpoint, tmp_path / "engine", precision="fp16")
        with LLMInferenceRuntime(tmp_path / "engine", runtime_device) as runtime:
            one = request(images=(IMAGE,), audio=(SOUND,))
            other = request("what do you see?", audio=(OTHER_SOUND,), max_tokens=20)
            alone = runtime.handle_request(one)
            for answer in runtime.handle_request([one, other, one])[::2]:
                assert_same_answer(answer, alone)

    def test_a_missing_file_is_named_at_loading(self, engine, runtime_device):
        (engine / "tokenizer.json").unlink()
        with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
            LLMInferenceRuntime(engine, runtime_device)

    def test_a_truncated_weight_file_is_named_at_loading(self, engine, runtime_device):
        weights = next(engine.glob("llm/*.data"))
        weights.write_bytes(weights.read_bytes()[:1000])
        with pytest.raises(ValueError, match=r"llm/model\.onnx\.data has 1000 bytes"):
            LLMInferenceRuntime(engine, runtime_device)

    def test_a_wrong_key_is_named_at_loading(self, engine, runtime_device):
        path = engine / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "colour": "red"}))
        with pytest.raises(ValueError, match="unknown key 'colour'"):
            LLMInferenceRuntime(engine, runtime_device)

    def test_non_finite_numbers_are_an_error_and_do_not_affect_the_next_request(
        self, engine, runtime, runtime_device
    ):
        table = load_file(engine / "embedding.safetensors")["embedding"]
        table[ord("z") - ord("!")] = np.nan  # the tokenizer's alphabet begins with "!"
        save_file({"embedding": table}, engine / "embedding.safetensors")
        config = EngineConfig.load
        data = json.loads((engine / "config.json").read_text())
        paths = [entry["path"] for entry in data["files"]]
        data["files"] = [vars(entry) for entry in list_files(engine, paths)]
        (engine / "config.json").write_text(json.dumps(data))
        assert config(engine)
        with LLMInferenceRuntime(engine, runtime_device) as broken:
            with pytest.raises(EngineError, match="logits are not finite at token 0"):
                broken.handle_request([request("a"), request("z")])
            assert_same_answer(broken.handle_request(request()), runtime.handle_request(request()))


def test_a_lost_device_raises_the_first_error(tiny_engine, monkeypatch):
    with LLMInferenceRuntime(tiny_engine) as runtime:
        pipeline = runtime.pipeline

        def lose(*_: object, **__: object) -> None:
            raise DeviceLostError("the GPU is gone")

        def gone(*_: object) -> None:
            raise DeviceLostError("it cannot be used")

        monkeypatch.setattr(pipeline.runner, "execute_prefill_step", lose)
        monkeypatch.setattr(pipeline.device, "fill_zero", gone)
        with pytest.raises(DeviceLostError, match="the GPU is gone"):
            runtime.handle_request(request())


def test_metrics_count_tokens_runs_and_encoded_rows(tiny_engine, runtime_device):
    with LLMInferenceRuntime(tiny_engine, runtime_device) as runtime:
        requests = [request(images=(IMAGE,)), request("hello", audio=(SOUND,))]
        answers = runtime.handle_request(requests)
        assert runtime.prefill_metrics.computed_tokens == sum(answer.prompt_tokens for answer in answers)
        assert runtime.prefill_metrics.total_runs == 1
        assert runtime.generation_metrics.generated_tokens == sum(len(answer.token_ids) for answer in answers)
        multimodal = runtime.multimodal_metrics
        assert (multimodal.total_images, multimodal.total_image_tokens) == (1, 12)
        assert (multimodal.total_sounds, multimodal.total_audio_tokens) == (1, 33)  # 2.5 s: 2 x 13 + 7
        assert runtime.action_metrics.trajectories == 0
        metrics = answers[0].metrics
        names = ("tokenize", "vision", "audio", "prefill", "decode", "action", "keep")
        stages = [metrics[f"{stage}_s"] for stage in names]
        assert metrics["audio_s"] > 0
        assert metrics["total_s"] == pytest.approx(sum(stages))
        assert 0 < metrics["first_token_s"] < metrics["total_s"]


def test_threads_take_turns(runtime):
    prompts = ["one", "two", "three", "four"]
    expected = [runtime.handle_request(request(prompt)) for prompt in prompts]
    answers = {}
    threads = [
        threading.Thread(target=lambda p=prompt: answers.update({p: runtime.handle_request(request(p))}))
        for prompt in prompts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for prompt, answer in zip(prompts, expected, strict=True):
        assert_same_answer(answers[prompt], answer)


def test_an_engine_without_lora_inputs_has_no_adapters(runtime):
    assert runtime.lora_names() == []


@pytest.mark.only_on("cpu", reason="GPUs have graphs")
def test_the_cpu_captures_no_graphs(runtime):
    assert runtime.capture_decoding_cuda_graph() is False


@pytest.mark.slow
def test_an_unavailable_device_is_an_error_that_says_so(tiny_engine):
    program = (
        "from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime\n"
        f"LLMInferenceRuntime({str(tiny_engine)!r}, device='cuda')"
    )
    assert "EngineError: device 'cuda' is not available: " in error_without_gpu("-c", program)


def test_a_device_can_be_passed_or_named(tiny_engine, runtime, runtime_device):
    with LLMInferenceRuntime(tiny_engine, runtime_device) as other:
        assert_same_answer(other.handle_request(request()), runtime.handle_request(request()))
