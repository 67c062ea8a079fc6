# SPDX-License-Identifier: Apache-2.0
"""The action ~/plan: queues goals, returns progress and outcome to the client."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from rclpy.action import ActionServer, CancelResponse, GoalResponse
from rclpy.action.server import ServerGoalHandle
from rclpy.lifecycle import LifecycleNode
from rclpy.qos import QoSProfile
from rclpy.task import Future

from edgellm_ros.action import Plan as PlanAction
from edgellm_ros.ros.messaging import action_services_qos
from edgellm_ros.ros.node.metrics import NodeMetrics
from edgellm_ros.ros.node.planning.jobs import JobFactory
from edgellm_ros.ros.node.settings.live_parameters import LiveParameters
from edgellm_ros.ros.node.worker.clients import Clients
from edgellm_ros.ros.node.worker.job import CANCELLED, COMPLETED, ERROR, Job, Outcome
from edgellm_ros.ros.node.worker.worker import PlanWorker

# In stored results: about 30 MB as Python messages of 40 steps.
MAX_KEPT_TRAJECTORIES = 1000
LOG_THROTTLE_S = 1.0
NOT_ACTIVE = Outcome(ERROR, "the node is not active")


@dataclass(frozen=True)
class _Planning:
    """What plans the goals of a configured node."""

    worker: PlanWorker
    jobs: JobFactory
    metrics: NodeMetrics
    clients: Clients


class PlanServer:
    """Plans goals while `accepts` is true and the worker's queue has room.

    Goals wait for their results without blocking the executor. A goal that cannot be planned is accepted and
    aborted at once: a rejected goal would have no result to say why. Only if too many goals are stored is a
    goal rejected, as its result would be stored too.

    The action is made by the first `open` and outlives `close`, the node's cleanup: a client may not have
    asked for its result yet, and its middleware drops a result that it has received and not yet given to the
    client when the server goes.
    """

    def __init__(self, node: LifecycleNode, parameters: LiveParameters) -> None:
        self.accepts = False
        self._node = node
        self._parameters = parameters
        self._planning: _Planning | None = None
        self._jobs: dict[bytes, Job] = {}
        self._kept: deque[PlanAction.Result] = deque()  # stored results with trajectories, oldest first
        self._server: ActionServer | None = None
        self._made_with: tuple[int, float] | None = None  # depth and result timeout
        self._last_end = -math.inf

    def open(self, worker: PlanWorker, jobs: JobFactory, metrics: NodeMetrics, clients: Clients) -> None:
        """Offer the action, with these parts to plan its goals."""
        self._planning = _Planning(worker, jobs, metrics, clients)
        depth, timeout_s = self._parameters.current.service_depth, self._parameters.current.result_timeout
        if self._made_with == (depth, timeout_s):
            return
        self.destroy()
        self._server = ActionServer(
            self._node,
            PlanAction,
            "~/plan",
            execute_callback=self._execute,
            goal_callback=self._on_goal,
            cancel_callback=self._on_cancel,
            feedback_pub_qos_profile=QoSProfile(depth=depth),
            result_timeout=timeout_s,
            **action_services_qos(depth),
        )
        self._made_with = depth, timeout_s

    def close(self) -> None:
        """Refuse all goals, after the worker was closed; results can still be asked for."""
        self.accepts = False
        self._planning = None

    @property
    def in_progress(self) -> int:
        """Number of goals without a result."""
        return len(self._jobs)

    @property
    def since_last_end(self) -> float:
        """Seconds since a goal ended; infinite if none has."""
        return time.monotonic() - self._last_end

    def destroy(self) -> None:
        """Remove the action, with the results that it stores."""
        if self._server is not None:
            self._server.destroy()
        self._server = self._made_with = None
        self._kept.clear()

    def _on_goal(self, goal: PlanAction.Goal) -> GoalResponse:
        """Reject a goal if too many goals are stored."""
        assert self._server is not None
        stored, most = len(self._server._goal_handles), self._parameters.current.limits.goals
        if stored < most:
            return GoalResponse.ACCEPT
        self._node.get_logger().error(
            f"goal rejected: {stored} goals and results are stored, at most {most} (parameters limits.goals, "
            "result_timeout)",
            throttle_duration_sec=LOG_THROTTLE_S,
        )
        if self._planning is not None:
            self._planning.metrics.count("goals_rejected")
        return GoalResponse.REJECT

    def _refusal(self, planning: _Planning, goal: PlanAction.Goal) -> Outcome | None:
        """Return the reason why a goal is refused now; None if it is accepted."""
        if not self.accepts:
            return NOT_ACTIVE
        try:
            self._parameters.current.limits.check_goal(goal)
        except ValueError as error:
            return Outcome(ERROR, str(error))
        planning.clients.sent(goal.client)
        if not planning.worker.make_room(goal.client):
            return Outcome(ERROR, f"{planning.worker.waiting} goals wait already (parameter queue_size)")
        return None

    def _on_cancel(self, handle: ServerGoalHandle) -> CancelResponse:
        job = self._jobs.get(bytes(handle.goal_id.uuid))
        # Without a job, `_execute` has not started and will see the request.
        if job is not None and self._planning is not None:
            self._planning.worker.stop(job, CANCELLED, "cancelled by the client")
        return CancelResponse.ACCEPT

    async def _execute(self, handle: ServerGoalHandle) -> PlanAction.Result:
        goal_id = bytes(handle.goal_id.uuid)
        if handle.is_cancel_requested:
            return self._finish(handle, Outcome(CANCELLED, "cancelled by the client"))
        planning = self._planning
        if planning is None:
            return self._refuse(handle, NOT_ACTIVE)
        refusal = self._refusal(planning, handle.request)
        if refusal is not None:
            planning.metrics.plan_done(refusal)
            return self._refuse(handle, refusal)
        future = Future()

        def on_done(outcome: Outcome) -> None:  # on any thread
            future.set_result(outcome)
            if self._node.executor is not None:
                self._node.executor.wake()

        def on_progress(progress: Any) -> None:  # on the thread that runs the plan, or the runtime's
            handle.publish_feedback(
                PlanAction.Feedback(text=progress.text, tokens=progress.tokens, stage=progress.stage)
            )

        job = planning.jobs.from_goal(handle.request, goal_id.hex(), on_progress, on_done)
        self._jobs[goal_id] = job
        handle.publish_feedback(PlanAction.Feedback(stage=PlanAction.Feedback.QUEUED))
        planning.worker.submit_goal(job)
        try:
            return self._finish(handle, await future)
        finally:
            del self._jobs[goal_id]

    def _refuse(self, handle: ServerGoalHandle, refusal: Outcome) -> PlanAction.Result:
        self._node.get_logger().warning(
            f"goal refused: {refusal.message}", throttle_duration_sec=LOG_THROTTLE_S
        )
        return self._finish(handle, refusal)

    def _finish(self, handle: ServerGoalHandle, outcome: Outcome) -> PlanAction.Result:
        """End the goal; return its result. rclpy stores both for `result_timeout`."""
        self._last_end = time.monotonic()
        request, empty = handle.request, PlanAction.Goal()
        for name in request.get_fields_and_field_types():
            setattr(request, name, getattr(empty, name))
        if outcome.reason == COMPLETED:
            handle.succeed()
        elif outcome.reason == CANCELLED and handle.is_cancel_requested:
            handle.canceled()
        else:
            handle.abort()
        result = PlanAction.Result(termination_reason=outcome.reason, message=outcome.message)
        if outcome.result is not None:
            result.generation = outcome.result.generation
            result.action_chunks = outcome.result.action_chunks
            result.paths = outcome.result.paths
            if result.action_chunks:
                self._bound_kept_results(result)
        return result

    def _bound_kept_results(self, newest: PlanAction.Result) -> None:
        """Drop the trajectories of the oldest results while there are too many."""
        self._kept.append(newest)
        kept = sum(len(result.action_chunks) for result in self._kept)
        while kept > MAX_KEPT_TRAJECTORIES and len(self._kept) > 1:
            oldest = self._kept.popleft()
            kept -= len(oldest.action_chunks)
            oldest.action_chunks, oldest.paths = [], []
            oldest.message = "the trajectories were dropped: too many newer results"
