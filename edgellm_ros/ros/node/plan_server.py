# SPDX-License-Identifier: Apache-2.0
"""The action ~/plan: queues goals, returns progress and outcome to the client."""

from __future__ import annotations

from collections import deque
from typing import Any

from rclpy.action import ActionServer, CancelResponse, GoalResponse
from rclpy.action.server import ServerGoalHandle
from rclpy.lifecycle import LifecycleNode
from rclpy.qos import QoSProfile
from rclpy.task import Future

from edgellm_ros.action import Plan as PlanAction
from edgellm_ros.ros.messaging import action_services_qos
from edgellm_ros.ros.node.jobs import JobFactory
from edgellm_ros.ros.node.live_parameters import LiveParameters
from edgellm_ros.ros.node.metrics import NodeMetrics
from edgellm_ros.ros.node.worker import CANCELLED, COMPLETED, ERROR, Job, Outcome, PlanWorker

# In stored results: about 30 MB as Python messages of 40 steps.
MAX_KEPT_TRAJECTORIES = 1000
LOG_THROTTLE_S = 1.0


class PlanServer:
    """Plans goals while `accepts` is true and the worker's queue has room.

    Goals wait for their results without blocking the executor. A goal that cannot be planned is accepted and
    aborted at once: a rejected goal would have no result to say why. Only if too many goals are stored is a
    goal rejected, as its result would be stored too.
    """

    def __init__(
        self,
        node: LifecycleNode,
        parameters: LiveParameters,
        worker: PlanWorker,
        jobs: JobFactory,
        metrics: NodeMetrics,
    ) -> None:
        self.accepts = False
        self._node = node
        self._parameters = parameters
        self._worker = worker
        self._job_factory = jobs
        self._metrics = metrics
        self._jobs: dict[bytes, Job] = {}
        self._kept: deque[PlanAction.Result] = deque()  # stored results with trajectories, oldest first
        depth = parameters.current.service_depth
        self._server = ActionServer(
            node,
            PlanAction,
            "~/plan",
            execute_callback=self._execute,
            goal_callback=self._on_goal,
            cancel_callback=self._on_cancel,
            feedback_pub_qos_profile=QoSProfile(depth=depth),
            result_timeout=parameters.current.result_timeout,
            **action_services_qos(depth),
        )

    @property
    def in_progress(self) -> int:
        """Number of goals without a result."""
        return len(self._jobs)

    def destroy(self) -> None:
        """Remove the action."""
        self._server.destroy()

    def _on_goal(self, goal: PlanAction.Goal) -> GoalResponse:
        """Reject a goal if too many goals are stored."""
        stored, most = len(self._server._goal_handles), self._parameters.current.limits.goals
        if stored < most:
            return GoalResponse.ACCEPT
        self._node.get_logger().error(
            f"goal rejected: {stored} goals and results are stored, at most {most} (parameters limits.goals, "
            "result_timeout)",
            throttle_duration_sec=LOG_THROTTLE_S,
        )
        self._metrics.count("goals_rejected")
        return GoalResponse.REJECT

    def _refusal(self, goal: PlanAction.Goal) -> Outcome | None:
        """Return the reason why a goal is refused now; None if it is accepted."""
        if not self.accepts:
            return Outcome(ERROR, "the node is not active")
        if self._worker.is_full:
            return Outcome(ERROR, f"{self._worker.waiting} goals wait already (parameter queue_size)")
        try:
            self._parameters.current.limits.check_goal(goal)
        except ValueError as error:
            return Outcome(ERROR, str(error))
        return None

    def _on_cancel(self, handle: ServerGoalHandle) -> CancelResponse:
        job = self._jobs.get(bytes(handle.goal_id.uuid))
        if job is not None:  # otherwise `_execute` has not started and will see the request
            self._worker.stop(job, CANCELLED, "cancelled by the client")
        return CancelResponse.ACCEPT

    async def _execute(self, handle: ServerGoalHandle) -> PlanAction.Result:
        goal_id = bytes(handle.goal_id.uuid)
        if handle.is_cancel_requested:
            return self._finish(handle, Outcome(CANCELLED, "cancelled by the client"))
        refusal = self._refusal(handle.request)
        if refusal is not None:
            self._metrics.plan_done(refusal)
            self._node.get_logger().warning(
                f"goal refused: {refusal.message}", throttle_duration_sec=LOG_THROTTLE_S
            )
            return self._finish(handle, refusal)
        future = Future()

        def on_done(outcome: Outcome) -> None:  # on any thread
            future.set_result(outcome)
            if self._node.executor is not None:
                self._node.executor.wake()

        def on_progress(progress: Any) -> None:  # on the planning thread
            handle.publish_feedback(
                PlanAction.Feedback(text=progress.text, tokens=progress.tokens, stage=progress.stage)
            )

        job = self._job_factory.from_goal(handle.request, goal_id.hex(), on_progress, on_done)
        self._jobs[goal_id] = job
        handle.publish_feedback(PlanAction.Feedback(stage=PlanAction.Feedback.QUEUED))
        self._worker.submit_goal(job)
        try:
            return self._finish(handle, await future)
        finally:
            del self._jobs[goal_id]

    def _finish(self, handle: ServerGoalHandle, outcome: Outcome) -> PlanAction.Result:
        """End the goal; return its result. rclpy stores both for `result_timeout`."""
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
