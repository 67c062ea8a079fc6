# SPDX-License-Identifier: Apache-2.0
"""The thread that talks to the action ~/plan.

    caller's threads                    this thread
    ----------------                    -----------
    send, cancel   --- tasks ------>    ActionServices; each call is looked after until it ends
    PlanCall       <-- futures -----    feedback, result, error

Only this thread calls the services: rclpy loses an answer that arrives before a caller on another thread has
stored its future.
"""

from __future__ import annotations

import threading
import time
import uuid
from dataclasses import dataclass, field
from functools import partial

import rclpy
from action_msgs.msg import GoalStatus
from rclpy.clock import Clock, ClockType
from rclpy.executors import ExternalShutdownException
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.task import Future
from unique_identifier_msgs.msg import UUID

from edgellm_ros.action import Plan
from edgellm_ros.ros.client.action_services import ActionServices
from edgellm_ros.ros.client.plan_call import PlanCall, PlanError
from edgellm_ros.ros.executor import LeanExecutor

CHECK_S = 0.05  # period of looking for the server; rclpy reports no changes of the graph
# A server that has not discovered the client yet loses its first answer. The goal is sent again after this
# time, then after twice this time, and so on: with the same id, so that it is planned once.
RESEND_S = 0.25
GONE_S = 2.0  # time without a server after which plans under way fail


@dataclass(eq=False)
class _Sent:
    """A goal until its result."""

    call: PlanCall
    goal: Plan.Goal
    deadline: float  # of the answer to the goal
    wants_progress: bool
    id: UUID = field(default_factory=lambda: UUID(uuid=list(uuid.uuid4().bytes)))
    times: int = 0  # sent so often
    resend: float = 0.0  # at this time
    answers: list[Future] = field(default_factory=list)  # one for each time
    accepted: bool = False  # the server has the goal
    cancelled: bool = False


