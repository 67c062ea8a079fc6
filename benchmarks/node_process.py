# SPDX-License-Identifier: Apache-2.0
"""The edgellm node in its own process, and a ROS node with an action client here."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
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

from benchmarks import watched_node
from benchmarks.memory import Memory
from edgellm_arena.ros.arena_link import to_image
from edgellm_ros.ros.messaging import action_services_qos, spin_until
from edgellm_ros.ros.processes import NODE_MODULE, Child, own_domain, ros_arguments, ros_environment

START_S = 60.0
PLAN_S = 30.0


class NodeProcess:
    """Context manager that runs an active edgellm node.

    `parameters`: changes to the node's defaults. `watched`: the node also reports its allocated memory, and
    Python takes all memory from malloc. The attribute `node` is this process's ROS node.
    """

    def __init__(
        self, engine_dir: Path, watched: bool = False, **parameters: str | int | float | bool
    ) -> None:
        self._watched = watched
        self._parameters = {"engine_dir": str(engine_dir.resolve()), "autostart": True, **parameters}
        self._client: ActionClient | None = None  # reads the statuses of all goals, so it is made when needed
        self._stack = ExitStack()

    def __enter__(self) -> NodeProcess:
        with ExitStack() as stack:
            environment = ros_environment(stack.enter_context(own_domain()))
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            log, module = folder / "node.log", NODE_MODULE
            if self._watched:
                module, self._socket = watched_node.__name__, str(folder / "memory")
                environment |= {watched_node.SOCKET: self._socket, **watched_node.ENVIRONMENT}
            arguments = ["-m", module, *ros_arguments(self._parameters)]
            self.child = Child("edgellm node", arguments, log, environment)
            stack.callback(self.child.stop)
            os.environ.update(
                {name: environment[name] for name in ("ROS_DOMAIN_ID", "ROS_AUTOMATIC_DISCOVERY_RANGE")}
            )
            rclpy.init()
            stack.callback(rclpy.try_shutdown)
            self.node = rclpy.create_node("benchmark")
            stack.callback(self.node.destroy_node)
            self._executor = SingleThreadedExecutor()
            self._executor.add_node(self.node)
            stack.callback(self._executor.shutdown)
            self._wait_until_active()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def plan(self, goal: Plan.Goal) -> Any:
        """Send a goal and wait for its result; RuntimeError if it is not completed."""
        if self._client is None:
            self._client = ActionClient(self.node, Plan, "edgellm/plan", **action_services_qos())
            if not self._client.wait_for_server(timeout_sec=PLAN_S):
                raise RuntimeError(f"the node offers no plans after {PLAN_S:.0f} s:\n{self.child.log_tail()}")
        handle = self._wait_for(self._client.send_goal_async(goal), PLAN_S)
        if not handle.accepted:
            raise RuntimeError("the node rejected the goal")
        result = self._wait_for(handle.get_result_async(), PLAN_S).result
        if result.termination_reason != Plan.Result.COMPLETED:
            raise RuntimeError(f"the plan ended with {result.termination_reason}: {result.message}")
        return result

    def resident_bytes(self) -> int:
        """Return the resident memory of the node's process."""
        return self._status("VmRSS") * 1024

    def memory(self) -> Memory:
        """Return the memory that the process of a watched node has allocated."""
        return watched_node.ask_memory(self._socket)

    def processor_seconds(self) -> float:
        """Return the processor time that the node's process has taken."""
        fields = Path(f"/proc/{self.child.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def threads(self) -> int:
        """Return the number of threads of the node's process."""
        return self._status("Threads")

    def call(self, client: Any, request: Any) -> Any:
        """Call one of the node's services and return the response."""
        return self._wait_for(client.call_async(request), PLAN_S)

    def spin_until(self, done: Callable[[], Any], timeout_s: float) -> bool:
        """Process messages until `done()` or for `timeout_s`; return whether it is done."""
        return spin_until(self._executor, done, timeout_s)

    def _status(self, name: str) -> int:
        for line in Path(f"/proc/{self.child.process.pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
        raise RuntimeError(f"{name} is missing in /proc/PID/status: this benchmark needs Linux")

    def _wait_until_active(self) -> None:
        deadline = time.monotonic() + START_S
        client = self.node.create_client(GetState, "edgellm/get_state")
        while time.monotonic() < deadline and self.child.process.poll() is None:
            if client.wait_for_service(timeout_sec=0.2):
                state = self._wait_for(client.call_async(GetState.Request()), 5.0).current_state.label
                if state == "active":
                    self.node.destroy_client(client)
                    return
            time.sleep(0.1)
        ended = self.child.process.poll()
        why = f"is not active after {START_S:.0f} s" if ended is None else f"ended with exit code {ended}"
        raise RuntimeError(f"the node {why}:\n{self.child.log_tail()}")

    def _wait_for(self, future: Any, timeout_s: float) -> Any:
        # spin_until_future_complete leaves a callback behind in each iteration. Each of them costs the next
        # call an iteration, so the client would get slower with every goal.
        if not self.spin_until(future.done, timeout_s):
            raise RuntimeError(f"no answer from the node within {timeout_s:.0f} s:\n{self.child.log_tail()}")
        return future.result()


def goal_of(prompt: str, frame: np.ndarray) -> Plan.Goal:
    """Make a goal: camera frame [H, W, 3] RGB, command, one trajectory, noise seed 0."""
    image: Image = to_image(0, frame)
    return Plan.Goal(prompt=prompt, images=[image], action_samples=1, noise_seed=0)
