# SPDX-License-Identifier: Apache-2.0
"""Videos of Qwen2.5-Omni whose sound is between their frames.

test/parity has the reference.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from edgellm_ros.builder import export
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.multimodal.video import Video
from edgellm_ros.runtime.conversation import AudioPart, ImagePart, Message, TextPart, VideoPart
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest
from fixtures.qwen2_5_omni_checkpoint import write_qwen2_5_omni
from fixtures.reference_inputs import make_image, make_sound
from fixtures.requests_for_tests import assert_same_answer, request
from fixtures.tiny_checkpoint import write_tiny_checkpoint

FRAMES = [np.roll(make_image(30, 40), shift, 0) for shift in range(4)]
LONG, SHORT = (Sound(make_sound(seconds, 16000), 16000) for seconds in (3.0, 0.5))
CLIP = Video(FRAMES, fps=1, sound=LONG)  # groups of frames at 0 and 2 s, 75 tokens of sound
IMAGE = ImagePart(make_image(20, 30))
LIMITS = {"max_input_len": 400, "max_kv_cache_capacity": 600}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen2_5_omni")
    export(write_qwen2_5_omni(directory / "checkpoint"), directory / "engine", **LIMITS)
    return directory / "engine"


@pytest.fixture(scope="module")
def computing(engine, device):
    with LLMInferenceRuntime(engine, device, prefix_cache_bytes=0) as runtime:
        yield runtime


def ask(*parts, before=(), **parameters) -> LLMGenerationRequest:
    message = Message("user", [*parts, TextPart("go")])
    sampling = request(max_tokens=6).sampling
    return LLMGenerationRequest(messages=[*before, message], sampling=sampling, logprobs=3, **parameters)


def test_frames_and_sound_take_turns_of_two_seconds(computing):
    (sequence,) = computing.pipeline.prepare([ask(VideoPart(CLIP))], 0)
    config, tokens = computing.config, computing.config.special_tokens
    rows = sequence.videos[0].grid.group_tokens
    seen, heard = [config.video_token_id] * rows, [config.audio_token_id]
    turns = [*seen, *heard * 50, *seen, *heard * 25]
    expected = [tokens.audio_start_token_id, *turns, tokens.audio_end_token_id]
    first = sequence.token_ids.index(tokens.audio_start_token_id)
    assert sequence.token_ids[first : first + len(expected)] == expected
    assert sequence.token_ids[first - 1] == tokens.vision_start_token_id
    assert sequence.token_ids[first + len(expected)] == tokens.vision_end_token_id


def test_sound_and_frames_count_positions_from_the_same_one(computing):
    (sequence,) = computing.pipeline.prepare([ask(VideoPart(CLIP))], 0)
    grid = sequence.videos[0].grid
    first = sequence.token_ids.index(computing.config.special_tokens.audio_start_token_id)
    zero = sequence.positions[0, first - 1] + 1  # the position after <|vision_bos|>
    positions = sequence.positions[:, first:] - zero
    assert positions[:, 0].tolist() == [-1] * 3  # as <|vision_bos|>
    one, turn = 1 + grid.group_tokens, 1 + grid.group_tokens + 50
    assert positions[0, 1:one].tolist() == [0] * grid.group_tokens
    assert positions[2, 1 : 1 + grid.columns].tolist() == list(range(grid.columns))
    np.testing.assert_array_equal(positions[:, one:turn], [np.arange(50)] * 3)
    later = slice(turn, turn + grid.group_tokens)
    assert set(positions[0, later].tolist()) == {50}
    np.testing.assert_array_equal(positions[1:, later], positions[1:, 1:one])
    np.testing.assert_array_equal(positions[:, later.stop : later.stop + 25], [np.arange(50, 75)] * 3)
    ends = positions[0, later.stop + 25 : later.stop + 28]
    assert ends.tolist() == [75, 75, 76]  # <|audio_eos|>, <|vision_eos|> and the text
    assert sequence.rope_delta == sequence.positions.max() + 1 - len(sequence.token_ids)


def test_text_continues_after_a_sound_that_is_shorter_than_its_video(computing):
    clip = Video(FRAMES, fps=0.4, sound=SHORT)  # 5 s between the groups, of which each third is a turn
    (sequence,) = computing.pipeline.prepare([ask(VideoPart(clip))], 0)
    last = len(sequence.token_ids) - 1 - sequence.token_ids[::-1].index(computing.config.video_token_id)
    assert sequence.positions[:, last + 1].tolist() == [sequence.positions[:, last].max() + 1] * 3


def test_the_short_form_has_the_prompt_of_the_long_one(computing):
    long_form = ask(VideoPart(CLIP), AudioPart(SHORT))
    short_form = dataclasses.replace(long_form, messages=None, prompt="go", videos=(CLIP,), audio=(SHORT,))
    assert short_form.prompt_audio == (LONG, SHORT)
    assert short_form.sounds_of_videos == long_form.sounds_of_videos == (True, False)
    prepared = [computing.pipeline.prepare([each], 0)[0] for each in (short_form, long_form)]
    assert prepared[0].token_ids == prepared[1].token_ids
    assert_same_answer(*(computing.handle_request(each) for each in (short_form, long_form)))


def test_each_sound_has_its_own_rows(computing):
    """Sounds are in the order of the parts, whichever is a video's."""
    both = ask(AudioPart(SHORT), VideoPart(CLIP))
    (sequence,) = computing.pipeline.prepare([both], 0)
    assert both.prompt_audio == (SHORT, LONG)
    assert sequence.audio_tokens == [12, 75]
    exchanged = ask(AudioPart(LONG), VideoPart(dataclasses.replace(CLIP, sound=SHORT)))
    one, other = (computing.handle_request(each) for each in (both, exchanged))
    assert one.prompt_tokens == other.prompt_tokens
    assert one.logprobs != other.logprobs


