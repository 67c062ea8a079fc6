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
from edgellm_ros.msg import ActionChunk, SamplingParams
from nav_msgs.msg import Path
from rclpy.action import ActionClient
from rclpy.executors import SingleThreadedExecutor
from rclpy.lifecycle import LifecycleNode
from sensor_msgs.msg import Image

from edgellm_ros.ros.node import plan_server
from edgellm_ros.ros.node.metrics import NodeMetrics
from edgellm_ros.ros.node.plan_server import PlanServer
from edgellm_ros.ros.node.settings.live_parameters import LiveParameters
from edgellm_ros.ros.node.settings.parameters import SPECS
from edgellm_ros.ros.node.worker.clients import Clients
from edgellm_ros.ros.node.worker.job import COMPLETED, ERROR, Job, Outcome
from edgellm_ros.ros.node.worker.worker import PlanWorker
from fixtures.node_limits import limits


class Server:
    """A client, and a plan server whose plans have the goal's number of trajectories."""

    def __init__(self, peer, result_timeout: float, **changes: int) -> None:
        parameters = SimpleNamespace(
            service_depth=100, result_timeout=result_timeout, limits=limits(**changes)
        )
        self.frames: list[weakref.ref] = []
        self.has_paths = True  # chunks of a policy have none
        self._peer = peer
        self._node = LifecycleNode("planning", context=peer.node.context)
        self._executor = SingleThreadedExecutor(context=peer.node.context)
        self._executor.add_node(self._node)
        self._worker = PlanWorker(self._plan, queue_size=4)
        jobs = SimpleNamespace(from_goal=self._make_job)
        self._metrics = NodeMetrics()
        self._server = PlanServer(self._node, LiveParameters(parameters))
        self._server.open(self._worker, jobs, self._metrics, Clients(self._node, self._worker))
        self._server.accepts = True
        self._client = ActionClient(peer.node, Plan, "/planning/plan")
        self._wait(self._client.server_is_ready)

    def plan(self, trajectories: int = 1):
        """Send a goal with an image, wait for its end, and return its handle."""
        handle = self.send(Plan.Goal(action_samples=trajectories, images=[Image(data=bytes(1000))]))
        self.result(handle)
        return handle

    def send(self, goal: Plan.Goal):
        """Send a goal and return its handle."""
        return self._done(self._client.send_goal_async(goal))

    def result(self, handle):
        """Ask for the result of a goal, now."""
        return self._done(handle.get_result_async())

    @property
    def stored(self) -> list:
        """The goals that the action server stores."""
        return list(self._server._server._goal_handles.values())

    @property
    def rejected(self) -> float:
        return self._metrics.values()["goals_rejected"]

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
        chunks, paths = [ActionChunk()] * count, [Path()] * count * self.has_paths
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

    def start(result_timeout: float = 900.0, **changes: int) -> Server:
        servers.append(Server(peer, result_timeout, **changes))
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


@pytest.mark.parametrize("has_paths", [True, False])
def test_the_oldest_trajectories_are_dropped_when_too_many_are_kept(serve, monkeypatch, has_paths):
    monkeypatch.setattr(plan_server, "MAX_KEPT_TRAJECTORIES", 5)
    server = serve()
    server.has_paths = has_paths
    first, second, third = (server.plan(trajectories=2) for _ in range(3))
    counts = [len(server.result(handle).result.action_chunks) for handle in (first, second, third)]
    assert counts == [0, 2, 2]
    result = server.result(first).result
    assert (result.termination_reason, len(result.paths)) == (COMPLETED, 0)
    assert result.message == "the trajectories were dropped: too many newer results"


def test_a_goal_beyond_a_limit_ends_with_value_limit_and_parameter(serve):
    server = serve(message_bytes=1000)
    handle = server.send(Plan.Goal(images=[Image(data=bytes(1001))]))
    result = server.result(handle).result
    assert result.termination_reason == ERROR
    assert result.message == (
        "the goal has 1001 bytes of data, at most 1000 are taken (parameter limits.message_bytes)"
    )
    assert server.result(server.plan()).result.termination_reason == COMPLETED


def test_nothing_of_a_goal_is_stored_when_it_ends(serve):
    server = serve(text_length=10)
    prompt = "a word " * 100
    server.result(server.send(Plan.Goal(prompt=prompt, sampling=SamplingParams(regex=prompt))))
    (handle,) = server.stored
    assert handle.request == Plan.Goal()


def test_a_goal_is_rejected_while_too_many_results_are_stored(serve, peer):
    server = serve(result_timeout=2.0, goals=2)
    server.plan()
    server.plan()
    assert not server.send(Plan.Goal(images=[Image(data=bytes(10))])).accepted
    assert server.rejected == 1

    def is_accepted() -> bool:
        server.spin(0.05)
        return server.send(Plan.Goal(images=[Image(data=bytes(10))])).accepted

    peer.wait(is_accepted, "end of the results")
