# SPDX-License-Identifier: Apache-2.0
"""A client's end of the action ~/plan: its three services and its feedback."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from action_msgs.msg import GoalInfo
from action_msgs.srv import CancelGoal
from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
from rclpy.node import Node
from rclpy.task import Future
from unique_identifier_msgs.msg import UUID

from edgellm_ros.action import Plan
from edgellm_ros.ros.messaging import services_qos

_first_use = threading.Lock()  # rclpy loads the support of a type at its first use: two threads break it


class _Gate(MutuallyExclusiveCallbackGroup):
    """Callbacks for which the executor does not even wait while the gate is closed."""

    is_open = False

    def can_execute(self, entity: Any) -> bool:
        return self.is_open and super().can_execute(entity)


class ActionServices:
    """Sends goals and asks for their results; not thread-safe.

    In place of rclpy's ActionClient, which also reads the action's statuses: a server publishes three for
    each goal, with an entry for every goal whose result it keeps, and rclpy takes 35 us to read an entry.
    With 600 kept results four clients took 20 ms of processor time per goal. Feedback is one topic for the
    goals of all clients, so it is taken only while a caller wants it.

    - on_feedback: takes the id of a goal, of any client, and its feedback
    """

    def __init__(
        self, node: Node, action_name: str, on_feedback: Callable[[bytes, Plan.Feedback], None]
    ) -> None:
        self._gate = _Gate()
        qos, service = services_qos(), f"{action_name}/_action/"
        with _first_use:
            self._send_goal = node.create_client(
                Plan.Impl.SendGoalService, f"{service}send_goal", qos_profile=qos
            )
            self._get_result = node.create_client(
                Plan.Impl.GetResultService, f"{service}get_result", qos_profile=qos
            )
            self._cancel_goal = node.create_client(CancelGoal, f"{service}cancel_goal", qos_profile=qos)
            self._feedback = node.create_subscription(
                Plan.Impl.FeedbackMessage,
                f"{service}feedback",
                lambda message: on_feedback(bytes(message.goal_id.uuid), message.feedback),
                qos,
                callback_group=self._gate,
            )

    def take_feedback(self, takes: bool) -> None:
        """Take feedback from now on, or leave it, on the thread that spins the node."""
        self._gate.is_open = takes

    @property
    def has_server(self) -> bool:
        """Whether a server answers and gives feedback."""
        services = (self._send_goal, self._get_result, self._cancel_goal)
        return all(each.service_is_ready() for each in services) and self._feedback.get_publisher_count() > 0

    def send_goal(self, goal_id: UUID, goal: Plan.Goal) -> Future:
        """Send a goal; the answer has `accepted`."""
        return self._send_goal.call_async(Plan.Impl.SendGoalService.Request(goal_id=goal_id, goal=goal))

    def get_result(self, goal_id: UUID) -> Future:
        """Ask for the result of a goal; the answer has `status` and `result`."""
        return self._get_result.call_async(Plan.Impl.GetResultService.Request(goal_id=goal_id))

    def cancel_goal(self, goal_id: UUID) -> None:
        """Ask the server to end a goal."""
        self._cancel_goal.call_async(CancelGoal.Request(goal_info=GoalInfo(goal_id=goal_id)))

    def forget(self, answer: Future) -> None:
        """Wait no more for the answer to a goal."""
        self._send_goal.remove_pending_request(answer)
