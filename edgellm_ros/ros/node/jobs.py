# SPDX-License-Identifier: Apache-2.0
"""Commands and goals as jobs of the planning thread, and what becomes of a job's progress and outcome."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

from rclpy.impl.rcutils_logger import RcutilsLogger

from edgellm_ros.action import Plan as PlanAction
from edgellm_ros.ros.node.command_trigger import Command
from edgellm_ros.ros.node.messages import (
    sampling_from_goal,
    sampling_from_parameters,
    sound_from_messages,
)
from edgellm_ros.ros.node.metrics import NodeMetrics
from edgellm_ros.ros.node.outputs import Outputs
from edgellm_ros.ros.node.parameters import Parameters
from edgellm_ros.ros.node.planner import PlanRequest
from edgellm_ros.ros.node.worker import COMPLETED, PREEMPTED, Job, Outcome, PlanWorker
from edgellm_ros.runtime.request import Progress

LOG_THROTTLE_S = 1.0
# Between two reports of progress. Telling every token made a plan of 70 ms 10 ms slower on 2 cores: each
# message takes the interpreter and a core from the engine. People read no faster.
PROGRESS_PERIOD_S = 0.05


class JobFactory:
    """Makes jobs that keep their time limit, stream their text, and are counted and published when they end.

    `parameters` is replaced by the node when they change.
    """

    def __init__(
        self,
        worker: PlanWorker,
        outputs: Outputs,
        metrics: NodeMetrics,
        parameters: Parameters,
        logger: RcutilsLogger,
    ) -> None:
        self.parameters = parameters
        self._worker = worker
        self._outputs = outputs
        self._metrics = metrics
        self._logger = logger
        self._numbers: Counter[str] = Counter()

    def from_command(self, command: Command, frame: Any) -> Job:
        """The job of what was typed or spoken and one camera frame."""
        parameters, sound = self.parameters, command.sound
        kind = "command" if sound is None else "utterance"
        self._numbers[kind] += 1
        request = PlanRequest(
            request_id=f"{kind}-{self._numbers[kind]}",
            prompt=command.text,
            system_prompt=parameters.system_prompt,
            frames=(frame,),
            sound=None if sound is None else lambda: sound,
            lora="",
            sampling=lambda: sampling_from_parameters(parameters),
            noise_seed=None,
            action_samples=parameters.action_samples,
            denoise_steps=parameters.denoise_steps or None,
        )

        def report(outcome: Outcome) -> None:
            if outcome.reason not in (COMPLETED, PREEMPTED):
                self._logger.warning(
                    f"{command}: {outcome.reason}: {outcome.message}",
                    throttle_duration_sec=LOG_THROTTLE_S,
                )

        return self._make(request, lambda progress: None, report)

    def from_goal(
        self,
        goal: PlanAction.Goal,
        goal_id: str,
        on_progress: Callable[[Progress], None],
        on_done: Callable[[Outcome], None],
    ) -> Job:
        """The job of a goal; both callbacks are its client's."""
        parameters = self.parameters
        request = PlanRequest(
            request_id=goal_id,
            prompt=goal.prompt,
            system_prompt=goal.system_prompt or parameters.system_prompt,
            frames=tuple(goal.images) or None,
            sound=(lambda: sound_from_messages(goal.audio)) if goal.audio else None,
            lora=goal.lora,
            sampling=lambda: sampling_from_goal(goal, parameters),
            noise_seed=goal.noise_seed if goal.noise_seed >= 0 else None,
            action_samples=goal.action_samples,
            denoise_steps=goal.denoise_steps or None,
        )
        return self._make(request, on_progress, on_done)

    def _make(
        self,
        request: PlanRequest,
        on_progress: Callable[[Progress], None],
        on_done: Callable[[Outcome], None],
    ) -> Job:
        streamed = 0

        def stream(text: str) -> None:
            nonlocal streamed
            if len(text) > streamed:
                self._outputs.stream(text[streamed:])
                streamed = len(text)

        told_stage, told_at = "", 0.0

        def progress(now: Progress) -> None:
            nonlocal told_stage, told_at
            self._worker.expire()
            first_words = bool(now.text) and not streamed
            if now.stage == told_stage and not first_words and time.monotonic() < told_at + PROGRESS_PERIOD_S:
                return
            told_stage, told_at = now.stage, time.monotonic()
            on_progress(now)
            stream(now.text)

        def done(outcome: Outcome) -> None:
            try:
                on_done(outcome)
                self._metrics.plan_done(outcome)
                if outcome.reason == COMPLETED:
                    stream(outcome.result.generation.text)
                    self._outputs.publish(outcome.result, self.parameters.camera)
            except Exception:  # the planning thread must outlive whatever happens to one plan
                self._logger.error(traceback.format_exc())

        # None of these functions knows the job: it would stand in a ring with them, and its frame and sound
        # would lie about until the next collection of garbage.
        return Job(request, self.parameters.plan_timeout, done, progress)
