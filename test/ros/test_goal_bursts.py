# SPDX-License-Identifier: Apache-2.0
"""Goals from many clients at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from edgellm_ros.action import Plan
from rclpy.action import ActionClient

from edgellm_ros.ros.messaging import action_services_qos

CLIENTS = 20
WAVES = 4
RETRY_S = 3.0


@pytest.fixture(scope="module")
def node(start_node, peer, arena_engine):
    child = start_node(
        engine_dir=arena_engine, autostart="true", queue_size=CLIENTS, plan_timeout=60.0, max_input_age=600.0
    )
    peer.connect()
    return child


@pytest.fixture
def clients(node, peer):
    """Clients with the documented depth, one for each goal of a wave."""
    made = [ActionClient(peer.node, Plan, "/edgellm/plan", **action_services_qos()) for _ in range(CLIENTS)]
    peer.wait(lambda: all(client.server_is_ready() for client in made), "action server")
    yield made
    for client in made:
        client.destroy()


def ask_until_answered(peer, questions: list[Callable[[], Any]]) -> list[Any]:
    """Repeat each request until its answer arrives.

    Answers to a client that is not yet discovered are lost.
    """
    futures = [ask() for ask in questions]

    def retry() -> bool:
        if time.monotonic() > asked + RETRY_S:
            futures[:] = [f if f.done() else ask() for f, ask in zip(futures, questions, strict=True)]
            return True
        return all(future.done() for future in futures)

    while not all(future.done() for future in futures):
        asked = time.monotonic()
        peer.wait(retry, "answers")
    return [future.result() for future in futures]


def test_every_client_of_a_burst_gets_its_result(peer, clients, scene):
    peer.frame(scene.pixels)
    peer.wait(lambda: peer.metrics()["frames_received"], "frame")
    goal = Plan.Goal(prompt=scene.command, action_samples=0)
    goal.sampling.max_tokens = 1
    handles = ask_until_answered(peer, [lambda c=client: c.send_goal_async(goal) for client in clients])
    ask_until_answered(peer, [handle.get_result_async for handle in handles])
    for _ in range(WAVES):
        sent = [client.send_goal_async(goal) for client in clients]
        peer.wait(lambda sent=sent: all(future.done() for future in sent), "answers to all goals")
        results = [future.result().get_result_async() for future in sent]
        peer.wait(lambda results=results: all(future.done() for future in results), "all results")
        reasons = [future.result().result.termination_reason for future in results]
        assert reasons == [Plan.Result.COMPLETED] * CLIENTS
