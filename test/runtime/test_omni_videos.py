# SPDX-License-Identifier: Apache-2.0
"""Videos of a Qwen3-Omni thinker, with positions between whole ones.

test/parity has the reference.
"""

from __future__ import annotations

import numpy as np
import pytest

from edgellm_ros.builder import export
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.multimodal.video import Video
from edgellm_ros.runtime.conversation import AudioPart, ImagePart, Message, TextPart, VideoPart
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest
from fixtures.reference_inputs import make_image, make_sound
from fixtures.requests_for_tests import assert_same_answer, request
from fixtures.tiny_checkpoint import write_tiny_checkpoint

FRAMES = [np.roll(make_image(30, 40), shift, 0) for shift in range(6)]
VIDEO = VideoPart(Video(FRAMES, fps=3))  # groups 2/3 s apart, 16 2/3 positions
IMAGE = ImagePart(make_image(20, 30))
SOUND = AudioPart(Sound(make_sound(0.5, 16000), 16000))


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    directory = tmp_path_factory.mktemp("omni_videos")
    write_tiny_checkpoint(directory / "checkpoint", videos=True, vision={"patch_size": 40})
    export(directory / "checkpoint", directory / "engine", max_input_len=400, max_kv_cache_capacity=500)
    return directory / "engine"


@pytest.fixture(scope="module")
def computing(engine, device):
    with LLMInferenceRuntime(engine, device, prefix_cache_bytes=0) as runtime:
        yield runtime


def ask(*parts, before=(), **parameters) -> LLMGenerationRequest:
    message = Message("user", [*parts, TextPart("go")])
    sampling = request(max_tokens=6).sampling
    return LLMGenerationRequest(messages=[*before, message], sampling=sampling, logprobs=3, **parameters)


def test_text_and_answer_continue_after_the_last_time_of_a_video(computing):
    (sequence,) = computing.pipeline.prepare([ask(VIDEO)], 0)
    token = computing.config.video.token_id
    first = sequence.token_ids.index(token)
    count = sequence.token_ids.count(token)
    times = sequence.positions[0, first : first + count].reshape(3, -1)[:, 0] - sequence.positions[0, first]
    np.testing.assert_allclose(times, [0, 50 / 3, 100 / 3], atol=1e-5)
    end = first + count
    assert sequence.positions[:, end].tolist() == [sequence.positions[0, end - 1] + 1] * 3
    following = len(sequence.token_ids) + sequence.rope_delta
    assert following == pytest.approx(sequence.positions[0, -1] + 1)


def test_a_batch_with_fractional_positions_gives_the_answers_of_each_request_alone(computing):
    requests = [
        ask(VIDEO, action_samples=2),
        ask(IMAGE, SOUND),
        ask(SOUND, VideoPart(Video(FRAMES[:3], fps=0.7)), IMAGE),
    ]
    for one, alone in zip(computing.handle_request(requests), requests, strict=True):
        assert_same_answer(one, computing.handle_request(alone))


def test_the_next_turn_after_a_video_reuses_its_rows_and_gives_the_same_answer(engine, device, computing):
    first = ask(VIDEO)
    with LLMInferenceRuntime(engine, device) as caching:
        answer = caching.handle_request(first)
        turn = ask(before=(*first.messages, Message("assistant", answer.text)))
        encoded = caching.multimodal_metrics.total_frame_groups
        found = caching.handle_request(turn)
        assert caching.multimodal_metrics.total_frame_groups == encoded
    assert found.reused_tokens > len(FRAMES) // 2 * 20
    assert_same_answer(found, computing.handle_request(turn))


def test_another_rate_of_the_same_frames_reuses_no_group_but_the_first(engine, device):
    with LLMInferenceRuntime(engine, device) as caching:
        caching.handle_request(ask(VIDEO))
        slower = caching.handle_request(ask(VideoPart(Video(FRAMES, fps=2))))
        (sequence,) = caching.pipeline.prepare([ask(VIDEO)], 0)
    first = sequence.token_ids.index(caching.config.video.token_id)
    assert 0 < slower.reused_tokens <= first + sequence.videos[0].grid.group_tokens


def test_times_beyond_the_positions_of_the_engine_are_refused(computing):
    with pytest.raises(ValueError, match=r"the times of the videos reach position \d+; this engine has posi"):
        computing.handle_request(ask(VideoPart(Video(FRAMES, fps=0.1))))
