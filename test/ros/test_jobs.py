# SPDX-License-Identifier: Apache-2.0
"""Jobs are freed after their last use, together with their frames and sounds."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from sensor_msgs.msg import Image

from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.ros.node.cameras import Cameras
from edgellm_ros.ros.node.command_trigger import Command
from edgellm_ros.ros.node.frame_history import FrameHistory
from edgellm_ros.ros.node.input_time import Frame
from edgellm_ros.ros.node.jobs import JobFactory
from edgellm_ros.ros.node.live_parameters import LiveParameters
from edgellm_ros.ros.node.worker import CANCELLED, TIMEOUT, Outcome
from edgellm_ros.runtime.request import Progress


def job_of(command: Command, frame: np.ndarray, plan_timeout: float = 10.0):
    """A job of the factory whose progress and outcome are discarded."""
    parameters = SimpleNamespace(
        system_prompt="",
        action_samples=1,
        denoise_steps=0,
        plan_timeout=plan_timeout,
        frame_interval=0.5,
        max_input_age=1.0,
    )
    quiet = SimpleNamespace(
        expire=lambda: None,
        stream=lambda text: None,
        plan_done=lambda outcome: None,
        get_logger=lambda: SimpleNamespace(warning=lambda text, **throttle: None),
    )
    live, frames, cameras = LiveParameters(parameters), FrameHistory(1), Cameras(("top", "wrist"))
    cameras.add("wrist", Frame(Image()))
    jobs = JobFactory(quiet, live, quiet, quiet, quiet, frames, cameras, None)
    return jobs.from_command(command, frame)


@pytest.fixture
def no_collection():
    gc.disable()
    yield
    gc.enable()


def test_an_ended_job_is_freed_with_its_frame_and_sound_without_gc(no_collection):
    frame, sound = np.zeros((4, 4, 3), np.uint8), Sound(np.zeros(16, np.float32), 16000)
    left = [weakref.ref(frame), weakref.ref(sound)]
    job = job_of(Command(sound=sound), frame)
    job.report(Progress("decode", "I go.", 3, 3))
    job.on_done(Outcome(CANCELLED))
    del job, frame, sound
    assert [reference() is None for reference in left] == [True, True]


def test_a_job_that_reports_after_its_time_is_stopped():
    job = job_of(Command("go"), np.zeros((4, 4, 3), np.uint8), plan_timeout=-1.0)
    job.report(Progress("prefill", "", 0, 0))
    assert job.cancel.is_set()
    assert job.stopped.reason == TIMEOUT
