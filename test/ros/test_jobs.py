# SPDX-License-Identifier: Apache-2.0
"""Jobs: their instructions, and their end.

Jobs are freed after their last use, with their frames and sounds.
"""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from edgellm_ros.action import Plan
from edgellm_ros.msg import AudioChunk, ChatMessage, SamplingParams, ToolCall
from sensor_msgs.msg import Image

from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.ros.node.planning.command_trigger import Command
from edgellm_ros.ros.node.planning.jobs import JobFactory
from edgellm_ros.ros.node.sensors.cameras import Cameras
from edgellm_ros.ros.node.sensors.frame_history import FrameHistory
from edgellm_ros.ros.node.sensors.input_time import Frame
from edgellm_ros.ros.node.settings.live_parameters import LiveParameters
from edgellm_ros.ros.node.worker.job import CANCELLED, COMPLETED, TIMEOUT, Job, Outcome
from edgellm_ros.runtime.request import Progress


def factory(outputs: object = None, **changes: object) -> JobFactory:
    """A factory with these parameters, whose jobs publish to `outputs`, if given."""
    parameters = SimpleNamespace(
        system_prompt="",
        action_samples=1,
        denoise_steps=0,
        plan_timeout=10.0,
        frame_interval=0.5,
        max_input_age=1.0,
        limits=SimpleNamespace(image_pixels=1_000_000),
        json_schema="",
        regex="",
        choices=[""],
    )
    parameters.__dict__.update(changes)
    quiet = SimpleNamespace(
        expire=lambda: None,
        stream=lambda text: None,
        plan_done=lambda outcome: None,
        get_logger=lambda: SimpleNamespace(warning=lambda text, **throttle: None),
    )
    live, frames, cameras = LiveParameters(parameters), FrameHistory(1), Cameras(("top", "wrist"))
    cameras.add("wrist", Frame(Image()))
    return JobFactory(
        quiet,
        live,
        worker=quiet,
        outputs=outputs or quiet,
        metrics=quiet,
        frames=frames,
        cameras=cameras,
        chunking=None,
    )


def job_of(command: Command, frame: np.ndarray, **parameters: object) -> Job:
    return factory(**parameters).from_command(command, frame)


def instruction(**goal: object) -> object:
    """Return the instruction of a goal "go" with these fields."""
    made = Plan.Goal(**{"prompt": "go", **goal})
    return factory().from_goal(made, "1", lambda progress: None, lambda outcome: None).request.instruction


SAID = ChatMessage(role="assistant", tool_calls=[ToolCall(name="find", arguments="{}")])
SEEN = ChatMessage(role="user", text="what do you see?", images=[Image(height=1, width=1)])


@pytest.mark.parametrize(
    "goal",
    [
        {"prompt": "stop"},
        {"system_prompt": "Be brief."},
        {"tools": ['{"type": "function"}']},
        {"sampling": SamplingParams(regex="left|right")},
        {"sampling": SamplingParams(json_schema="{}")},
        {"sampling": SamplingParams(choices=["left", "right"])},
        {"earlier_messages": [SEEN]},
    ],
)
def test_a_goal_that_asks_for_something_else_has_another_instruction(goal):
    assert instruction(**goal) != instruction()
    assert instruction(**goal) == instruction(**goal)


def test_other_images_sampling_and_seeds_are_no_other_instruction():
    unseen = ChatMessage(role="user", text=SEEN.text)
    assert instruction(earlier_messages=[SEEN]) == instruction(earlier_messages=[unseen])
    changes = {"images": [Image()], "noise_seed": 7, "sampling": SamplingParams(temperature=0.5, seed=3)}
    assert instruction(**changes) == instruction()


def test_an_earlier_answer_that_called_another_function_is_another_instruction():
    other = ChatMessage(role="assistant", tool_calls=[ToolCall(name="look", arguments="{}")])
    assert instruction(earlier_messages=[SAID]) != instruction(earlier_messages=[other])


def test_every_sound_of_a_goal_is_another_instruction():
    assert instruction(audio=[AudioChunk()]) != instruction(audio=[AudioChunk()])


def test_a_command_has_the_instruction_of_a_goal_with_its_words_and_its_grammar():
    frame = np.zeros((4, 4, 3), np.uint8)
    assert job_of(Command("go"), frame).request.instruction == instruction()
    free, bound = job_of(Command("go"), frame), job_of(Command("go"), frame, regex="left|right")
    assert free.request.instruction != bound.request.instruction
    assert bound.request.instruction == instruction(sampling=SamplingParams(regex="left|right"))


def test_the_actions_of_a_plan_leave_before_its_last_words():
    left = []
    outputs = SimpleNamespace(
        publish_actions=lambda plan: left.append("actions"),
        stream=lambda piece: left.append(piece),
        publish=lambda plan: left.append("rest"),
    )
    job = factory(outputs).from_command(Command("go"), np.zeros((4, 4, 3), np.uint8))
    job.report(Progress("decode", "I", 1, 1))
    plan = SimpleNamespace(generation=SimpleNamespace(text="I go."), action_chunks=[])
    job.on_done(Outcome(COMPLETED, "", plan))
    assert left == ["I", "actions", " go.", "rest"]


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
