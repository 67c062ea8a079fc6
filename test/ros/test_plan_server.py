# SPDX-License-Identifier: Apache-2.0
"""The action server alone: how long it stores which results."""

from __future__ import annotations

import gc
import time
import weakref
from types import SimpleNamespace

import pytest
from action_msgs.msg import GoalStatus
from edgellm_ros.action import Plan
from edgellm_ros.msg import ActionChunk
from nav_msgs.msg import Path
from rclpy.action import ActionClient
from rclpy.executors import SingleThreadedExecutor
from rclpy.lifecycle import LifecycleNode
from sensor_msgs.msg import Image

from edgellm_ros.ros.node import plan_server
from edgellm_ros.ros.node.live_parameters import LiveParameters
from edgellm_ros.ros.node.metrics import NodeMetrics
from edgellm_ros.ros.node.parameters import SPECS
from edgellm_ros.ros.node.plan_server import PlanServer
from edgellm_ros.ros.node.worker import COMPLETED, Job, Outcome, PlanWorker


class Server:
    """A client, and a plan server whose plans have the goal's number of trajectories."""

    def __init__(self, peer, result_timeout: float) -> None:
        parameters = SimpleNamespace(service_depth=100, result_timeout=result_timeout)
        self.frames: list[weakref.ref] = []
        self._peer = peer
        self._node = LifecycleNode("planning", context=peer.node.context)
        self._executor = SingleThreadedExecutor(context=peer.node.context)
        self._executor.add_node(self._node)
        self._worker = PlanWorker(self._plan, queue_size=4)
        jobs = SimpleNamespace(from_goal=self._make_job)
        self._server = PlanServer(self._node, LiveParameters(parameters), self._worker, jobs, NodeMetrics())
        self._server.accepts = True
        self._client = ActionClient(peer.node, Plan, "/planning/plan")
        self._wait(self._client.server_is_ready)

    def plan(self, trajectories: int = 1):
        """Send a goal with an image, wait for its end, and return its handle."""
        goal = Plan.Goal(action_samples=trajectories, images=[Image(data=bytes(1000))])
        handle = self._done(self._client.send_goal_async(goal))
        self.result(handle)
        return handle

    def result(self, handle):
        """Ask for the result of a goal, now."""
        return self._done(handle.get_result_async())

    def spin(self, seconds: float) -> None:
        self._executor.spin_once(timeout_sec=seconds)

    def close(self) -> None:
        self._worker.close()
        self._client.destroy()
        self._server.destroy()
        self._executor.shutdown()
        self._node.destroy_node()

    def _make_job(self, goal, goal_id, on_progress, on_done) -> Job:
        self.frames.append(weakref.ref(goal.images[0].data))
        return Job((goal.action_samples, goal.images[0]), 30.0, on_done)

    def _plan(self, job: Job) -> Outcome:
        count = job.request[0]
        chunks, paths = [ActionChunk()] * count, [Path()] * count
        result = SimpleNamespace(generation=Plan.Result().generation, action_chunks=chunks, paths=paths)
        return Outcome(COMPLETED, "", result)

    def _done(self, future):
        self._wait(future.done)
        return future.result()

    def _wait(self, condition) -> None:
        self._peer.wait(lambda: self._executor.spin_once(timeout_sec=0.02) or condition(), "answer")


@pytest.fixture
def serve(peer):
    servers = []

    def start(result_timeout: float = 900.0) -> Server:
        servers.append(Server(peer, result_timeout))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def test_a_result_can_be_asked_for_again_until_the_timeout(serve, peer):
    server = serve(result_timeout=1.0)
    handle = server.plan()
    ended = time.monotonic()
    assert server.result(handle).result.termination_reason == COMPLETED

    def is_unknown() -> bool:
        server.spin(0.05)
        return server.result(handle).status == GoalStatus.STATUS_UNKNOWN

    peer.wait(is_unknown, "end of the result")
    assert 0.9 < time.monotonic() - ended < 8.0


def test_results_are_kept_for_900_s_by_default():
    assert SPECS["result_timeout"].default == 900.0  # rclpy's default in Jazzy


def test_the_images_of_a_goal_are_freed_when_it_ends(serve):
    server = serve()
    gc.disable()
    try:
        handle = server.plan()
        server.plan()
        assert [frame() is None for frame in server.frames] == [True, True]
    finally:
        gc.enable()
    assert server.result(handle).result.termination_reason == COMPLETED


def test_the_oldest_trajectories_are_dropped_when_too_many_are_kept(serve, monkeypatch):
    monkeypatch.setattr(plan_server, "MAX_KEPT_TRAJECTORIES", 5)
    server = serve()
    first, second, third = (server.plan(trajectories=2) for _ in range(3))
    counts = [len(server.result(handle).result.paths) for handle in (first, second, third)]
    assert counts == [0, 2, 2]
    result = server.result(first).result
    assert (result.termination_reason, len(result.action_chunks)) == (COMPLETED, 0)
    assert result.message == "the trajectories were dropped: too many newer results"