class ActionThread:
    """Spins a hidden node with the services of the action until `close`."""

    def __init__(self, node: Node | None, action_name: str, connect_timeout_s: float) -> None:
        self._owns_context = node is None
        self._connect_timeout_s = connect_timeout_s
        if node is None:
            self._context = rclpy.Context()
            rclpy.init(args=[], context=self._context)
        else:
            self._context = node.context
            action_name = node.resolve_topic_name(action_name)
        self._node = rclpy.create_node(
            f"_plan_client_{uuid.uuid4().hex[:8]}",
            context=self._context,
            use_global_arguments=False,  # they may rename every node of the process
            enable_rosout=False,
            start_parameter_services=False,
            # Its name, with the node's random name, could not be in a list of permissions (docs/security.md).
            parameter_overrides=[Parameter("start_type_description_service", value=False)],
        )
        self.action_name = action_name
        self._services = ActionServices(self._node, action_name, self._on_feedback)
        # In goals: the node whose absence tells that no client waits for the result.
        self.client_name: str = (node or self._node).get_fully_qualified_name()
        steady = Clock(clock_type=ClockType.STEADY_TIME)
        self._timer = self._node.create_timer(CHECK_S, self._check, clock=steady)
        self._timer.cancel()
        self._executor = LeanExecutor(context=self._context)
        self._executor.add_node(self._node)
        self._sent: dict[PlanCall, _Sent] = {}
        self._calls: dict[bytes, PlanCall] = {}  # by the id of the goal
        self._server_seen = 0.0
        self._lock = threading.Lock()  # of `_closed` and of additions to `_sent`
        self._closed = ""  # why; "" = open
        self._thread = threading.Thread(target=self._run, name="plan client", daemon=True)
        self._thread.start()

    # From any thread

    def send(self, goal: Plan.Goal, wants_progress: bool = True) -> PlanCall:
        """Send a goal as soon as there is a server.

        Without `wants_progress` the call may have no progress before its result.
        """
        call = PlanCall(self.action_name, self._request_cancel)
        with self._lock:
            self._check_open()
            deadline = time.monotonic() + self._connect_timeout_s
            sent = self._sent[call] = _Sent(call, goal, deadline, wants_progress)
            self._calls[bytes(sent.id.uuid)] = call
            self._executor.create_task(self._start)
        return call

    def close(self) -> None:
        """Fail all calls and end the thread."""
        with self._lock:
            if not self._closed:
                self._closed = "the client was closed"
                self._executor.create_task(lambda: None)  # ends `spin_once`
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _request_cancel(self, call: PlanCall) -> None:
        with self._lock:
            if not self._closed:
                self._executor.create_task(self._cancel, call)

    def _check_open(self) -> None:
        if self._closed:
            raise PlanError(f"{self.action_name}: {self._closed}")

    # On the thread

    def _run(self) -> None:
        reason = ""
        try:
            while not self._closed and self._context.ok():
                self._executor.spin_once()
        except ExternalShutdownException:
            pass
        except Exception as error:
            reason = f"the client failed: {error}"
            raise
        finally:
            with self._lock:
                self._closed = self._closed or reason or "ROS was shut down"
            for call in list(self._sent):
                self._fail(call, self._closed)
            self._executor.shutdown()
            self._node.destroy_node()
            if self._owns_context:
                rclpy.try_shutdown(context=self._context)

    def _start(self) -> None:
        self._timer.reset()
        self._choose_feedback()
        self._check()

    def _check(self) -> None:
        """Send goals that wait for the server, and fail those that lack it.

        A goal fails if the server does not come, or went away.
        """
        now = time.monotonic()
        ready = self._services.has_server
        if ready:
            self._server_seen = now
        for sent in list(self._sent.values()):
            if sent.accepted:
                if now - self._server_seen > GONE_S:
                    self._fail(sent.call, "the node went away before the result")
            elif now > sent.deadline:
                missing = "no answer to the goal" if sent.times else "no server of this action"
                limit = f"within {self._connect_timeout_s:g} s"
                self._fail(sent.call, f"{missing} {limit}; is the node running, in the same ROS domain?")
            elif ready and (sent.times == 0 or now > sent.resend):
                self._send(sent, now)
        if not self._sent:
            self._timer.cancel()

    def _send(self, sent: _Sent, now: float) -> None:
        sent.resend = now + RESEND_S * 2**sent.times
        sent.times += 1
        try:
            answer = self._services.send_goal(sent.id, sent.goal)
        except Exception as error:  # such as a prompt that is not Unicode
            self._fail(sent.call, f"the goal cannot be sent: {error}")
            return
        sent.answers.append(answer)
        answer.add_done_callback(partial(self._on_answer, sent))

    def _on_feedback(self, goal_id: bytes, feedback: Plan.Feedback) -> None:
        call = self._calls.get(goal_id)  # None: of another client
        if call is not None:
            call.on_feedback(feedback)

    def _on_answer(self, sent: _Sent, answer: Future) -> None:
        if sent.accepted or sent.call not in self._sent:
            return
        # A goal that was sent again is refused if the server has it: ask for the result to know.
        if not answer.result().accepted and sent.times == 1:
            self._fail(sent.call, "the goal was rejected")
            return
        sent.accepted = True
        if sent.cancelled:
            self._services.cancel_goal(sent.id)
        self._services.get_result(sent.id).add_done_callback(partial(self._on_result, sent.call))

    def _on_result(self, call: PlanCall, answer: Future) -> None:
        response = answer.result()
        if response.status == GoalStatus.STATUS_UNKNOWN:  # the server does not have the goal
            self._fail(call, "the goal was rejected")
            return
        try:
            call.end(response.result)
        except ValueError as error:
            self._fail(call, f"the result cannot be used: {error}")
        self._forget(call)

    def _cancel(self, call: PlanCall) -> None:
        sent = self._sent.get(call)
        if sent is None:
            return
        sent.cancelled = True
        if sent.accepted:
            self._services.cancel_goal(sent.id)
        elif sent.times == 0:
            self._forget(call)
            call.end(
                Plan.Result(termination_reason=Plan.Result.CANCELLED, message="cancelled before it was sent")
            )

    def _fail(self, call: PlanCall, reason: str) -> None:
        self._forget(call)
        call.fail(PlanError(f"{self.action_name}: {reason}"))

    def _forget(self, call: PlanCall) -> None:
        sent = self._sent.pop(call, None)
        if sent is not None:
            del self._calls[bytes(sent.id.uuid)]
            for answer in sent.answers:
                self._services.forget(answer)
            self._choose_feedback()

    def _choose_feedback(self) -> None:
        self._services.take_feedback(any(sent.wants_progress for sent in list(self._sent.values())))
