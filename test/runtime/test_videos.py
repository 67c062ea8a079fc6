# SPDX-License-Identifier: Apache-2.0
"""Videos in requests: tokens and positions, batches, prefix reuse, and refusals."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from edgellm_ros.builder import export
from edgellm_ros.engine_directory.chat_template import ChatTemplate
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.multimodal.video import Video
from edgellm_ros.runtime.conversation import ImagePart, Message, TextPart, VideoPart
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.prompt.prompt_builder import PromptBuilder
from edgellm_ros.runtime.prompt.rope import VisionBlock, get_rope_index
from edgellm_ros.runtime.request import LLMGenerationRequest
from edgellm_ros.runtime.text.tokenizer import Tokenizer
from fixtures.internvl_checkpoint import write_internvl_checkpoint
from fixtures.reference_inputs import VISION_START, make_image
from fixtures.requests_for_tests import IMAGE, assert_same_answer, request
from fixtures.video_checkpoint import write_video_checkpoint

VIDEO_TOKEN = 94
FRAMES = [np.roll(make_image(48, 64), 9 * i, axis=1) for i in range(5)]
VIDEO = Video(FRAMES, [1.0, 1.5, 2.0, 2.5, 3.5])


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def engine(family, tmp_path_factory):
    directory = tmp_path_factory.mktemp(family)
    write_video_checkpoint(directory / "checkpoint", family)
    export(directory / "checkpoint", directory / "engine", max_input_len=500, max_kv_cache_capacity=600)
    return directory / "engine"


@pytest.fixture(scope="module")
def computing(engine, device):
    with LLMInferenceRuntime(engine, device, prefix_cache_bytes=0) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def caching(engine, device):
    with LLMInferenceRuntime(engine, device) as runtime:
        yield runtime


def ask(*parts, before=(), **parameters) -> LLMGenerationRequest:
    """A request with these parts and a question as its last message."""
    message = Message("user", [*parts, TextPart("go")])
    sampling = request(max_tokens=6).sampling
    return LLMGenerationRequest(messages=[*before, message], sampling=sampling, logprobs=3, **parameters)


def test_text_continues_after_the_rows_and_columns_of_a_block_and_not_after_its_times():
    ids = [1, 2, VISION_START, *[VIDEO_TOKEN] * 12, 3, 4]
    block = VisionBlock(2, 2, times=(0, 2, 5))
    positions, delta = get_rope_index(ids, [], None, VISION_START, [block], VIDEO_TOKEN)
    assert positions[0].tolist() == [0, 1, 2, *[3] * 4, *[5] * 4, *[8] * 4, 5, 6]
    assert positions[1].tolist() == [0, 1, 2, *[3, 3, 4, 4] * 3, 5, 6]
    assert positions[2].tolist() == [0, 1, 2, *[3, 4] * 6, 5, 6]
    assert len(ids) + delta == 9  # after the largest time


def test_text_continues_after_the_times_of_a_block_that_says_so():
    ids = [1, 2, VISION_START, *[VIDEO_TOKEN] * 12, 3, 4]
    block = VisionBlock(2, 2, times=(0, 2.25, 4.5), text_after_times=True)
    positions, delta = get_rope_index(ids, [], None, VISION_START, [block], VIDEO_TOKEN)
    assert positions[0].tolist() == [0, 1, 2, *[3] * 4, *[5.25] * 4, *[7.5] * 4, 8.5, 9.5]
    assert positions[1].tolist() == [0, 1, 2, *[3, 3, 4, 4] * 3, 8.5, 9.5]
    assert positions[2].tolist() == [0, 1, 2, *[3, 4] * 6, 8.5, 9.5]
    assert len(ids) + delta == 10.5


def test_times_are_words_before_each_group_or_positions(computing, family):
    (sequence,) = computing.pipeline.prepare([ask(VideoPart(VIDEO))], 0)
    ids, token = sequence.token_ids, computing.config.video.token_id
    vision = computing.config.special_tokens
    start, end = vision.vision_start_token_id, vision.vision_end_token_id
    encode = computing.tokenizer.encode
    groups = [[start, *[token] * 12, end]] * 3
    if family == "qwen3_vl":
        groups = [
            [*encode(words), *group]
            for words, group in zip(("<1.2 seconds>", "<2.2 seconds>", "<3.5 seconds>"), groups, strict=True)
        ]
        expected = [start, *groups[0], *groups[1], *groups[2], end]
    else:
        expected = [start, *[token] * 36, end]
        first = ids.index(token)
        times = sequence.positions[0, first : first + 36].reshape(3, 12)
        # 4 positions per second, 1.6 frames per second: 5 positions from a group to the next
        assert (times - times[0, 0]).tolist() == [[0] * 12, [5] * 12, [10] * 12]
    place = ids.index(start)
    assert ids[place : place + len(expected)] == expected


def test_a_batch_with_videos_gives_the_answers_of_each_request_alone(computing):
    other = Video([frame[::-1] for frame in FRAMES[:2]], fps=2)
    requests = [
        ask(VideoPart(VIDEO)),
        ask(ImagePart(IMAGE), VideoPart(other), TextPart("and"), VideoPart(VIDEO)),
        ask(ImagePart(IMAGE)),
    ]
    for one, alone in zip(computing.handle_request(requests), requests, strict=True):
        assert_same_answer(one, computing.handle_request(alone))


def test_the_short_form_is_the_message_with_images_before_videos(computing):
    parameters = {"images": (IMAGE,), "videos": (VIDEO,), "max_tokens": 6, "logprobs": 3}
    short = computing.handle_request(request("go", **parameters))
    assert_same_answer(short, computing.handle_request(ask(ImagePart(IMAGE), VideoPart(VIDEO))))


def test_every_frame_of_a_video_changes_the_answer(computing):
    answer = computing.handle_request(ask(VideoPart(VIDEO)))
    for index in range(len(FRAMES)):
        frames = [*FRAMES]
        frames[index] = np.zeros_like(FRAMES[0])
        changed = computing.handle_request(ask(VideoPart(Video(frames, VIDEO.timestamps))))
        assert changed.logprobs != answer.logprobs


def test_an_image_beside_a_video_changes_the_answer(computing):
    black = np.zeros_like(IMAGE)
    answers = [computing.handle_request(ask(ImagePart(image), VideoPart(VIDEO))) for image in (IMAGE, black)]
    assert answers[0].logprobs != answers[1].logprobs


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True)
def test_an_action_heads_history_follows_the_videos_that_the_message_begins_with(engine, tiny_engine):
    action = EngineConfig.load(tiny_engine)
    config = EngineConfig.load(engine)
    config = dataclasses.replace(config, action=action.action, stop_token_ids=action.stop_token_ids)
    tokenizer = Tokenizer(engine / "tokenizer.json")
    builder = PromptBuilder(tokenizer, ChatTemplate(engine / "chat_template.jinja"), config)
    message = Message("user", [VideoPart(VIDEO), ImagePart(IMAGE), TextPart("go")])
    ids = builder.build(LLMGenerationRequest(messages=[message]), [2], [], [70, 71], [[95, 96]])
    places = [ids.index(token) for token in (95, config.image_token_id, 70, *tokenizer.encode("go")[:1])]
    assert places == sorted(places)


def test_a_video_of_one_frame_is_the_frame_twice(computing):
    one = computing.handle_request(ask(VideoPart(Video(FRAMES[:1], fps=2))))
    assert one.prompt_tokens < computing.handle_request(ask(VideoPart(VIDEO))).prompt_tokens
    metrics = computing.multimodal_metrics
    groups, tokens = metrics.total_frame_groups, metrics.total_image_tokens
    computing.handle_request(ask(VideoPart(Video(FRAMES[:1], fps=2))))
    assert (metrics.total_frame_groups - groups, metrics.total_image_tokens - tokens) == (1, 12)


def test_the_same_video_is_neither_encoded_nor_prefilled_again(caching, computing):
    caching.clear_prefix_cache()
    first = caching.handle_request(ask(VideoPart(VIDEO)))
    encoded = caching.multimodal_metrics.total_frame_groups
    again = caching.handle_request(ask(VideoPart(Video(FRAMES, VIDEO.timestamps))))
    assert caching.multimodal_metrics.total_frame_groups == encoded
    assert again.reused_tokens == again.prompt_tokens - 1
    assert_same_answer(again, first)
    assert_same_answer(again, computing.handle_request(ask(VideoPart(VIDEO))))


def test_another_frame_is_encoded_with_the_groups_after_it(caching, computing):
    caching.clear_prefix_cache()
    caching.handle_request(ask(VideoPart(VIDEO)))
    encoded = caching.multimodal_metrics.total_frame_groups
    changed = ask(VideoPart(Video([*FRAMES[:3], FRAMES[0], FRAMES[4]], VIDEO.timestamps)))
    answer = caching.handle_request(changed)
    assert caching.multimodal_metrics.total_frame_groups == encoded + 2
    assert 12 < answer.reused_tokens < answer.prompt_tokens - 24
    assert_same_answer(answer, computing.handle_request(changed))


def test_other_times_of_the_same_frames_are_not_reused(caching, computing):
    caching.clear_prefix_cache()
    caching.handle_request(ask(VideoPart(VIDEO)))
    slower = ask(VideoPart(Video(FRAMES, [2 * time for time in VIDEO.timestamps])))
    answer = caching.handle_request(slower)
    assert answer.reused_tokens < answer.prompt_tokens - 24
    assert_same_answer(answer, computing.handle_request(slower))


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True)  # others resize frames alike in every video
def test_frames_resized_otherwise_are_not_reused(caching, computing):
    caching.clear_prefix_cache()
    caching.handle_request(ask(VideoPart(VIDEO)))
    more = ask(VideoPart(Video(FRAMES * 2, [*VIDEO.timestamps, 4.0, 5.0, 6.0, 7.0, 8.0])))
    answer = caching.handle_request(more)
    assert answer.reused_tokens < 40
    assert_same_answer(answer, computing.handle_request(more))


def test_the_next_turn_after_a_video_computes_its_new_tokens_only(caching, computing):
    caching.clear_prefix_cache()
    question = Message("user", [VideoPart(VIDEO), TextPart("what is there?")])
    sampling = request(max_tokens=6).sampling
    first = caching.handle_request(LLMGenerationRequest(messages=[question], sampling=sampling))
    turn = ask(before=[question, Message("assistant", first.text)])
    encoded = caching.multimodal_metrics.total_frame_groups
    answer = caching.handle_request(turn)
    assert caching.multimodal_metrics.total_frame_groups == encoded
    assert answer.reused_tokens > first.prompt_tokens
    assert_same_answer(answer, computing.handle_request(turn))


def test_a_video_too_large_for_the_engine_is_refused(computing):
    video = Video([make_image(48, 64)] * 90, fps=2)
    message = r"90 frames of 64x48 pixels becomes 45 x \d+ tokens, the engine takes at most 500"
    with pytest.raises(ValueError, match=f"{message}|the prompt has"):
        computing.handle_request(ask(VideoPart(video)))


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True)
def test_times_as_words_may_be_long(computing):
    video = Video(FRAMES, [0.0, 1e3, 1e5, 1e7, 1e9])
    assert computing.handle_request(ask(VideoPart(video))).token_ids


@pytest.mark.parametrize("family", ["qwen2_5_vl"], indirect=True)
def test_times_beyond_the_positions_of_the_engine_are_refused(computing):
    video = Video(FRAMES, [0.0, 100.0, 200.0, 300.0, 400.0])
    with pytest.raises(ValueError, match=r"reach position 16\d\d; this engine has positions up to 599"):
        computing.handle_request(ask(VideoPart(video)))


@pytest.mark.parametrize("family", ["qwen2_5_vl"], indirect=True)
def test_times_beyond_the_prompt_leave_less_room_for_the_answer(computing):
    video = Video(FRAMES, [0.0, 35.0, 70.0, 105.0, 140.0])  # 280 positions from a group to the next
    long = request("go", videos=(video,), max_tokens=600)
    (sequence,) = computing.pipeline.prepare([long], 0)
    assert sequence.positions.max() > 560
    assert len(computing.handle_request(long).token_ids) <= sequence.max_tokens < 40
    assert len(sequence.token_ids) + sequence.rope_delta + sequence.max_tokens == 600


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"videos": [FRAMES]}, r"videos\[0\] must be a Video, got list"),
        ({"messages": [Message("user", [VideoPart(FRAMES)])]}, r"video must be a Video, got list"),
        ({"messages": [Message("user", "go")], "videos": [VIDEO]}, "has messages or videos, not both"),
    ],
)
def test_what_is_no_video_is_refused(parameters, message):
    with pytest.raises(ValueError, match=message):
        LLMGenerationRequest(**parameters)


def test_an_engine_that_takes_images_only_refuses_videos(runtime, tmp_path, device):
    for videos in ({"videos": (VIDEO,)}, {"messages": [Message("user", [VideoPart(VIDEO)])]}):
        with pytest.raises(ValueError, match="this engine takes no videos, the request has a video"):
            runtime.handle_request(LLMGenerationRequest(**videos))
    export(write_internvl_checkpoint(tmp_path / "checkpoint"), tmp_path / "engine")
    with (
        LLMInferenceRuntime(tmp_path / "engine", device) as tiles,
        pytest.raises(ValueError, match="this engine takes no videos"),
    ):
        tiles.handle_request(LLMGenerationRequest(videos=(VIDEO,)))


def test_a_video_is_refused_if_the_encoder_was_left_out(engine, runtime_device):
    with (
        LLMInferenceRuntime(engine, runtime_device, without=["visual"]) as runtime,
        pytest.raises(ValueError, match=r"the vision encoder was left out .*, the request has a video"),
    ):
        runtime.handle_request(request(videos=(VIDEO,)))
