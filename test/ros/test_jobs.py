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
from edgellm_ros.ros.node.planning import jobs
from edgellm_ros.ros.node.planning.command_trigger import Command
from edgellm_ros.ros.node.planning.jobs import JobFactory
from edgellm_ros.ros.node.sensors.cameras import Cameras
from edgellm_ros.ros.node.sensors.frame_history import FrameHistory
from edgellm_ros.ros.node.sensors.input_time import Frame
from edgellm_ros.ros.node.settings.live_parameters import LiveParameters
from edgellm_ros.ros.node.worker.job import CANCELLED, COMPLETED, TIMEOUT, Job, Outcome
from edgellm_ros.runtime.request import Progress


def factory(
    outputs: object = None, speech: object = None, worker: object = None, **changes: object
) -> JobFactory:
    """A factory with these parameters, whose jobs publish to `outputs`, if given."""
    parameters = SimpleNamespace(
        system_prompt="",
        navigation=False,
        guidance=-1.0,
        action_samples=1,
        denoise_steps=0,
        plan_timeout=10.0,
        frame_interval=0.5,
        max_input_age=1.0,
        limits=SimpleNamespace(image_pixels=1_000_000),
        json_schema="",
        regex="",
        choices=[""],
        client_priorities=[""],
    )
    parameters.__dict__.update(changes)
    quiet = SimpleNamespace(
        expire=lambda: None,
        stream=lambda answer, piece: None,
        end_stream=lambda answer: None,
        begin=lambda answer: None,
        add=lambda answer, text: None,
        end=lambda answer: None,
        stop=lambda answer=None: None,
        plan_done=lambda outcome, kind: None,
        publish=lambda plan: None,
        publish_actions=lambda plan: None,
        get_logger=lambda: SimpleNamespace(warning=lambda text, **throttle: None),
    )
    live, frames, cameras = LiveParameters(parameters), FrameHistory(1), Cameras(("top", "wrist"))
    cameras.add("wrist", Frame(Image()))
    return JobFactory(
        quiet,
        live,
        worker=worker or quiet,
        outputs=outputs or quiet,
        speech=speech or quiet,
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


def test_texts_are_the_prompt_or_instructions_of_navigation():
    plain = job_of(Command("left"), None).request
    assert (plain.prompt, plain.navigation, plain.guidance) == ("left", "", None)
    unguided = job_of(Command("left"), None, navigation=True).request
    assert (unguided.prompt, unguided.navigation, unguided.guidance) == ("", "left", None)
    guided = job_of(Command("left"), None, navigation=True, guidance=0.0).request
    assert (guided.prompt, guided.navigation, guided.guidance) == ("", "left", 0.0)
    assert plain.instruction != guided.instruction == unguided.instruction


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


def test_a_goal_has_the_priority_of_its_client():
    jobs = factory(client_priorities=["/agent=3", "/logger=-2"])

    def priority(client: str) -> int:
        return jobs.from_goal(Plan.Goal(client=client), "1", lambda progress: None, print).priority

    assert [priority(client) for client in ("/agent", "/logger", "/other", "")] == [3, -2, 0, 0]


def test_the_actions_of_a_plan_leave_before_its_last_words():
    left = []
    outputs = SimpleNamespace(
        publish_actions=lambda plan: left.append("actions"),
        stream=lambda answer, piece: left.append(piece),
        publish=lambda plan: left.append("rest"),
        end_stream=lambda answer: left.append("end"),
    )
    job = factory(outputs).from_command(Command("go"), np.zeros((4, 4, 3), np.uint8))
    job.report(Progress("decode", "I", 1, 1))
    plan = SimpleNamespace(generation=SimpleNamespace(text="I go.", content="I go."), action_chunks=[])
    job.on_done(Outcome(COMPLETED, "", plan))
    assert left == ["I", "actions", " go.", "rest", "end"]


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


def test_late_goals_are_looked_for_with_each_report_and_not_with_each_token(monkeypatch):
    looks, reports = [], []
    worker = SimpleNamespace(expire=lambda: looks.append(len(reports)))
    made = Plan.Goal(prompt="go")
    job = factory(worker=worker).from_goal(made, "1", reports.append, lambda outcome: None)
    for period in (60.0, 60.0, 0.0, 0.0):
        monkeypatch.setattr(jobs, "PROGRESS_PERIOD_S", period)
        job.on_progress(Progress("decode", "", 0, 0))
    assert len(reports) == 3
    assert looks == [0, 1, 2]


class RecordedSpeech:
    """Keeps what is said, by answer."""

    def __init__(self) -> None:
        self.answers: list[object] = []
        self.said: list[str] = []

    def begin(self, answer: object) -> None:
        self.answers.append(answer)
        self.said.append("")

    def add(self, answer: object, text: str) -> None:
        self.said[self.answers.index(answer)] += text

    def end(self, answer: object) -> None:
        self.said[self.answers.index(answer)] += " END"

    def stop(self, answer: object = None) -> None:
        self.said[self.answers.index(answer)] += " STOP"


def progress(text: str) -> Progress:
    return Progress(stage="decode", text=text, tokens=1, step=0)


def finished(text: str, content: str | None = None) -> Outcome:
    outputs = SimpleNamespace(text=text, content=text if content is None else content)
    return Outcome(COMPLETED, result=SimpleNamespace(action_chunks=[], generation=outputs))


def goal_job(speech: RecordedSpeech, **goal: object) -> Job:
    made = Plan.Goal(**{"prompt": "go", **goal})
    return factory(speech=speech).from_goal(made, "1", lambda progress: None, lambda outcome: None)


def test_an_answer_is_spoken_while_it_is_generated():
    speech = RecordedSpeech()
    job = goal_job(speech)
    job.on_progress(progress("I go"))
    assert speech.said == ["I go"]
    job.on_done(finished("I go there."))
    assert speech.said == ["I go there. END"]


@pytest.mark.parametrize("reason", [CANCELLED, TIMEOUT])
def test_an_answer_that_ends_early_stops_its_speech(reason):
    speech = RecordedSpeech()
    job = goal_job(speech)
    job.on_progress(progress("I go"))
    job.on_done(Outcome(reason))
    assert speech.said == ["I go STOP"]


def test_a_goal_that_was_never_planned_leaves_the_speech_of_others():
    speech = RecordedSpeech()
    goal_job(speech).on_done(Outcome(CANCELLED))
    assert not speech.said


def test_answers_for_programs_are_not_spoken():
    speech = RecordedSpeech()
    job = goal_job(speech, sampling=SamplingParams(choices=["left", "right"]))
    job.on_progress(progress("left"))
    job.on_done(finished("left"))
    assert not speech.said


def test_of_an_answer_with_tool_calls_the_rest_is_spoken():
    speech = RecordedSpeech()
    job = goal_job(speech, tools=['{"type": "function"}'])
    job.on_progress(progress('I look. {"name"'))
    job.on_done(finished('I look. {"name": "look"}', content="I look."))
    assert speech.said == ["I look. END"]


def test_of_a_command_with_many_plans_the_first_is_spoken():
    speech = RecordedSpeech()
    jobs, command = factory(speech=speech), Command("go")
    for planned, text in ((command, "I go."), (command, "I still go."), (Command("go"), "I go again.")):
        job = jobs.from_command(planned, None)
        job.on_progress(progress(text))
        job.on_done(finished(text))
    assert speech.said == ["I go. END", "I go again. END"]
