# SPDX-License-Identifier: Apache-2.0
"""The edgellm node in a process of its own, and an action client for it in this one."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import rclpy
from edgellm_ros.action import Plan
from lifecycle_msgs.srv import GetState
from rclpy.action import ActionClient
from rclpy.executors import SingleThreadedExecutor
from sensor_msgs.msg import Image

from edgellm_ros.ros.arena_link import to_image
from edgellm_ros.ros.demo import NODE_MODULE
from edgellm_ros.ros.processes import Child, own_domain, ros_environment

START_S = 60.0
PLAN_S = 30.0


class NodeProcess:
    """Context manager. The node plans on goals only: nothing is published on its topics."""

    def __init__(self, engine_dir: Path) -> None:
        self._engine_dir = engine_dir
        self._stack = ExitStack()

    def __enter__(self) -> NodeProcess:
        with ExitStack() as stack:
            environment = ros_environment(stack.enter_context(own_domain()))
            log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "node.log"
            arguments = ["-m", NODE_MODULE, "--ros-args", "-p", f"engine_dir:={self._engine_dir.resolve()}"]
            self.child = Child("edgellm node", [*arguments, "-p", "autostart:=true"], log, environment)
            stack.callback(self.child.stop)
            os.environ.update(
                {name: environment[name] for name in ("ROS_DOMAIN_ID", "ROS_AUTOMATIC_DISCOVERY_RANGE")}
            )
            rclpy.init()
            stack.callback(rclpy.try_shutdown)
            self._node = rclpy.create_node("benchmark")
            stack.callback(self._node.destroy_node)
            self._executor = SingleThreadedExecutor()
            self._executor.add_node(self._node)
            stack.callback(self._executor.shutdown)
            self._client = ActionClient(self._node, Plan, "edgellm/plan")
            self._wait_until_active()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def plan(self, goal: Plan.Goal) -> Any:
        """Send a goal and wait for its result; RuntimeError if it is not completed."""
        handle = self._wait_for(self._client.send_goal_async(goal), PLAN_S)
        if not handle.accepted:
            raise RuntimeError("the node rejected the goal")
        result = self._wait_for(handle.get_result_async(), PLAN_S).result
        if result.termination_reason != Plan.Result.COMPLETED:
            raise RuntimeError(f"the plan ended with {result.termination_reason}: {result.message}")
        return result

    def resident_bytes(self) -> int:
        """Physical memory of the node's process."""
        for line in Path(f"/proc/{self.child.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError("no VmRSS: this benchmark needs Linux")

    def _wait_until_active(self) -> None:
        deadline = time.monotonic() + START_S
        client = self._node.create_client(GetState, "edgellm/get_state")
        while time.monotonic() < deadline:
            if client.wait_for_service(timeout_sec=0.2):
                state = self._wait_for(client.call_async(GetState.Request()), 5.0).current_state.label
                if state == "active" and self._client.wait_for_server(timeout_sec=0.2):
                    self._node.destroy_client(client)
                    return
            time.sleep(0.1)
        raise RuntimeError(f"the node is not active after {START_S:.0f} s:\n{self.child.log_tail()}")

    def _wait_for(self, future: Any, timeout_s: float) -> Any:
        # Not spin_until_future_complete: each of its turns leaves a callback behind that costs the next call
        # a turn, so that a client gets slower with every goal.
        deadline = time.monotonic() + timeout_s
        while not future.done():
            left = deadline - time.monotonic()
            if left <= 0:
                raise RuntimeError(
                    f"no answer from the node within {timeout_s:.0f} s:\n{self.child.log_tail()}"
                )
            self._executor.spin_once(timeout_sec=left)
        return future.result()


def goal_of(prompt: str, frame: np.ndarray) -> Plan.Goal:
    """One camera frame [H, W, 3] RGB, one command, one trajectory, noise seed 0."""
    image: Image = to_image(0, frame)
    return Plan.Goal(prompt=prompt, images=[image], action_samples=1, noise_seed=0)
