# SPDX-License-Identifier: Apache-2.0
"""LLMInferenceRuntime with a policy, which answers with actions only."""

from __future__ import annotations

import dataclasses
import threading
from types import MappingProxyType

import numpy as np
import pytest

from edgellm_ros.builder import export
from edgellm_ros.diffusion.chunking import ChunkCondition
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.multimodal.device_image import DeviceImage
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams
from fixtures.smolvla_checkpoint import ACTIONS, CAMERAS, HORIZON, STATE, write_smolvla

FRAMES = {
    name: np.random.default_rng(i).integers(0, 256, (*size, 3), dtype=np.uint8)
    for i, (name, size) in enumerate(CAMERAS.items())
}
REQUEST = LLMGenerationRequest(
    "pick it up", images=tuple(FRAMES.values()), state=np.array([0.3, -1, 2]), action_samples=2, noise_seed=7
)
CHUNK = np.linspace(-1, 1, HORIZON * ACTIONS).reshape(HORIZON, ACTIONS)


class OnGpu:
    """What an image on a GPU looks like to a machine without one."""

    shape = (48, 64, 3)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    export(write_smolvla(folder / "checkpoint"), folder / "engine")
    return folder / "engine"


@pytest.fixture(scope="module")
def policy(engine, device):
    with LLMInferenceRuntime(engine, device) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def expected(policy):
    return policy.handle_request(REQUEST).actions


def changed(**changes) -> LLMGenerationRequest:
    return dataclasses.replace(REQUEST, **changes)


def test_a_policy_answers_with_actions_alone(policy):
    response = policy.handle_request(REQUEST)
    assert response.actions.shape == (2, HORIZON, ACTIONS)
    assert (response.text, response.token_ids, response.paths) == ("", [], None)
    assert response.finish_reason == "stop"
    assert response.prompt_tokens == 2 * 4 + len("pick it up\n") + 1  # the tokenizer has a token per byte


def test_the_same_request_gives_the_same_bits_alone_and_in_a_batch(policy, expected):
    other = changed(prompt="let go", state=np.zeros(STATE))
    batch = policy.handle_request([other, REQUEST, other])
    np.testing.assert_array_equal(batch[1].actions, expected)
    np.testing.assert_array_equal(batch[0].actions, batch[2].actions)
    assert np.abs(batch[0].actions - expected).max() > 0.01


def test_one_sample_is_the_default(policy, expected):
    actions = policy.handle_request(changed(action_samples=0)).actions
    np.testing.assert_allclose(actions, expected[:1], atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": "put it down"},
        {"state": np.array([0.3, -1, 2.5])},
        {"images": (FRAMES["top"], 255 - FRAMES["wrist"])},
        {"noise_seed": 8},
        {"denoise_steps": 3},
    ],
)
def test_actions_depend_on_every_input(policy, expected, changes):
    assert np.abs(policy.handle_request(changed(**changes)).actions - expected).max() > 1e-3


def test_a_newline_at_the_end_of_the_task_is_not_repeated(policy, expected):
    np.testing.assert_array_equal(policy.handle_request(changed(prompt="pick it up\n")).actions, expected)


def test_images_are_sorted_by_the_names_of_their_cameras(policy, expected):
    swapped = changed(images=(FRAMES["wrist"], FRAMES["top"]), cameras=("wrist", "top"))
    np.testing.assert_array_equal(policy.handle_request(swapped).actions, expected)


def test_a_camera_without_an_image_takes_no_rows(policy, expected):
    response = policy.handle_request(changed(images=(FRAMES["wrist"],), cameras=("wrist",)))
    assert response.prompt_tokens == 4 + len("pick it up\n") + 1
    assert np.abs(response.actions - expected).max() > 1e-3


def test_actions_are_the_models_values_times_scale_plus_offset(engine, policy, expected):
    space = policy.config.policy.action_space
    double = dataclasses.replace(
        space, scale=tuple(2 * scale for scale in space.scale), offset=tuple(x + 1 for x in space.offset)
    )
    config = dataclasses.replace(
        policy.config, action=dataclasses.replace(policy.config.policy, action_space=double)
    )
    try:
        config.save(engine)
        with LLMInferenceRuntime(engine) as runtime:
            found = runtime.handle_request(REQUEST).actions
    finally:
        policy.config.save(engine)
    offset = np.array(space.offset)
    np.testing.assert_allclose(found, 2 * (expected - offset) + offset + 1, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state": None}, r"a policy needs the state \[3\]: state_0, state_1, state_2"),
        ({"state": np.zeros(4)}, r"state must have shape \[3\] .* got \[4\]"),
        ({"state": np.array([0, np.nan, 0])}, "state has a value that is not finite: state_1"),
        ({"state": "home"}, r"state must be numbers \[3\], got str"),
        ({"images": ()}, "a policy needs an image of at least one camera: top, wrist"),
        ({"images": (FRAMES["top"],)}, "1 images for the cameras top, wrist: name the cameras"),
        ({"images": (FRAMES["top"],), "cameras": ("left",)}, "unknown camera 'left'; the policy has"),
        ({"images": (FRAMES["top"][0], FRAMES["wrist"])}, "camera top: an image must be a uint8 array"),
        ({"images": (DeviceImage(OnGpu()), FRAMES["wrist"])}, "camera top: .* resized on the host"),
        ({"lm_head": "first"}, "this engine is a policy, the request has lm_head"),
        ({"output_hidden_states": True}, "the request has output_hidden_states"),
        ({"prompt": "x" * 24}, "the prompt has 25 tokens; the policy takes at most 24"),
        ({"action_samples": 65}, "action_samples is 65; this engine takes at most 64"),
        ({"system_prompt": "be kind"}, "this engine is a policy, the request has system_prompt"),
        ({"audio": (Sound(np.zeros(160, np.float32), 16000),)}, "the request has audio"),
        ({"speed": 1.0}, "the request has speed"),
        ({"enable_thinking": False}, "the request has enable_thinking"),
        ({"chat_template_kwargs": {"x": 1}}, "the request has chat_template_kwargs"),
        ({"disable_spec_decode": True}, "the request has disable_spec_decode"),
        ({"tools": ({"name": "f"},)}, "the request has tools"),
        ({"sampling": SamplingParams(regex="a+")}, "the request has a grammar"),
        ({"sampling": SamplingParams(temperature=0.0)}, "the request has temperature"),
        ({"sampling": SamplingParams(stop=["end"])}, "the request has stop"),
        ({"sampling": SamplingParams(max_tokens=8)}, "the request has max_tokens"),
        ({"sampling": SamplingParams(seed=1)}, "the request has seed"),
        (
            {"previous_chunk": ChunkCondition(actions=CHUNK[:, :2], executed=1, delay=1)},
            r"previous_chunk: actions must have shape \[6, 4\], got \[6, 2\]",
        ),
        (
            {"previous_chunk": ChunkCondition(actions=CHUNK, executed=1, delay=1, form="trained")},
            "previous_chunk: form must be guided or frozen",
        ),
    ],
)
def test_requests_that_do_not_fit_the_policy_are_refused(policy, changes, message):
    with pytest.raises(ValueError, match=message):
        policy.handle_request(changed(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"lora": "base"},
        {"lm_head": "base"},
        {"tools": ()},
        {"chat_template_kwargs": MappingProxyType({})},
        {"logprobs": np.int64(0)},
        {"sampling": SamplingParams(stop=[], choices=[], max_tokens=np.int64(96))},
    ],
    ids=str,
)
def test_what_asks_for_no_language_model_is_answered(policy, expected, changes):
    np.testing.assert_array_equal(policy.handle_request(changed(**changes)).actions, expected)


