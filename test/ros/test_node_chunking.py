# SPDX-License-Identifier: Apache-2.0
"""How the node continues its last published chunk.

The tests are about the place of the chunk's rows, the delay, and when the node does not continue.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from edgellm_ros.msg import ActionChunk

from edgellm_ros.diffusion.config import ActionSpaceConfig
from edgellm_ros.ros.node.metrics import NodeMetrics
from edgellm_ros.ros.node.plan import Motion
from edgellm_ros.ros.node.planning.chunking import LATENCIES, Chunking, chunking_problem, shifted

SECOND, START = 10**9, 100 * 10**9
ROWS = np.arange(80, dtype=np.float32).reshape(40, 2) / 100
SPACE = ActionSpaceConfig(
    type="unicycle",
    names=("acceleration", "curvature"),
    units=("m/s^2", "1/m"),
    dt=0.1,
    horizon=40,
    mean=(0.0, 0.0),
    std=(1.0, 1.0),
    low=(-1.5, -2.5),
    high=(1.0, 2.5),
)
GO = Motion("go", "", START)


class Node:
    """A node's clock and log, with a Chunking of the parameters given."""

    def __init__(self, chunking: str = "guided", chunking_horizon: int = 0, rtc_max_delay: int = 0) -> None:
        self.now, self.said = START, []
        self.metrics = NodeMetrics()
        parameters = SimpleNamespace(chunking=chunking, chunking_horizon=chunking_horizon)
        action = SimpleNamespace(action_space=SPACE, rtc_max_delay=rtc_max_delay, has_flow=True)
        self.chunking = Chunking(self, SimpleNamespace(current=parameters), action, self.metrics)

    def get_clock(self):
        return SimpleNamespace(now=lambda: SimpleNamespace(nanoseconds=self.now))

    def get_logger(self):
        return SimpleNamespace(info=lambda text, **throttle: self.said.append(text))

    def publish(self, motion: Motion = GO, latency: float = 0.23) -> None:
        """Publish ROWS so many seconds after the stamp of the frame."""
        self.now = (motion.stamp or START) + round(latency * SECOND)
        chunk = ActionChunk(dt=0.1, horizon=40, names=list(SPACE.names), values=ROWS.ravel().tolist())
        self.chunking.publishing(chunk, motion)

    def next(self, seconds: float = 0.5, **changes):
        """Return the condition of a plan whose frame is so many seconds after GO's."""
        stamp = START + round(seconds * SECOND)
        return self.chunking.condition(dataclasses.replace(GO, **{"stamp": stamp, **changes}))


def test_the_last_chunk_is_continued_from_the_row_at_the_new_stamp():
    node = Node()
    node.publish()
    condition = node.next(0.5)
    assert (condition.form, condition.executed, condition.delay) == ("guided", 5, 3)
    np.testing.assert_array_equal(condition.actions, ROWS)
    assert node.metrics.values()["chunks_continued"] == 1


def test_between_two_rows_actions_are_their_means_over_the_new_rows_times():
    node = Node()
    node.publish()
    condition = node.next(0.53)
    assert condition.executed == 5
    expected = 0.7 * ROWS[5:-1] + 0.3 * ROWS[6:]
    np.testing.assert_allclose(condition.actions[5:-1], expected, atol=1e-6)
    np.testing.assert_allclose(shifted(ROWS, 0.3)[-1], ROWS[-1], atol=1e-6)


def test_the_delay_is_the_longest_of_the_recent_latencies_in_rows():
    node = Node()
    for latency in (0.23, 0.41, 0.05):
        node.publish(latency=latency)
    assert node.next().delay == 5
    for _ in range(LATENCIES):
        node.publish(latency=0.3)
    assert node.next().delay == 3


def test_the_horizon_is_that_of_the_parameter_within_what_is_left():
    for horizon, expected in ((0, 6), (1, 3), (10, 10), (100, 35)):  # the delay is 3 rows, 35 are left
        node = Node(chunking_horizon=horizon)
        node.publish()
        assert node.next(0.5).horizon == expected


def test_after_trained_actions_the_influence_fades_in_a_quarter_of_the_delay():
    for horizon, expected in ((0, 10), (1, 8), (12, 12)):  # the delay is 8 rows
        node = Node("trained", horizon, rtc_max_delay=16)
        node.publish(latency=0.8)
        assert node.next(0.8).horizon == expected


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ({"instruction": "stop"}, "the instruction is another one"),
        ({"lora": "cautious"}, "the adapter is another one"),
        ({"stamp": None}, "the frame has no stamp"),
        ({"seconds": -0.25}, "the frame is 0.25 s older than that of the last chunk"),
        ({"seconds": 4.0}, "the last chunk is 4.00 s old, and nothing is left of it"),
        ({"seconds": 3.8}, "delay must be at most 2, the actions that are left"),
    ],
)
def test_a_plan_that_cannot_continue_starts_over_and_the_log_says_why(plan, reason):
    node = Node()
    node.publish()
    assert node.next(**plan) is None
    (said,) = node.said
    assert said.startswith(f"continues no chunk: {reason}")
    assert node.metrics.values()["chunks_not_continued"] == 1


def test_nothing_is_continued_before_the_first_chunk_and_after_clear():
    node = Node()
    assert node.next() is None
    node.publish()
    node.chunking.clear()
    assert node.next() is None
    assert node.said == ["continues no chunk: there is no chunk to continue"] * 2
    assert node.chunking.delay == 0


@pytest.mark.parametrize("latency", [-5.0, 4.5])
def test_a_latency_that_a_jump_of_the_clock_explains_forgets_everything(latency):
    node = Node()
    node.publish()
    node.publish(latency=latency)
    assert node.next() is None
    node.publish()
    assert node.next().delay == 3


def test_a_chunk_without_a_stamp_is_not_continued():
    node = Node()
    node.publish()
    node.publish(dataclasses.replace(GO, stamp=None))
    assert node.next() is None


def test_a_delay_longer_than_the_checkpoint_was_trained_for_starts_over():
    node = Node("trained", rtc_max_delay=4)
    node.publish(latency=0.4)
    assert node.next().form == "trained"
    node.publish(latency=0.45)
    assert node.next() is None
    assert "delay must be at most 4, for which the checkpoint was trained" in node.said[0]


def test_off_neither_continues_nor_counts():
    node = Node("off")
    node.publish()
    assert node.next() is None
    assert not node.said
    counters = node.metrics.values()
    assert counters["chunks_continued"] == counters["chunks_not_continued"] == 0


def test_trained_chunks_need_a_checkpoint_that_was_trained_for_them():
    untrained = SimpleNamespace(action=SimpleNamespace(rtc_max_delay=0, has_flow=True))
    trained = SimpleNamespace(action=SimpleNamespace(rtc_max_delay=3, has_flow=True))
    assert "chunking must be off, guided or frozen" in chunking_problem("trained", untrained)
    assert not chunking_problem("guided", untrained)
    assert not chunking_problem("trained", trained)
    assert not chunking_problem("trained", SimpleNamespace(action=None))
