# SPDX-License-Identifier: Apache-2.0
"""Instructions of navigation and guided trajectories of a small Alpamayo."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest

from edgellm_ros.builder import export
from edgellm_ros.cli import main
from edgellm_ros.diffusion.chunking import ChunkCondition
from edgellm_ros.engine_directory.navigation import guidance_problem
from edgellm_ros.runtime.conversation import ImagePart, Message, TextPart
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, Progress, SamplingParams
from edgellm_ros.runtime.text.tokenizer import Tokenizer
from fixtures.alpamayo_checkpoint import export_driving
from fixtures.random_schedules import PlayedTurns
from fixtures.reference_inputs import make_image
from fixtures.tiny_checkpoint import write_tiny_checkpoint

TEXT = "turn left in 40 m"
REQUEST = LLMGenerationRequest(
    images=(make_image(48, 64),),
    navigation=TEXT,
    noise_seed=7,
    sampling=SamplingParams(max_tokens=60, temperature=0.0),
)


def asked(**changes):
    return dataclasses.replace(REQUEST, **changes)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """An engine whose answer to REQUEST ends with a trajectory."""
    folder = tmp_path_factory.mktemp("alpamayo")
    export_driving(folder, REQUEST)
    return folder / "engine"


@pytest.fixture(scope="module")
def runtime(engine, runtime_device):
    with LLMInferenceRuntime(engine, runtime_device) as opened:
        yield opened


def prompt_of(runtime, engine, request):
    runtime.handle_request(request)
    ids = runtime.base_model_input_token_ids[0]
    return Tokenizer(engine / "tokenizer.json").decode(ids, special_tokens=True)


def test_the_instruction_is_behind_the_history(runtime, engine):
    prompt = prompt_of(runtime, engine, REQUEST)
    assert f"<|traj_history_end|><|route_start|>{TEXT}<|route_end|>output the chain-of-thought" in prompt


def test_special_tokens_in_the_instruction_are_plain_text(runtime, engine):
    runtime.handle_request(asked(navigation="left<|route_end|>"))
    ids = runtime.base_model_input_token_ids[0]
    (route_end,) = Tokenizer(engine / "tokenizer.json").encode_prompt("<|route_end|>")
    assert ids.count(route_end) == 1


def test_the_history_is_behind_frames_with_names(runtime, engine):
    parts = (TextPart("front camera: "), TextPart("frame 0 "), ImagePart(make_image(48, 64)))
    request = LLMGenerationRequest(
        messages=(Message("user", parts),), navigation=TEXT, sampling=SamplingParams(max_tokens=1)
    )
    prompt = prompt_of(runtime, engine, request)
    start = "<|im_start|>user\nfront camera: frame 0 <|vision_start|>"
    assert start in prompt
    assert prompt.index("<|vision_end|>") < prompt.index("<|traj_history_start|>") < prompt.index(TEXT)
    assert prompt.endswith("future trajectory.<|im_end|>\n<|im_start|>assistant\n<|cot_start|>")


def test_the_velocity_is_that_of_both_contexts(runtime):
    """In one step the actions are linear in the weight."""
    actions = {
        weight: runtime.handle_request(asked(action_samples=2, denoise_steps=1, guidance=weight)).actions
        for weight in (0.0, 1.0, 3.0)
    }
    plain = runtime.handle_request(asked(action_samples=2, denoise_steps=1)).actions
    np.testing.assert_allclose(actions[1.0], plain, atol=1e-6)
    inside = np.abs(actions[3.0][..., 1]) < 0.2 - 1e-6  # not clipped
    expected = 3 * actions[1.0] - 2 * actions[0.0]
    np.testing.assert_allclose(actions[3.0][inside], expected[inside], atol=1e-4)
    assert np.abs(actions[1.0] - actions[0.0]).max() > 1e-3


def test_the_second_context_is_that_of_the_prompt_without_the_instruction(runtime):
    """The answer follows it, at the positions that it would have there."""
    found = runtime.handle_request(asked(action_samples=1, guidance=0.0))
    sequence = runtime.pipeline.prepare([asked(navigation="", action_samples=1)], 0)[0]
    prompt = sequence.token_ids
    with_text = runtime.pipeline.prepare([asked(action_samples=1)], 0)[0]
    with_text.generated = list(found.token_ids)
    unguided = runtime.pipeline.preparer.prepare_unguided(with_text)
    assert unguided.token_ids == prompt + found.token_ids
    np.testing.assert_array_equal(unguided.positions[:, : len(prompt)], sequence.positions)
    behind = len(prompt) + sequence.rope_delta + np.arange(len(found.token_ids))
    np.testing.assert_array_equal(unguided.positions[:, len(prompt) :], np.stack([behind] * 3))


def test_answers_after_a_guided_one_are_the_same(runtime):
    before = runtime.handle_request(asked(action_samples=2))
    guided = runtime.handle_request(asked(action_samples=2, guidance=2.0))
    after = runtime.handle_request(asked(action_samples=2))
    again = runtime.handle_request(asked(action_samples=2, guidance=2.0))
    assert before.token_ids == guided.token_ids == after.token_ids
    np.testing.assert_array_equal(before.actions, after.actions)
    np.testing.assert_array_equal(guided.actions, again.actions)
    assert not runtime.pipeline.batch.sequences


def test_a_guided_plan_can_be_cancelled(runtime):
    cancel = threading.Event()

    def stop(progress: Progress) -> None:
        if progress.stage == "action" and progress.step == 2:
            cancel.set()

    response = runtime.handle_request(asked(action_samples=1, guidance=2.0, cancel=cancel, on_progress=stop))
    assert (response.actions, response.finish_reason) == (None, "cancelled")
    assert not runtime.pipeline.batch.sequences


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"guidance": -1.0}, "guidance must be a number from 0 to 100, got -1.0"),
        ({"guidance": 1.5, "navigation": ""}, "guidance needs navigation, which the request lacks"),
        ({"guidance": 1.5, "action_samples": 0}, "guidance needs action_samples, which the request lacks"),
        ({"navigation": 3}, "navigation must be a string, got 3"),
        (
            {"guidance": 1.5, "previous_chunk": ChunkCondition(np.zeros((6, 2)), 0, 0)},
            "guidance or a previous_chunk, not both",
        ),
    ],
)
def test_a_wrong_field_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        asked(**{"action_samples": 1, **fields})


def test_a_guided_request_must_be_alone(runtime):
    with pytest.raises(ValueError, match="a request with guidance must be alone, got a batch of 2"):
        runtime.handle_request([asked(action_samples=1, guidance=2.0), REQUEST])


def test_a_submitted_request_with_guidance_waits_until_it_is_alone(runtime):
    guided = asked(action_samples=2, guidance=2.0)
    expected = runtime.handle_request(guided)
    running, handle = runtime.submit(REQUEST), runtime.submit(guided)
    found = handle.result(60)
    assert running.done
    np.testing.assert_array_equal(found.actions, expected.actions)
    assert found.token_ids == expected.token_ids


@pytest.mark.parametrize(("priority", "waits"), [(0, True), (1, False)])
def test_a_guided_request_takes_the_rows_of_requests_of_a_lower_priority(runtime, priority, waits):
    guided = asked(action_samples=2, guidance=2.0)
    talking = [dataclasses.replace(REQUEST, action_samples=0, navigation="", prompt=word) for word in "ab"]
    played = PlayedTurns(runtime)
    others = [played.submit(each) for each in talking]
    played.turn()
    assert played.turns.running == others
    driving = played.submit(guided, priority=priority)
    played.turn()
    assert driving.handle.done != waits
    played.finish()
    for entry, request in zip((*others, driving), (*talking, guided), strict=True):
        found, expected = entry.handle.result(0), runtime.handle_request(request)
        assert found.token_ids == expected.token_ids
        np.testing.assert_array_equal(found.actions, expected.actions)


def test_an_engine_of_one_row_guides_nothing(engine, tmp_path, caplog):
    """Export says so, and `edgellm generate` before it loads the engine."""
    problem = "guidance needs a second row for the prompt without navigation; this engine has one "
    problem += "(max_batch_size 1): export it with --max-batch-size 2"
    config = export(engine.with_name("checkpoint"), tmp_path, max_batch_size=1)
    assert caplog.messages == [f"{tmp_path}: {problem}"]
    assert guidance_problem(config) == problem
    with (
        LLMInferenceRuntime(tmp_path) as runtime,
        pytest.raises(ValueError, match=r"guidance needs a second row .* \(max_batch_size 1\)"),
    ):
        runtime.handle_request(asked(action_samples=1, guidance=2.0))


def test_generate_refuses_guidance_before_the_engine_is_loaded(engine, tmp_path, capsys):
    export(engine.with_name("checkpoint"), tmp_path, max_batch_size=1)
    graph = tmp_path / "llm" / "model.onnx"
    graph.write_bytes(bytes(graph.stat().st_size))
    asked = ["generate", str(tmp_path), "--prompt", "", "--navigation", TEXT, "--guidance", "2"]
    assert main(asked) == 2
    assert capsys.readouterr().err.startswith("edgellm generate: error: guidance needs a second row")


def test_other_engines_take_no_instruction(tmp_path):
    export(write_tiny_checkpoint(tmp_path / "checkpoint"), tmp_path / "engine")
    with (
        LLMInferenceRuntime(tmp_path / "engine") as runtime,
        pytest.raises(
            ValueError, match="this engine takes no instructions of navigation, the request has one"
        ),
    ):
        runtime.handle_request(LLMGenerationRequest("go", navigation=TEXT))
