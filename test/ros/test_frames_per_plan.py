# SPDX-License-Identifier: Apache-2.0
"""A camera stream to a node with several frames per plan."""

from __future__ import annotations

import numpy as np
import pytest
from builtin_interfaces.msg import Time
from edgellm_ros.action import Plan

from edgellm_ros.builder import export
from edgellm_ros.multimodal.video import Video
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams
from fixtures.peer import image_message
from fixtures.reference_inputs import make_image
from fixtures.video_checkpoint import write_video_checkpoint

TOKENS = 8
FRAMES = [np.roll(make_image(48, 64), 9 * i, axis=1) for i in range(10)]
PERIOD_NS = 250_000_000


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    directory = tmp_path_factory.mktemp("engine")
    export(write_video_checkpoint(directory / "checkpoint", "qwen3_vl"), directory / "engine")
    return directory / "engine"


@pytest.fixture(scope="module", autouse=True)
def node(start_node, peer, engine):
    child = start_node(
        engine_dir=engine, autostart="true", frames_per_plan=4, frame_interval=0.5, max_tokens=TOKENS,
        max_input_age=30.0, plan_timeout=30.0,
    )  # fmt: skip
    peer.connect()
    return child


@pytest.fixture(autouse=True)
def fresh(peer):
    """Drop input of earlier tests."""
    assert peer.transition("deactivate")
    assert peer.transition("activate")
    peer.connect()
    peer.clear()


def stream(peer, frames: list[np.ndarray]) -> Time:
    """Publish frames of a 4 Hz camera, each when the one before has arrived."""
    now = peer.now()
    start = now.sec * 10**9 - len(frames) * PERIOD_NS
    for index, pixels in enumerate(frames):
        received = peer.metrics()["frames_received"]
        time = start + index * PERIOD_NS
        stamp = Time(sec=time // 10**9, nanosec=time % 10**9)
        peer.frame(pixels, stamp)
        peer.wait(lambda received=received: peer.metrics()["frames_received"] > received, "frame")
    return stamp


def answer(engine, prompt: str, **vision) -> list[int]:
    """The runtime's own answer."""
    with LLMInferenceRuntime(engine) as runtime:
        sampling = SamplingParams(max_tokens=TOKENS)
        return runtime.handle_request(LLMGenerationRequest(prompt, sampling=sampling, **vision)).token_ids


def planned(peer):
    return peer.wait(lambda: peer.received["generation"], "plan")[0]


def test_a_command_is_planned_with_the_last_frames_and_their_times(peer, engine):
    stamp = stream(peer, FRAMES)
    peer.command("go there")
    generation = planned(peer)
    assert generation.header.stamp == stamp  # of the newest frame
    # Stored are frames 0, 2, 4, 6 and 8; 8 is too close to the newest frame, 9.
    video = Video([FRAMES[i] for i in (2, 4, 6, 9)], [0.0, 0.5, 1.0, 1.75])
    assert list(generation.token_ids) == answer(engine, "go there", videos=(video,))


def test_with_fewer_frames_so_far_a_plan_gets_them(peer, engine):
    stream(peer, FRAMES[:3])
    peer.command("go there")
    video = Video([FRAMES[0], FRAMES[2]], [0.0, 0.5])
    assert list(planned(peer).token_ids) == answer(engine, "go there", videos=(video,))


def test_a_single_frame_is_an_image(peer, engine):
    stream(peer, FRAMES[:1])
    peer.command("go there")
    assert list(planned(peer).token_ids) == answer(engine, "go there", images=(FRAMES[0],))


def test_a_goal_without_images_gets_the_last_frames(peer, engine):
    stream(peer, FRAMES[:5])
    peer.send(Plan.Goal(prompt="where?")).result()
    video = Video([FRAMES[i] for i in (0, 2, 4)], [0.0, 0.5, 1.0])
    assert list(planned(peer).token_ids) == answer(engine, "where?", videos=(video,))


def test_the_images_of_a_goal_stay_images(peer, engine):
    stream(peer, FRAMES[:3])
    peer.send(Plan.Goal(prompt="where?", images=[image_message(FRAMES[5])])).result()
    assert list(planned(peer).token_ids) == answer(engine, "where?", images=(FRAMES[5],))


def test_frames_from_before_a_deactivation_are_dropped(peer, engine):
    stream(peer, FRAMES[:5])
    assert peer.transition("deactivate")
    assert peer.transition("activate")
    peer.connect()
    stream(peer, FRAMES[7:8])
    peer.command("go there")
    assert list(planned(peer).token_ids) == answer(engine, "go there", images=(FRAMES[7],))


def test_an_engine_that_takes_images_only_refuses_several_frames_at_configure(peer, engine, tiny_engine):
    assert peer.transition("deactivate")
    assert peer.transition("cleanup")
    peer.set_parameter("engine_dir", str(tiny_engine))
    assert not peer.transition("configure")
    message = "parameter frames_per_plan is 4, but the engine takes no videos: set it to 1"
    peer.wait(lambda: peer.status("engine").message.endswith(message), "refusal")
    peer.set_parameter("engine_dir", str(engine))
    assert peer.transition("configure")
    assert peer.transition("activate")
