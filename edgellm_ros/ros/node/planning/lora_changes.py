# SPDX-License-Identifier: Apache-2.0
"""New values of the parameter `loras` while the node is configured.

Each is checked at once, and loaded in turn with the plans.
"""

from __future__ import annotations

import math
from collections import deque

from rclpy.lifecycle import LifecycleNode
from rclpy.parameter import Parameter
from rclpy.task import Future

from edgellm_ros.ros.node.settings.live_parameters import LiveParameters
from edgellm_ros.ros.node.settings.loras import change_loras, check_change, parse_loras
from edgellm_ros.ros.node.worker.job import COMPLETED, ERROR, Job, Outcome
from edgellm_ros.ros.node.worker.worker import PlanWorker
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime

MAX_WAITING = 100  # changes; a plan in front of them may take an hour


class LoraChanges:
    """Queues each new value of the parameter as a job for the planning threads.

    Jobs run in the order of their arrival, between plans: a goal sent after a change can name the new
    adapters. After a change that failed the parameter is set back to the adapters that are loaded. All
    methods are for the executor's thread, except `_apply` and `_on_done`.
    """

    def __init__(
        self,
        node: LifecycleNode,
        parameters: LiveParameters,
        runtime: LLMInferenceRuntime,
        worker: PlanWorker,
    ) -> None:
        """Start with the present value of the parameter, whose adapters are loaded."""
        self._node = node
        self._runtime = runtime
        self._worker = worker
        self._loaded = list(parameters.current.loras)  # written by a planning thread
        self._requested = self._loaded  # the newest value; differs while changes wait
        self._built_in = set(runtime.lora_names()) - set(parse_loras(self._loaded))
        self._waiting: deque[Future] = deque()  # of each change, oldest first
        self._outcomes: deque[Outcome] = deque()  # of changes that ended, for the executor's thread
        self._ended = node.create_guard_condition(self._finish)
        self.problem = ""  # of the latest change

    @property
    def last_waiting(self) -> Future | None:
        """The future that is done after all changes so far; None if no change waits."""
        return self._waiting[-1] if self._waiting else None

    def check(self, values: list[str]) -> None:
        """Raise ValueError for a new value that cannot be loaded.

        Quick enough for a callback: reads no file of an adapter.
        """
        if values == self._requested:
            return
        if self._worker.closed:
            raise ValueError("the node shuts down")
        if len(self._waiting) >= MAX_WAITING:
            raise ValueError(f"{MAX_WAITING} changes of loras wait already")
        before, after = parse_loras(self._requested), parse_loras(values)
        check_change(before, after, self._built_in, self._runtime.active_lora)

    def submit(self, values: list[str]) -> None:
        """Queue the change to a new value that `check` has accepted."""
        if values == self._requested:
            return
        self._requested = list(values)
        self._waiting.append(Future())
        change = Job(lambda: self._apply(values), math.inf, self._on_done, is_plan=False, runs_alone=True)
        self._worker.submit_goal(change)

    def destroy(self) -> None:
        """Finish all changes, after the worker was closed."""
        self._finish()
        self._node.destroy_guard_condition(self._ended)

    def _apply(self, values: list[str]) -> None:
        change_loras(self._runtime, parse_loras(self._loaded), parse_loras(values))
        self._loaded = list(values)

    def _on_done(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self._ended.trigger()

    def _finish(self) -> None:
        """Report ended changes; set the parameter back if the newest one failed."""
        while self._outcomes:
            outcome, future = self._outcomes.popleft(), self._waiting.popleft()
            if outcome.reason == COMPLETED:
                self.problem = ""
                self._node.get_logger().info(f"adapters: {', '.join(self._runtime.lora_names()) or 'none'}")
            elif outcome.reason == ERROR:
                self.problem = f"the change of the parameter loras failed: {outcome.message}"
                self._node.get_logger().error(self.problem)
                if not self._waiting:
                    self._set_back()
            # Otherwise the worker was closed: the next configure loads the new value.
            future.set_result(None)

    def _set_back(self) -> None:
        self._requested = self._loaded
        self._node.set_parameters([Parameter("loras", Parameter.Type.STRING_ARRAY, self._loaded)])
