# SPDX-License-Identifier: Apache-2.0
"""Sends goals to the action ~/plan, from any thread, callback or asyncio task."""

from __future__ import annotations

import weakref
from typing import Any

from rclpy.node import Node

from edgellm_ros.ros.client.action_thread import ActionThread
from edgellm_ros.ros.client.goal import make_goal
from edgellm_ros.ros.client.plan_call import PlanCall, PlanResult


class PlanClient:
    """Sends goals to ~/plan of the node `name`.

        with PlanClient() as client:
            result = client.plan("go to the red box", images=frame, action_samples=4, noise_seed=1)

    A thread of the client's own receives the answers, with a hidden node, in the ROS context of `node` or, if
    that is None, in one of its own. So no call depends on the caller's executor: calls may block in any
    thread and in any callback, also in one of a SingleThreadedExecutor. Coroutines of rclpy call `plan` too:
    only asyncio waits for `plan_async`.

    Arguments of `plan`, `plan_async` and `stream` have the names of the fields of Plan.Goal and of
    SamplingParams: `images` (RGB uint8 arrays [H, W, 3], files or messages; one or several), `audio` (one
    sound: (samples, Hz), a file, AudioChunks), `earlier_messages` ((role, text) or (role, text, images)),
    `previous_chunk` (fields of PreviousChunk by name; as `chunk` the result of a plan), `temperature`,
    `max_tokens`, ... None means the field's default, for `client` the full name of `node`, or of the hidden
    node. TypeError names an argument that does not exist.
    """

    def __init__(
        self, node: Node | None = None, name: str = "/edgellm", connect_timeout_s: float = 10.0
    ) -> None:
        self._thread = ActionThread(node, f"{name}/plan", connect_timeout_s)
        # also at the end of the interpreter, which a running thread of rclpy would abort
        self._close = weakref.finalize(self, self._thread.close)

    @property
    def name(self) -> str:
        """The name of this client in its goals: the full name of its node."""
        return self._thread.client_name

    def plan(self, prompt: str = "", *, timeout_s: float | None = None, **arguments: Any) -> PlanResult:
        """Send a goal and wait for its result.

        PlanError, in one line, if there is no node within `connect_timeout_s`, if it disappears, or if the
        plan neither completes nor is cancelled. TimeoutError after `timeout_s`; the goal is then cancelled.
        """
        with self._send(prompt, wants_progress=False, **arguments) as call:
            return call.result(timeout_s)

    async def plan_async(self, prompt: str = "", **arguments: Any) -> PlanResult:
        """Send a goal and await its result (asyncio); a cancelled task cancels the goal."""
        with self._send(prompt, wants_progress=False, **arguments) as call:
            return await call

    def stream(self, prompt: str = "", **arguments: Any) -> PlanCall:
        """Send a goal and return at once.

        The returned call is to iterate over the goal's progress, cancel it and wait for its result.
        """
        return self._send(prompt, wants_progress=True, **arguments)

    def _send(self, prompt: str, wants_progress: bool, **arguments: Any) -> PlanCall:
        if arguments.get("client") is None:
            arguments["client"] = self.name
        return self._thread.send(make_goal(prompt, **arguments), wants_progress)

    def close(self) -> None:
        """Stop the thread; plans under way end with PlanError, and go on in the node."""
        self._close()

    def __enter__(self) -> PlanClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
