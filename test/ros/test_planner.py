# SPDX-License-Identifier: Apache-2.0
"""Errors of jobs become outcomes with a short, printable message.

Camera frames become images or a video.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from builtin_interfaces.msg import Time

from edgellm_ros.engine.device import CpuDevice
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine_directory.parts import EngineParts
from edgellm_ros.ros.node.planning.plan_inputs import PlanInputs
from edgellm_ros.ros.node.planning.plan_request import PlanRequest
from edgellm_ros.ros.node.planning.planner import Planner
from edgellm_ros.ros.node.planning.robot_state import Stateless
from edgellm_ros.ros.node.sensors.cameras import Cameras
from edgellm_ros.ros.node.sensors.frame_history import FrameHistory
from edgellm_ros.ros.node.sensors.input_time import Frame, StaleInputError
from edgellm_ros.ros.node.worker.job import COMPLETED, ERROR, STALE_INPUT, Job, Outcome
from edgellm_ros.runtime.metrics import StageClock
from edgellm_ros.runtime.request import LLMGenerationResponse, SamplingParams
from fixtures.node_limits import limits
from fixtures.peer import image_message
from fixtures.reference_inputs import make_image


def outcome_of(error: Exception) -> Outcome:
    """The outcome of a job that raises."""

    def fail() -> None:
        raise error

    quiet = SimpleNamespace(
        get_clock=lambda: None, get_logger=lambda: SimpleNamespace(error=lambda text: None)
    )
    return Planner(quiet, None, None, None, None).plan(Job(fail, math.inf, lambda outcome: None))


@pytest.mark.parametrize(
    "error, reason",
    [
        (StaleInputError("old"), STALE_INPUT),
        (ValueError("wrong"), ERROR),
        (FileNotFoundError("missing"), ERROR),
        (EngineError("failed"), ERROR),
    ],
)
def test_an_expected_error_keeps_its_own_words(error, reason):
    assert outcome_of(error) == Outcome(reason, str(error))


def test_an_internal_error_is_cut_and_escaped():
    outcome = outcome_of(RuntimeError("\x1b[31m" + "x" * 1_000_000))
    assert outcome.reason == ERROR
    assert outcome.message.startswith("internal error, see the node's log: RuntimeError: \\x1b[31mxxx")
    assert outcome.message.isprintable()
    assert len(outcome.message) < 400


def plan_with(earlier: list[Frame], newest: Frame, arrived: Frame | None = None, **changes) -> tuple:
    """The request to the runtime for a plan with these camera frames, and the plan.

    `arrived`: the camera's frame when the plan starts, by default `newest`.
    """
    asked = []

    def submit(request, priority, deadline):
        asked.append(request)
        seconds = StageClock(CpuDevice().mark).metrics()
        answer = LLMGenerationResponse("I go.", [1], "stop", 3, None, None, None, 0, "", seconds)
        return SimpleNamespace(result=lambda: answer, raise_priority=lambda priority: None)

    config = SimpleNamespace(vision=True, audio=None, action=None, expert=None, policy=None)
    parts = EngineParts(config)
    runtime = SimpleNamespace(config=config, parts=parts, submit=submit, active_lora="")
    now = SimpleNamespace(nanoseconds=20 * 10**9)
    quiet = SimpleNamespace(
        get_clock=lambda: SimpleNamespace(now=lambda: now),
        get_logger=lambda: SimpleNamespace(warning=lambda text: None, error=print),
    )
    parameters = SimpleNamespace(
        max_input_age=15.0, future_stamp_tolerance=1.0, frame_interval=0.5, frame_id="", limits=limits()
    )
    trigger = SimpleNamespace(frame=arrived or newest)
    current = SimpleNamespace(current=parameters)
    inputs = PlanInputs(
        quiet,
        current,
        parts=parts,
        trigger=trigger,
        history=FrameHistory(1),
        cameras=Cameras(()),
        robot=Stateless(),
    )
    planner = Planner(quiet, current, runtime, inputs, None)
    request = PlanRequest(
        request_id="1", prompt="go", system_prompt="", frames=(newest,), sound=None, lora="",
        sampling=SamplingParams, noise_seed=None, action_samples=0, denoise_steps=None,
        earlier_frames=tuple(earlier), **changes,
    )  # fmt: skip
    outcome = planner.plan(Job(request, 10.0, lambda outcome: None))
    assert outcome.reason == COMPLETED, outcome
    return asked[0], outcome.result


def camera_frame(pixels: np.ndarray, seconds: int) -> Frame:
    return Frame(image_message(pixels, Time(sec=seconds)))


def test_a_video_ends_with_the_frame_whose_stamp_and_picture_the_plan_has():
    pictures = [make_image(48, 64), np.zeros((48, 64, 3), np.uint8), make_image(48, 64)[::-1]]
    frames = [camera_frame(pixels, 10 + 2 * i) for i, pixels in enumerate(pictures)]
    request, plan = plan_with(frames[:2], frames[2])
    (video,) = request.videos
    np.testing.assert_array_equal(video.frames, pictures)
    assert video.timestamps == (0.0, 2.0, 4.0)
    assert request.images == ()
    np.testing.assert_array_equal(plan.frame, pictures[2])
    assert plan.generation.header.stamp == Time(sec=14)


def test_a_command_that_waited_too_long_for_its_turn_is_planned_with_the_newest_frame():
    old, new = camera_frame(make_image(48, 64), 4), camera_frame(make_image(48, 64)[::-1], 19)
    _, plan = plan_with([], old, new, takes_newer_frame=True)
    assert plan.generation.header.stamp == Time(sec=19)
    np.testing.assert_array_equal(plan.frame, make_image(48, 64)[::-1])
    young = camera_frame(make_image(48, 64), 6)
    _, plan = plan_with([], young, new, takes_newer_frame=True)
    assert plan.generation.header.stamp == Time(sec=6)


def test_earlier_frames_of_another_size_and_broken_ones_are_left_out():
    broken = camera_frame(make_image(48, 64), 11)
    broken.message.encoding = "smell"
    earlier = [camera_frame(make_image(24, 32), 10), broken, camera_frame(make_image(48, 64), 12)]
    request, _ = plan_with(earlier, camera_frame(make_image(48, 64), 13))
    assert request.videos[0].timestamps == (0.0, 1.0)
    request, _ = plan_with(earlier[:2], camera_frame(make_image(48, 64), 13))
    assert (len(request.images), request.videos) == (1, ())


@pytest.mark.parametrize("seconds", [(12, 14), (14, 12)])
def test_the_motion_of_several_images_starts_at_the_oldest(seconds):
    now = SimpleNamespace(now=lambda: SimpleNamespace(nanoseconds=20 * 10**9))
    quiet = SimpleNamespace(get_clock=lambda: now, get_logger=lambda: None)
    parameters = SimpleNamespace(max_input_age=30.0, future_stamp_tolerance=1.0, limits=limits())
    config = SimpleNamespace(vision=True, audio=None, action=None, expert=None, policy=None)
    current = SimpleNamespace(current=parameters)
    inputs = PlanInputs(
        quiet,
        current,
        parts=EngineParts(config),
        trigger=None,
        history=None,
        cameras=Cameras(()),
        robot=Stateless(),
    )
    frames = tuple(camera_frame(make_image(24, 32), each) for each in seconds)
    request = SimpleNamespace(
        frames=frames, camera_frames=None, state=(), earlier_frames=(), takes_newer_frame=False
    )
    assert inputs.observe(request, drives=False).start == 12 * 10**9
