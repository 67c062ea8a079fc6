# SPDX-License-Identifier: Apache-2.0
"""The executor of the node's process: few wait sets, nothing lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import rclpy
from rclpy.event_handler import PublisherEventCallbacks
from rclpy.qos import QoSProfile, ReliabilityPolicy
from std_msgs.msg import String

from edgellm_ros.ros.executor import EVENTS_PERIOD_S, LeanExecutor
from edgellm_ros.ros.messaging import spin_until

LONG_S = 20.0


class CountingExecutor(LeanExecutor):
    """Counts the wait sets, for each of which rclpy asks for the nodes."""

    wait_sets = 0

    def get_nodes(self) -> list[rclpy.node.Node]:
        self.wait_sets += 1
        return super().get_nodes()


@pytest.fixture
def node(domain):
    context = rclpy.Context()
    rclpy.init(context=context, domain_id=domain)
    node = rclpy.create_node("spun", context=context)
    yield node
    node.destroy_node()
    rclpy.shutdown(context=context)


@pytest.fixture
def executor(node):
    executor = CountingExecutor(context=node.context)
    executor.add_node(node)
    yield executor
    executor.shutdown()


def spin(executor: LeanExecutor, done: Callable[[], object]) -> None:
    assert spin_until(executor, done, LONG_S)


def test_one_wait_set_is_made_per_message_and_one_for_the_next_wait(node, executor):
    received: list[str] = []
    node.create_subscription(String, "words", lambda message: received.append(message.data), 10)
    publisher = node.create_publisher(String, "words", 10)
    spin(executor, publisher.get_subscription_count)
    executor.spin_once(timeout_sec=0.1)  # what was created is no longer new
    for index in range(3):
        publisher.publish(String(data=str(index)))
        executor.wait_sets = 0
        executor.spin_once(timeout_sec=LONG_S)
        assert (received[-1], executor.wait_sets) == (str(index), 1)
    executor.wait_sets = 0
    executor.spin_once(timeout_sec=0.1)
    assert executor.wait_sets == 1
    assert received == ["0", "1", "2"]


def test_another_thread_wakes_it(executor):
    ran: list[int] = []
    executor.spin_once(timeout_sec=0.1)
    thread = threading.Timer(0.2, lambda: executor.create_task(ran.append, 1))
    thread.start()
    executor.spin_once(timeout_sec=LONG_S)
    thread.join()
    assert ran == [1]


def test_what_a_callback_creates_is_waited_for(node, executor):
    ran: list[str] = []

    def create() -> None:
        first.cancel()
        executor.create_task(ran.append, "task")
        node.create_timer(0.01, lambda: ran.append("timer"))

    first = node.create_timer(0.01, create)
    spin(executor, lambda: len(ran) > 1)
    assert ran[:2] == ["task", "timer"]


def test_events_of_qos_arrive_while_messages_do(node, executor):
    events: list[object] = []
    callbacks = PublisherEventCallbacks(incompatible_qos=events.append)
    best_effort = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
    node.create_timer(0.01, lambda: None)
    executor.spin_once()  # looks at events; the next ones come in a second
    node.create_publisher(String, "words", best_effort, event_callbacks=callbacks)
    node.create_subscription(String, "words", lambda message: None, QoSProfile(depth=1))
    spin(executor, lambda: events)
    assert len(events) == 1


def test_events_of_qos_are_waited_for_while_many_callbacks_are_ready(node, executor, monkeypatch):
    now = 100.0
    monkeypatch.setattr("edgellm_ros.ros.executor.time", SimpleNamespace(monotonic=lambda: now))
    node.create_publisher(String, "words", 1)
    event = next(iter(node.waitables))
    timers = [node.create_timer(0.001, lambda: None) for _ in range(3)]
    time.sleep(0.05)
    executor.spin_once(timeout_sec=0.1)  # the first of them
    now += 1.1 * EVENTS_PERIOD_S
    executor.wait_sets = 0
    while not executor.wait_sets:
        executor.spin_once(timeout_sec=0.1)
    assert executor.can_execute(event)
    assert len(timers) == 3


def test_events_of_qos_are_waited_for_once_per_period(node, executor, monkeypatch):
    now = 100.0
    monkeypatch.setattr("edgellm_ros.ros.executor.time", SimpleNamespace(monotonic=lambda: now))
    node.create_publisher(String, "words", 1)
    event = next(iter(node.waitables))
    waits = []
    for periods in (0.0, 0.9, 1.1, 2.0):
        now = 100.0 + periods * EVENTS_PERIOD_S
        executor.spin_once(timeout_sec=0.0)
        waits.append(executor.can_execute(event))
    assert waits == [True, False, True, False]
