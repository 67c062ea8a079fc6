# SPDX-License-Identifier: Apache-2.0
"""Continues the node's last published action chunk, by the parameter `chunking`.

docs/real_time_chunking.md describes when a plan continues a chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from rclpy.node import Node

from edgellm_ros.diffusion.action_head import HeadConfig
from edgellm_ros.diffusion.chunking import ChunkCondition
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.msg import ActionChunk
from edgellm_ros.ros.messaging import NANOSECONDS
from edgellm_ros.ros.node.metrics import NodeMetrics
from edgellm_ros.ros.node.plan import Motion
from edgellm_ros.ros.node.settings.live_parameters import LiveParameters
from edgellm_ros.ros.parameter_table import OFF

LATENCIES = 10  # of the last chunks, whose longest is the expected one
# The default horizon in delays: the influence fades while as much time passes again, or a quarter of it after
# actions that the checkpoint has learned to continue, which needs no help to go on from them.
DELAYS_OF_INFLUENCE = {"guided": 2.0, "frozen": 2.0, "trained": 1.25}
SAME_ROW = 1e-3  # rows that stamps may be off by rounding
LOG_THROTTLE_S = 1.0


def chunking_problem(chunking: str, config: EngineConfig) -> str:
    """Return why an engine cannot plan with a value of `chunking`; empty if it can."""
    if chunking != OFF and config.action is not None and not config.action.has_flow:
        kind = config.action.kind
        return (
            f"chunking must be off: the actions of this engine ({kind}) come from no flow, got {chunking!r}"
        )
    if chunking != "trained" or config.action is None or config.action.rtc_max_delay:
        return ""
    return (
        "chunking must be off, guided or frozen: the checkpoint was not trained to continue chunks "
        "(rtc_max_delay in its action_expert/config.json), got 'trained'"
    )


@dataclass(frozen=True, eq=False)
class _Published:
    motion: Motion
    actions: np.ndarray  # [T, A]


class Chunking:
    """The last published chunk, and the latencies of the last chunks.

    Plans begin and end on several threads: `publishing` is called by one at a time, `clear` while no plan
    runs, the rest on any thread.
    """

    def __init__(
        self, node: Node, parameters: LiveParameters, action: HeadConfig | None, metrics: NodeMetrics
    ) -> None:
        self._parameters = parameters
        self._action = action
        self._metrics = metrics
        self._clock = node.get_clock()
        self._logger = node.get_logger()
        self._last: _Published | None = None
        self._latencies: tuple[float, ...] = ()

    @property
    def delay(self) -> int:
        """Actions expected to be executed until a new chunk arrives; 0 if unknown."""
        longest = max(self._latencies, default=None)
        if self._action is None or longest is None:
            return 0
        return math.ceil(longest / self._action.action_space.dt - SAME_ROW)

    def clear(self) -> None:
        """Forget the chunk and the latencies."""
        self._last = None
        self._latencies = ()

    def publishing(self, chunk: ActionChunk, motion: Motion) -> None:
        """Remember a chunk that is about to be published.

        A latency that is negative or longer than the chunk comes from a clock that jumped, or leaves nothing
        to continue: then everything is forgotten.
        """
        if motion.stamp is None:
            self._last = None
            return
        latency = (self._clock.now().nanoseconds - motion.stamp) / NANOSECONDS
        if not 0 <= latency <= chunk.dt * chunk.horizon:
            self.clear()
            return
        self._latencies = (*self._latencies, latency)[-LATENCIES:]
        values = np.array(chunk.values, np.float32).reshape(chunk.horizon, len(chunk.names))
        self._last = _Published(motion, values)

    def condition(self, motion: Motion) -> ChunkCondition | None:
        """Return the condition of a plan by the parameters; None if it continues no chunk."""
        form = self._parameters.current.chunking
        if form == OFF or self._action is None:
            return None
        try:
            condition = self._continue(motion, form, self._action)
        except ValueError as reason:
            self._metrics.count("chunks_not_continued")
            self._logger.info(f"continues no chunk: {reason}", throttle_duration_sec=LOG_THROTTLE_S)
            return None
        self._metrics.count("chunks_continued")
        return condition

    def _continue(self, motion: Motion, form: str, action: HeadConfig) -> ChunkCondition:
        """Return a plan's condition; ValueError with the reason if it continues no chunk."""
        last = self._last
        if last is None:
            raise ValueError("there is no chunk to continue")
        if motion.instruction != last.motion.instruction:
            raise ValueError("the instruction is another one")
        if motion.lora != last.motion.lora:
            raise ValueError("the adapter is another one")
        if motion.stamp is None or last.motion.stamp is None:
            raise ValueError("the frame has no stamp")
        space = action.action_space
        rows = (motion.stamp - last.motion.stamp) / NANOSECONDS / space.dt
        if rows < 0:
            raise ValueError(f"the frame is {-rows * space.dt:.2f} s older than that of the last chunk")
        executed = math.floor(rows + SAME_ROW)
        if executed >= space.horizon:
            raise ValueError(f"the last chunk is {rows * space.dt:.2f} s old, and nothing is left of it")
        delay, left = self.delay, space.horizon - executed
        horizon = self._parameters.current.chunking_horizon or math.ceil(DELAYS_OF_INFLUENCE[form] * delay)
        actions = shifted(last.actions, max(rows - executed, 0.0))
        condition = ChunkCondition(
            actions=actions,
            executed=executed,
            delay=delay,
            form=form,
            horizon=min(max(horizon, delay, 1), left),
        )
        condition.check(action)
        return condition


def shifted(actions: np.ndarray, share: float) -> np.ndarray:
    """Shift actions [T, A] by `share` (0..1) of a row: means over the new rows' times."""
    if share <= SAME_ROW:
        return actions
    following = np.concatenate([actions[1:], actions[-1:]])
    return (1 - share) * actions + share * following
