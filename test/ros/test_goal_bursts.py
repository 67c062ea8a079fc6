# SPDX-License-Identifier: Apache-2.0
"""Goals from many clients at once."""

from __future__ import annotations

import pytest
from edgellm_ros.action import Plan
from rclpy.action import ActionClient

from edgellm_ros.ros.messaging import action_services_qos

CLIENTS = 20
WAVES = 4


@pytest.fixture(scope="module")
def node(start_node, peer, arena_engine):
    child = start_node(
        engine_dir=arena_engine, autostart="true", queue_size=CLIENTS, plan_timeout=60.0, max_input_age=600.0
    )
    peer.connect()
    return child


def test_every_client_of_a_burst_gets_its_result(node, peer, sight):
    qos = action_services_qos()
    clients = [ActionClient(peer.node, Plan, "/edgellm/plan", **qos) for _ in range(CLIENTS)]
    peer.wait(lambda: all(client.server_is_ready() for client in clients), "action server")
    peer.frame(sight.pixels)
    peer.wait(lambda: peer.metrics()["frames_received"], "frame")
    goal = Plan.Goal(prompt=sight.command, action_samples=0)
    goal.sampling.max_tokens = 1
    for _ in range(WAVES):
        sent = [client.send_goal_async(goal) for client in clients]
        peer.wait(lambda sent=sent: all(future.done() for future in sent), "answers to all goals")
        results = [future.result().get_result_async() for future in sent]
        peer.wait(lambda results=results: all(future.done() for future in results), "all results")
        reasons = [future.result().result.termination_reason for future in results]
        assert reasons == [Plan.Result.COMPLETED] * CLIENTS
    for client in clients:
        client.destroy()
