# SPDX-License-Identifier: Apache-2.0
"""Makes jobs for the planning threads from commands and goals.

Routes the progress and the outcome of each job.
"""

from __future__ import annotations

import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from rclpy.node import Node

from edgellm_ros.action import Plan as PlanAction
from edgellm_ros.ros.node.messages import (
    chunk_condition_from_message,
    earlier_messages_from_goal,
    sampling_from_goal,
    sampling_from_parameters,
    sound_from_messages,
    texts_of_grammar,
    texts_of_message,
    tools_from_goal,
)
from edgellm_ros.ros.node.metrics import NodeMetrics
from edgellm_ros.ros.node.outputs.outputs import Outputs
from edgellm_ros.ros.node.plan import Plan
from edgellm_ros.ros.node.planning.chunking import Chunking
from edgellm_ros.ros.node.planning.command_trigger import Command
from edgellm_ros.ros.node.planning.plan_request import PlanRequest
from edgellm_ros.ros.node.sensors.cameras import Cameras
from edgellm_ros.ros.node.sensors.frame_history import FrameHistory
from edgellm_ros.ros.node.sensors.input_time import Frame
from edgellm_ros.ros.node.settings.live_parameters import LiveParameters
from edgellm_ros.ros.node.settings.parameters import Parameters
from edgellm_ros.ros.node.settings.priorities import parse_priorities
from edgellm_ros.ros.node.speech_output import SpeechOutput
from edgellm_ros.ros.node.worker.job import COMPLETED, DRIVING, GOALS, PREEMPTED, SKIPPED, Job, Outcome
from edgellm_ros.ros.node.worker.worker import PlanWorker
from edgellm_ros.runtime.conversation import Message
from edgellm_ros.runtime.request import Progress

LOG_THROTTLE_S = 1.0
# Between two progress reports. With a report per token, a plan of 70 ms was 10 ms slower on 2 cores: each
# message competes with the engine for the interpreter and a core.
PROGRESS_PERIOD_S = 0.05


class _SpokenAnswer:
    """The speech of one job: from its planning until its text is spoken.

    The speech stops if the job ends early.
    """

    def __init__(self, speech: SpeechOutput, is_spoken: Callable[[], bool], calls_tools: bool) -> None:
        """Take what is asked once, when the planning begins: whether the answer is spoken.

        calls_tools: the text may call functions, and is spoken at its end, without the calls.
        """
        self._speech, self._is_spoken, self._calls_tools = speech, is_spoken, calls_tools
        self._spoken: bool | None = None

    def begin(self) -> None:
        if self._spoken is None:
            self._spoken = self._is_spoken()
            if self._spoken:
                self._speech.begin(self)

    def add(self, text: str) -> None:
        self.begin()
        if self._spoken and not self._calls_tools:
            self._speech.add(self, text)

    def end(self, content: str) -> None:
        if self._spoken and self._calls_tools:
            self._speech.add(self, content)
        if self._spoken:
            self._speech.end(self)

    def stop(self) -> None:
        if self._spoken:
            self._speech.stop(self)