def test_a_language_model_refuses_the_fields_of_a_policy(runtime):
    with pytest.raises(ValueError, match="this engine is no policy, the request has a state"):
        runtime.handle_request(LLMGenerationRequest("go", state=np.zeros(3)))
    named = LLMGenerationRequest("go", images=(FRAMES["top"],), cameras=("top",))
    with pytest.raises(ValueError, match="this engine is no policy, the request has cameras"):
        runtime.handle_request(named)


@pytest.mark.parametrize("stage", ["vision", "prefill", "action"])
def test_a_request_is_cancelled_at_its_next_step(policy, stage):
    cancel, seen = threading.Event(), []

    def watch(progress) -> None:
        seen.append((progress.stage, progress.step))
        if seen[-1] == (stage, 2 if stage == "action" else 0):
            cancel.set()

    response = policy.handle_request(changed(on_progress=watch, cancel=cancel))
    assert (response.finish_reason, response.actions) == ("cancelled", None)
    assert seen[-1][0] == stage
    assert policy.handle_request(REQUEST).actions is not None


def test_a_frozen_chunk_begins_with_the_previous_actions(policy, expected):
    chunk = ChunkCondition(actions=CHUNK, executed=1, delay=2, form="frozen")
    found = policy.handle_request(changed(previous_chunk=chunk)).actions
    np.testing.assert_array_equal(found[:, :2], np.stack([CHUNK[1:3].astype(np.float32)] * 2))
    assert np.abs(found[:, 2:] - expected[:, 2:]).max() > 0.01
    np.testing.assert_array_equal(policy.handle_request(REQUEST).actions, expected)


def test_what_needs_a_language_model_is_an_error_that_says_so(policy):
    with pytest.raises(EngineError, match=r"the engine is a policy \(smolvla\): it has no language model"):
        policy.gen_and_save_system_prompt_kv_cache("you are a robot")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafting": "lookup"}, "drafting"),
        ({"lora_dirs": {"a": "folder"}}, "a policy has no language model: .*, but lora_dirs is given"),
        ({"decode": "fused"}, "a policy has no language model: .*, but decode is given"),
        ({"decode": "x"}, "decode must be one of auto, engine, fused, got 'x'"),
        ({"prefix_cache_bytes": 1000}, "a policy has no language model: .*, but prefix_cache_bytes is given"),
        ({"prefix_cache_bytes": -5}, "prefix_cache_bytes must be an integer from 0 to .*, got -5"),
        ({"tool_call_format": "hermes"}, "a policy has no language model: .*, but tool_call_format is given"),
    ],
)
def test_options_of_language_models_are_refused(engine, options, message):
    with pytest.raises(ValueError, match=message):
        LLMInferenceRuntime(engine, **options)


def test_options_that_ask_for_no_language_model_are_accepted(engine):
    options = {"lora_dirs": {}, "prefix_cache_bytes": 0, "drafting": "off", "tool_call_format": "none"}
    LLMInferenceRuntime(engine, decode="engine", **options).close()


def test_a_closed_policy_refuses_requests(engine):
    runtime = LLMInferenceRuntime(engine)
    assert not runtime.closed
    runtime.close()
    assert runtime.closed
    with pytest.raises(EngineError, match="the runtime is closed"):
        runtime.handle_request(REQUEST)


def test_counters_count_images_rows_and_actions(engine):
    with LLMInferenceRuntime(engine) as runtime:
        response = runtime.handle_request(REQUEST)
        assert runtime.multimodal_metrics.total_images == 2
        assert runtime.multimodal_metrics.total_image_tokens == 8
        assert runtime.prefill_metrics.computed_tokens == response.prompt_tokens
        assert runtime.action_metrics.trajectories == 2
        assert runtime.action_metrics.total_runs == 4
    assert response.metrics["action_s"] > 0
