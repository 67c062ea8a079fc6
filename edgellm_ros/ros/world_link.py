# SPDX-License-Identifier: Apache-2.0
"""What simulated worlds share as ROS nodes: the clock, and the edgellm node.

    clock, edgellm/command                      -> edgellm node
    edgellm/set_noise_seed, edgellm/get_state   services of the edgellm node

Names are relative: remap them, or give both nodes one namespace. Everything runs on the caller's thread:
methods that wait spin the node.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import rclpy
from lifecycle_msgs.msg import State as LifecycleState
from lifecycle_msgs.srv import GetState
from rclpy.client import Client
from rclpy.executors import ExternalShutdownException
from rclpy.node import Node
from rclpy.qos import QoSProfile
from rosgraph_msgs.msg import Clock
from std_msgs.msg import String

from edgellm_ros.ros.executor import LeanExecutor
from edgellm_ros.ros.messaging import spin_until, to_time
from edgellm_ros.ros.signals import restore_signals
from edgellm_ros.srv import SetNoiseSeed

RELIABLE = QoSProfile(depth=50)
SETTLE_S = 0.02


class LinkError(RuntimeError):
    """A node that is missing, not active or silent, or an invalid answer."""


class WorldLink(Node):
    """A world's node. Stamps are simulated time in nanoseconds.

    A subclass counts in `_heard` what arrives as an answer, and tells in `_connected` whether all topics are.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._time = self.create_publisher(Clock, "/clock", RELIABLE)
        self._command = self.create_publisher(String, "edgellm/command", RELIABLE)
        self._seed_client = self.create_client(SetNoiseSeed, "edgellm/set_noise_seed")
        self.node_name = self.resolve_service_name("edgellm/get_state").removesuffix("/get_state")
        self._state_client = self.create_client(GetState, "edgellm/get_state")
        self._executor = LeanExecutor()
        self._executor.add_node(self)
        self._heard = 0

    def destroy_node(self) -> None:
        """Stop spinning and free all resources."""
        self._executor.shutdown()
        super().destroy_node()

    # Publishing

    def publish_clock(self, stamp: int) -> None:
        """Set the clock to `stamp`."""
        self._time.publish(Clock(clock=to_time(stamp)))

    def say(self, command: str) -> None:
        """Send a command; an empty one ends the previous command."""
        self._command.publish(String(data=command))

    def send(
        self,
        stamp: int,
        publish: Callable[[], None],
        answered: Callable[[], bool],
        resend_after_s: float,
        attempts: int,
        command: str | None = None,
    ) -> float:
        """Publish the input of time `stamp` until the answer to it has arrived.

        Best-effort QoS may lose it: it is sent again after `resend_after_s` without any answer, up to
        `attempts` times; then LinkError is raised. A new `command` is sent after its first publication, so
        that the node does not plan it with earlier input. Returns the time of `time.perf_counter` from which
        the node could answer.
        """
        start = time.perf_counter()
        for attempt in range(attempts):
            publish()
            if command is not None and attempt == 0:
                self._settle()
                start = time.perf_counter()
                self.say(command)
            while True:
                heard = self._heard
                if self.spin_until(answered, resend_after_s):
                    return start
                if self._heard == heard:
                    break
        raise LinkError(
            f"no answer from {self.node_name} to the frame of "
            f"t = {stamp * 1e-9:.1f} s, sent {attempts} times in {time.perf_counter() - start:.0f} s"
        )

    # Waiting

    def wait_until_active(self, timeout_s: float) -> None:
        """Wait until the edgellm node is active and connected.

        Raises LinkError with the reason if not.
        """
        self.wait_for_state(self._state_client, self.node_name, self._connected, timeout_s)

    def wait_for_state(
        self, client: Client, name: str, connected: Callable[[], bool], timeout_s: float
    ) -> None:
        """Wait until a lifecycle node is active and connected; LinkError if not.

        client: of its service GetState.
        """
        deadline = time.monotonic() + timeout_s
        state = "not there"
        while time.monotonic() < deadline:
            if client.wait_for_service(timeout_sec=0.2):
                current = self._call(client, GetState.Request(), 2.0)
                if current is not None:
                    state = current.current_state.label
                    if current.current_state.id == LifecycleState.PRIMARY_STATE_ACTIVE and connected():
                        return
            self.spin_until(lambda: False, 0.05)
        raise LinkError(f"{name} is {state} after {timeout_s:.0f} s")

    def set_noise_seed(self, seed: int) -> None:
        """Set the seed of the following trajectories.

        Raises LinkError if the node refuses it.
        """
        response = self.call(self._seed_client, SetNoiseSeed.Request(seed=seed))
        if not response.success:
            raise LinkError(f"{self._seed_client.srv_name}: {response.message}")

    def call(self, client: Client, request: Any) -> Any:
        """Call a service of another node and return its response.

        The request is repeated, because the first response is lost if the node has not discovered the client.
        Raises LinkError without a response.
        """
        for _ in range(5):
            response = self._call(client, request, 3.0)
            if response is not None:
                return response
        raise LinkError(f"{client.srv_name}: no response")

    def spin_until(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Receive messages until `done()` or for `timeout_s`; return `done()`."""
        return spin_until(self._executor, done, timeout_s)

    def _settle(self) -> None:
        """Wait for published messages to arrive before messages on another topic are sent."""
        self.spin_until(lambda: False, SETTLE_S)

    def _call(self, client: Client, request: Any, timeout_s: float) -> Any:
        """Return the response; None if none arrives in time."""
        future = client.call_async(request)
        if self.spin_until(future.done, timeout_s):
            return future.result()
        client.remove_pending_request(future)
        return None

    def _connected(self) -> bool:
        raise NotImplementedError


def run_world(name: str, make_node: Callable[[], Any], args: Sequence[str] | None) -> int:
    """Make a world's node, call its method `run`, and return the exit code.

    0: it has ended, or was interrupted; 1: LinkError, whose message is printed. args: as on the command line.
    """
    node = None
    try:
        restore_signals()
        rclpy.init(args=args)
        node = make_node()
        node.run()
        return 0
    except (KeyboardInterrupt, ExternalShutdownException):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a supervisor may repeat the signal of the terminal
        return 0
    except LinkError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    finally:
        if node is not None:
            node.destroy_node()
        rclpy.try_shutdown()