class JobFactory:
    """Makes jobs that stream their text, and whose end is counted and published."""

    def __init__(
        self,
        node: Node,
        parameters: LiveParameters,
        *,
        worker: PlanWorker,
        outputs: Outputs,
        speech: SpeechOutput,
        metrics: NodeMetrics,
        frames: FrameHistory,
        cameras: Cameras,
        chunking: Chunking,
    ) -> None:
        self._frames = frames
        self._cameras = cameras
        self._parameters = parameters
        self._worker = worker
        self._outputs = outputs
        self._speech = speech
        self._metrics = metrics
        self._chunking = chunking
        self._logger = node.get_logger()
        self._publishing = threading.Lock()
        self._numbers: Counter[str] = Counter()
        self._spoken: weakref.ref[Command] = weakref.ref(Command())  # the last command with a spoken answer

    def from_command(self, command: Command, frame: Frame | None) -> Job:
        """Make the job of a typed or spoken command.

        The job has the camera frame, if there is one, the frames before it, and those of further cameras.
        """
        parameters, sound, earlier = self._parameters.current, command.sound, ()
        if frame is not None:
            earlier = self._frames.before(frame, parameters.frame_interval, parameters.max_input_age)
        kind = "command" if sound is None else "utterance"
        self._numbers[kind] += 1
        request = PlanRequest(
            request_id=f"{kind}-{self._numbers[kind]}",
            **_words(command.text, parameters),
            system_prompt=parameters.system_prompt,
            frames=() if frame is None else (frame,),
            takes_newer_frame=True,
            earlier_frames=earlier,
            camera_frames=self._cameras.last(),
            sound=None if sound is None else lambda: sound,
            lora="",
            sampling=lambda: sampling_from_parameters(parameters),
            noise_seed=None,
            action_samples=parameters.action_samples,
            denoise_steps=parameters.denoise_steps or None,
            instruction=(
                command.text,
                parameters.navigation,
                sound,
                parameters.system_prompt,
                (),
                (),
                texts_of_grammar(parameters),
            ),
            has_grammar=any(texts_of_grammar(parameters)),
        )

        def report(outcome: Outcome) -> None:
            if outcome.reason not in (COMPLETED, PREEMPTED, SKIPPED):
                self._logger.warning(
                    f"{command}: {outcome.reason}: {outcome.message}",
                    throttle_duration_sec=LOG_THROTTLE_S,
                )

        def is_spoken() -> bool:
            """With plan_on = image a command has many plans, of which the first is spoken."""
            is_first = self._spoken() is not command
            self._spoken = weakref.ref(command)
            return is_first and not request.has_grammar

        return self._make(request, lambda progress: None, report, is_spoken=is_spoken, kind=DRIVING)

    def from_goal(
        self,
        goal: PlanAction.Goal,
        goal_id: str,
        on_progress: Callable[[Progress], None],
        on_done: Callable[[Outcome], None],
    ) -> Job:
        """Make the job of a goal; both callbacks report to its client."""
        parameters, audio, earlier = self._parameters.current, goal.audio, goal.earlier_messages
        system_prompt, previous = goal.system_prompt or parameters.system_prompt, goal.previous_chunk
        said = tuple(map(texts_of_message, earlier))
        tools = goal.tools

        def earlier_messages() -> tuple[Message, ...]:
            return earlier_messages_from_goal(earlier, parameters.limits.image_pixels)

        request = PlanRequest(
            request_id=goal_id,
            **_words(goal.prompt, parameters),
            system_prompt=system_prompt,
            frames=tuple(Frame(image) for image in goal.images) or None,
            sound=(lambda: sound_from_messages(audio)) if audio else None,
            lora=goal.lora,
            sampling=lambda: sampling_from_goal(goal, parameters),
            noise_seed=goal.noise_seed if goal.noise_seed >= 0 else None,
            action_samples=goal.action_samples,
            denoise_steps=goal.denoise_steps or None,
            earlier_messages=earlier_messages if earlier else None,
            instruction=(
                goal.prompt,
                parameters.navigation,
                object() if audio else None,  # like an utterance, every sound is another instruction
                system_prompt,
                said,
                tuple(tools),
                texts_of_grammar(goal.sampling),
            ),
            previous_chunk=partial(chunk_condition_from_message, previous[0]) if previous else None,
            tools=(lambda: tools_from_goal(tools)) if tools else None,
            state=tuple(goal.state),
            has_grammar=any(texts_of_grammar(goal.sampling)),
        )
        spoken = not request.has_grammar  # other answers are for programs
        return self._make(
            request, on_progress, on_done, is_spoken=lambda: spoken, kind=GOALS, client=goal.client
        )

    def _make(
        self,
        request: PlanRequest,
        on_progress: Callable[[Progress], None],
        on_done: Callable[[Outcome], None],
        *,
        is_spoken: Callable[[], bool],
        kind: str,
        client: str = "",
    ) -> Job:
        streamed = 0
        speech = _SpokenAnswer(self._speech, is_spoken, calls_tools=request.tools is not None)

        def stream(text: str) -> None:
            nonlocal streamed
            if len(text) > streamed:
                self._outputs.stream(speech, text[streamed:])
                speech.add(text[streamed:])
                streamed = len(text)

        reported_stage, reported_at = "", 0.0

        def progress(now: Progress) -> None:
            nonlocal reported_stage, reported_at
            first_words = bool(now.text) and not streamed
            if (
                now.stage == reported_stage
                and not first_words
                and time.monotonic() < reported_at + PROGRESS_PERIOD_S
            ):
                return
            reported_stage, reported_at = now.stage, time.monotonic()
            self._worker.expire()
            speech.begin()
            on_progress(now)
            stream(now.text)

        def publish(plan: Plan) -> None:
            with self._publishing:  # chunks leave in the order in which they are remembered
                if plan.action_chunks:
                    self._chunking.publishing(plan.action_chunks[0], plan.motion)
                self._outputs.publish_actions(plan)
                stream(plan.generation.text)
                self._outputs.publish(plan)

        def finish(outcome: Outcome) -> None:
            try:
                on_done(outcome)
                self._metrics.plan_done(outcome, kind)
                if outcome.reason == COMPLETED:
                    publish(outcome.result)
                    speech.end(outcome.result.generation.content)
                else:
                    speech.stop()
            finally:
                self._outputs.end_stream(speech)

        def done(outcome: Outcome) -> None:
            try:
                finish(outcome)
            except Exception:  # one failed plan must not end a planning thread
                self._logger.error(traceback.format_exc())

        # None of these functions refers to the job: a reference cycle would hold its frame and sound in
        # memory until the next garbage collection.
        parameters = self._parameters.current
        priority = parse_priorities(parameters.client_priorities).get(client, 0)
        return Job(request, parameters.plan_timeout, done, progress, client=client, priority=priority)


def _words(text: str, parameters: Parameters) -> dict[str, Any]:
    """Return the fields of a PlanRequest with the text of a command or goal."""
    if not parameters.navigation:
        return {"prompt": text}
    weight = parameters.guidance
    return {"prompt": "", "navigation": text, "guidance": None if weight < 0 else weight}
