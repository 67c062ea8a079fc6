# SPDX-License-Identifier: Apache-2.0
"""Videos in files of `edgellm generate --messages` and in reports about engines."""

from __future__ import annotations

import dataclasses
import json

import cv2
import numpy as np
import pytest

from edgellm_ros.builder import export
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.io.video_file import read_video
from edgellm_ros.multimodal.video import Video
from edgellm_ros.runtime.conversation import Message, TextPart, VideoPart
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams
from fixtures.reference_inputs import make_image
from fixtures.refusal import assert_refused
from fixtures.video_checkpoint import write_video_checkpoint

FRAMES = [np.roll(make_image(48, 64), 9 * i, axis=1) for i in range(3)]
TIMES = [0.0, 0.5, 1.5]
NAMES = ["0.png", "1.png", "2.png"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_video_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3_vl")


@pytest.fixture(scope="module")
def engine(checkpoint, tmp_path_factory):
    directory = tmp_path_factory.mktemp("engine")
    export(checkpoint, directory)
    return directory


@pytest.fixture
def write(tmp_path):
    """`write(part)`: the path of a conversation of this part and a question.

    The frames and the file clip.avi lie beside it.
    """
    for name, frame in zip(NAMES, FRAMES, strict=True):
        assert cv2.imwrite(str(tmp_path / name), frame[..., ::-1])
    assert cv2.imwrite(str(tmp_path / "other.png"), make_image(20, 30))
    (tmp_path / "empty.avi").write_bytes(b"RIFF")
    write_clip(tmp_path / "clip.avi", 12)

    def make(part: dict) -> str:
        path = tmp_path / "talk.json"
        content = [{"type": "video", **part}, {"type": "text", "text": "go"}]
        path.write_text(json.dumps([{"role": "user", "content": content}]))
        return str(path)

    return make


def write_clip(path, frames: int) -> None:
    """Write frames of 10 per second, each with one gray value: 20 times its index."""
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 10, (64, 48))
    for index in range(frames):
        writer.write(np.full((48, 64, 3), 20 * index, np.uint8))
    writer.release()


@pytest.mark.parametrize("times", [{"timestamps": TIMES}, {"fps": 2}])
def test_a_video_of_frames_is_answered_as_the_runtime_does(edgellm, engine, write, device, times):
    path = write({"frames": NAMES, **times})
    told = edgellm("generate", engine, "--messages", path, "--max-tokens", 8, "--json").json
    message = Message("user", [VideoPart(Video(FRAMES, **times)), TextPart("go")])
    with LLMInferenceRuntime(engine, device) as runtime:
        sampling = SamplingParams(max_tokens=8)
        expected = runtime.handle_request(LLMGenerationRequest(messages=[message], sampling=sampling))
    assert told["token_ids"] == expected.token_ids
    assert told["prompt_tokens"] == expected.prompt_tokens


def test_frames_of_a_file_are_sampled_with_their_times(engine, write, tmp_path):
    write({})
    video = read_video(tmp_path / "clip.avi", 2.0, EngineConfig.load(engine))
    np.testing.assert_allclose([frame.mean() / 20 for frame in video.frames], [0, 4, 7, 11], atol=0.2)
    np.testing.assert_allclose(video.timestamps, [0.0, 0.4, 0.7, 1.1])
    assert video.fps == pytest.approx(4 / 12 * 10)


def test_a_file_for_exact_positions_has_the_rate_that_was_asked_for(engine, write, tmp_path):
    write({})
    config = EngineConfig.load(engine)
    exact = dataclasses.replace(config.video, timestamps="exact_positions", tokens_per_second=13.0)
    config = dataclasses.replace(config, vision=dataclasses.replace(config.vision, video=exact))
    assert read_video(tmp_path / "clip.avi", 2.0, config).fps == 2.0


def test_a_video_file_is_a_part_of_a_message(edgellm, engine, write):
    path = write({"video": "clip.avi", "fps": 2})
    told = edgellm("generate", engine, "--messages", path, "--max-tokens", 4, "--json").json
    assert told["prompt_tokens"] > 2 * 12


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({}, ["content[0]: missing key 'frames'"]),
        ({"frames": "0.png", "fps": 2}, ["frames: expected a list of file names, got '0.png'"]),
        ({"frames": [], "fps": 2}, ["content[0]: a video must have at least one frame"]),
        ({"frames": NAMES}, ["content[0]: a video needs timestamps or fps"]),
        ({"frames": NAMES, "timestamps": [0, 1]}, ["a timestamp for each frame, got 2 for 3 frames"]),
        ({"frames": NAMES, "timestamps": [0, 2, 1]}, ["increase, got 2 s for frame 1 and 1 s for frame 2"]),
        ({"frames": ["0.png", "no.png"], "fps": 2}, ["frames[1]: ", "no.png: no such file"]),
        ({"frames": ["0.png", "other.png"], "fps": 2}, ["frame 0 is 64x48 pixels, frame 1 30x20"]),
        ({"frames": NAMES, "fps": -1}, ["fps must be a number from", "got -1"]),
        ({"frames": NAMES, "fps": 2, "video": "clip.avi"}, ["unknown key 'frames'"]),
        ({"video": "clip.avi"}, ["missing key 'fps'"]),
        ({"video": "clip.avi", "fps": "2"}, ["fps: expected a positive number, got '2'"]),
        ({"video": "no.avi", "fps": 2}, ["video: ", "no.avi: no such file"]),
        ({"frames": NAMES, "fps": 2, "audio": "no.wav"}, ["content[0].audio: ", "has no audio encoder"]),
        ({"video": "empty.avi", "fps": 2}, ["empty.avi: not a video that OpenCV can read"]),
    ],
)
def test_a_wrong_video_is_one_line_that_says_where(edgellm, engine, write, part, words):
    path = write(part)
    assert_refused(edgellm("generate", engine, "--messages", path), path, *words)


@pytest.mark.parametrize("part", [{"frames": NAMES, "fps": 2}, {"video": "clip.avi", "fps": 2}])
def test_an_engine_that_takes_images_only_refuses_a_video(edgellm, tiny_engine, write, part):
    run = edgellm("generate", tiny_engine, "--messages", write(part))
    assert_refused(run, "this engine takes no videos")


def test_reports_tell_which_videos_an_engine_takes(edgellm, checkpoint, engine, tiny_engine):
    # All frames together are at most 48 tokens' area, so that 2 frames have 24 - 4 tokens, and many frames 1.
    # 44 groups of 1 token and 9 of a time fit into 448 slots of the KV cache.
    told = "groups of 2 frames; 2 frames of 640x480 px are 20 tokens, a prompt takes about 88 (1 each 2)"
    assert f"video      {told}" in edgellm("inspect", engine).out
    assert f"video       {told}" in edgellm("export", "--check", checkpoint).out
    small = edgellm("export", "--check", "--max-input-len", 19, checkpoint).out
    assert "are 20 tokens, too many for a prompt" in small
    assert "video      not supported" in edgellm("inspect", tiny_engine).out