def test_a_batch_gives_the_answers_of_each_request_alone(computing):
    requests = [
        ask(VideoPart(CLIP), AudioPart(SHORT)),
        ask(IMAGE, AudioPart(LONG)),
        ask(AudioPart(SHORT), VideoPart(Video(FRAMES[:3], fps=2, sound=SHORT)), IMAGE),
    ]
    for one, alone in zip(computing.handle_request(requests), requests, strict=True):
        assert_same_answer(one, computing.handle_request(alone))


def test_the_next_turn_reuses_frames_and_sound_and_gives_the_same_answer(engine, device, computing):
    first = ask(AudioPart(SHORT), VideoPart(CLIP))
    with LLMInferenceRuntime(engine, device) as caching:
        answer = caching.handle_request(first)
        turn = ask(before=(*first.messages, Message("assistant", answer.text)))
        metrics = caching.multimodal_metrics
        encoded = metrics.total_frame_groups, metrics.total_sounds
        found = caching.handle_request(turn)
        assert (metrics.total_frame_groups, metrics.total_sounds) == encoded == (2, 2)
    assert found.reused_tokens > answer.prompt_tokens - 20
    assert_same_answer(found, computing.handle_request(turn))


def test_another_sound_of_the_same_frames_reuses_the_frames_before_it(engine, device, computing):
    other = ask(VideoPart(dataclasses.replace(CLIP, sound=Sound(LONG.samples[::-1].copy(), 16000))))
    with LLMInferenceRuntime(engine, device) as caching:
        caching.handle_request(ask(VideoPart(CLIP)))
        found = caching.handle_request(other)
        (sequence,) = caching.pipeline.prepare([other], 0)
    assert 0 < found.reused_tokens <= sequence.token_ids.index(caching.config.audio_token_id)
    assert_same_answer(found, computing.handle_request(other))


def test_a_sound_beyond_the_limit_is_refused(computing):
    clip = dataclasses.replace(CLIP, sound=Sound(make_sound(17.0, 16000), 16000))
    with pytest.raises(ValueError, match=r"a sound of 17\.00 s becomes 425 tokens, .* at most 400"):
        computing.handle_request(ask(VideoPart(clip)))


def test_an_engine_without_its_audio_encoder_refuses_the_sound(engine, device):
    with LLMInferenceRuntime(engine, device, without=("audio",)) as deaf:
        with pytest.raises(ValueError, match="the request has audio"):
            deaf.handle_request(ask(VideoPart(CLIP)))
        assert deaf.handle_request(ask(VideoPart(dataclasses.replace(CLIP, sound=None)))).token_ids


@pytest.mark.parametrize("name", ["audio_start_token_id", "audio_end_token_id", "audio"])
def test_a_config_with_sounds_of_videos_needs_what_they_are_written_with(computing, name):
    config = computing.config
    changes: dict = {"audio": None}
    if name != "audio":
        changes = {"special_tokens": dataclasses.replace(config.special_tokens, **{name: None})}
    with pytest.raises(
        ValueError, match=r"^video sound_chunk 50 needs an audio encoder, and special_tokens au"
    ):
        dataclasses.replace(config, **changes)


def test_models_that_do_not_mix_them_refuse_a_video_with_sound(tmp_path, device):
    checkpoint = tmp_path / "checkpoint"
    write_tiny_checkpoint(checkpoint, action_expert=False, videos=True, vision={"patch_size": 40})
    export(checkpoint, tmp_path / "engine", **LIMITS)
    with LLMInferenceRuntime(tmp_path / "engine", device) as runtime:
        with pytest.raises(
            ValueError,
            match=r"^this engine takes no videos with sound, the request has one: give the sound on",
        ):
            runtime.handle_request(ask(VideoPart(CLIP)))
        beside = ask(VideoPart(dataclasses.replace(CLIP, sound=None)), AudioPart(SHORT))
        assert runtime.handle_request(beside).token_ids
