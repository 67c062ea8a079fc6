# SPDX-License-Identifier: Apache-2.0
"""One goal of ~/plan as its caller sees it: progress, result, cancelling."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent import futures
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from nav_msgs.msg import Path

from edgellm_ros.action import Plan
from edgellm_ros.msg import ActionChunk
from edgellm_ros.runtime.request import ToolCall

T = TypeVar("T")


@dataclass(frozen=True)
class Progress:
    """Progress of a plan."""

    text: str  # the answer so far
    new_text: str  # its part since the previous progress
    tokens: int  # of the answer so far
    # a constant of Plan.Feedback: "queued", "grammar", "vision", "audio", "prefill", "decode" or "action"
    stage: str


@dataclass(frozen=True, eq=False)
class PlanResult:
    """The end of a plan."""

    text: str  # the answer, with its tool calls
    actions: np.ndarray | None  # [n, T, A] float32 in physical units; None if the answer is words only
    paths: np.ndarray | None  # [n, T+1, 3]: x, y (m), heading (rad) in the robot's frame at the input's time
    termination_reason: str  # a constant of Plan.Result: "completed", "cancelled", ...
    message: str  # why it did not complete; "" if it did
    reply: Plan.Result  # everything: stamps, latencies, token counts, names and units of the actions
    tool_calls: tuple[ToolCall, ...] = ()  # functions that the answer calls
    content: str = ""  # the answer without the calls

    @classmethod
    def from_reply(cls, reply: Plan.Result) -> PlanResult:
        """Convert the action's result."""
        actions = [_actions(chunk) for chunk in reply.action_chunks]
        paths = [_poses(path) for path in reply.paths]
        return cls(
            text=reply.generation.text,
            actions=np.stack(actions) if actions else None,
            paths=np.stack(paths) if paths else None,
            termination_reason=reply.termination_reason,
            message=reply.message,
            reply=reply,
            tool_calls=tuple(
                ToolCall(call.name, json.loads(call.arguments)) for call in reply.generation.tool_calls
            ),
            content=reply.generation.content,
        )


class PlanError(RuntimeError):
    """A plan that did not complete.

    `result` has the words so far if the node answered; else it is None.
    """

    def __init__(self, message: str, result: PlanResult | None = None) -> None:
        super().__init__(message)
        self.result = result


class PlanCall:
    """A goal under way; `PlanClient.stream` makes it.

        with client.stream("go to the red box") as call:
            for progress in call:
                print(progress.new_text, end="", flush=True)
            result = call.result()

    In asyncio: `async for progress in call` and `await call`. Every method may be called from any thread.
    Only one loop may iterate: each progress is given once. Leaving the context cancels a plan under way.
    """

    def __init__(self, action_name: str, request_cancel: Callable[[PlanCall], None]) -> None:
        self.action_name = action_name
        self._request_cancel = request_cancel
        self._done: futures.Future[PlanResult] = futures.Future()
        # Each future has a progress and the future after it; None ends the plan.
        self._next: futures.Future[Any] = futures.Future()
        self._last = self._next
        self._text = ""
        self._stage = Plan.Feedback.QUEUED

    def done(self) -> bool:
        """Return whether the plan has ended."""
        return self._done.done()

    def cancel(self) -> None:
        """Request that the node ends the plan at the next token or Euler step.

        Does not wait for it. The result is then `cancelled` and has the words so far.
        """
        if not self.done():
            self._request_cancel(self)

    def result(self, timeout_s: float | None = None) -> PlanResult:
        """Wait for the end of the plan; None waits as long as the node is there.

        PlanError for a plan that neither completed nor was cancelled; TimeoutError after `timeout_s`, and the
        plan goes on.
        """
        try:
            return self._done.result(timeout_s)
        except futures.TimeoutError:
            raise TimeoutError(f"no result of {self.action_name} within {timeout_s:g} s") from None

    def __iter__(self) -> Iterator[Progress]:
        while (item := self._next.result()) is not None:
            progress, self._next = item
            yield progress
        self._done.result()

    async def __aiter__(self) -> AsyncIterator[Progress]:
        while (item := await _result_of(self._next)) is not None:
            progress, self._next = item
            yield progress
        self._done.result()

    def __await__(self) -> Generator[Any, None, PlanResult]:
        return _result_of(self._done).__await__()

    def __enter__(self) -> PlanCall:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    # On the client's thread

    def on_feedback(self, feedback: Plan.Feedback) -> None:
        """Give one progress to the loop that iterates; without effect after the end."""
        if not self.done():
            self._advance(feedback.text, feedback.tokens, feedback.stage)

    def end(self, reply: Plan.Result) -> None:
        """Give the result; without effect after the end.

        ValueError for actions or paths that are not arrays.
        """
        if self.done():
            return
        result = PlanResult.from_reply(reply)
        if result.text != self._text:  # the last of the feedback arrives after the result, or is lost
            self._advance(result.text, reply.generation.token_count, self._stage)
        if result.termination_reason in (Plan.Result.COMPLETED, Plan.Result.CANCELLED):
            self._done.set_result(result)
            self._last.set_result(None)
        else:
            self.fail(PlanError(f"{self.action_name}: {result.termination_reason}: {result.message}", result))

    def fail(self, error: PlanError) -> None:
        """End the plan with an error; without effect after the end."""
        if not self.done():
            self._done.set_exception(error)
            self._last.set_result(None)

    def _advance(self, text: str, tokens: int, stage: str) -> None:
        progress = Progress(text, text[len(self._text) :], tokens, stage)
        self._text, self._stage = text, stage
        last, self._last = self._last, futures.Future()
        last.set_result((progress, self._last))


async def _result_of(future: futures.Future[T]) -> T:
    """Wait for a result of another thread.

    `asyncio.wrap_future` would cancel the future together with the task that waits.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError("no asyncio loop runs here; a callback of rclpy waits with `plan`") from None
    woken = asyncio.Event()

    def wake(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(woken.set)

    future.add_done_callback(wake)
    await woken.wait()
    return future.result()


def _actions(chunk: ActionChunk) -> np.ndarray:
    return np.asarray(chunk.values, np.float32).reshape(chunk.horizon, len(chunk.names))


def _poses(path: Path) -> np.ndarray:
    poses = [pose.pose for pose in path.poses]
    return np.array(
        [(p.position.x, p.position.y, 2 * math.atan2(p.orientation.z, p.orientation.w)) for p in poses]
    )
