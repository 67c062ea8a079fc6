# SPDX-License-Identifier: Apache-2.0
"""Plays inputs into the live node, one at a time, until it has finished each.

    /clock, ~/image ~/odom ~/command ~/audio  -> edgellm node (a policy: ~/joint_states ~/wrist/image)
    ~/generation ~/action_chunk ...           <- edgellm node
    ~/get_metrics                             the handshake

No timeout decides which outputs belong to an input. The node counts messages received, outputs published
and jobs that wait or run: an input is finished when it was counted, no job is left, and all outputs published
since have arrived. Timeouts only end a replay that cannot go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from builtin_interfaces.msg import Time
from lifecycle_msgs.srv import GetState
from nav_msgs.msg import Odometry, Path
from rcl_interfaces.srv import GetParameters
from rclpy.context import Context
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.parameter import parameter_value_to_python
from rclpy.qos import HistoryPolicy, QoSProfile
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import CompressedImage, Image, JointState
from std_msgs.msg import String

from edgellm_ros.echo import quoted
from edgellm_ros.msg import ActionChunk, AudioChunk, Generation
from edgellm_ros.replay.inputs import JOINT_STATES, InputMessage
from edgellm_ros.runtime.adapters.lora import canonical_name
from edgellm_ros.srv import GetMetrics, ListLoras, SetNoiseSeed

INPUT_CLASSES = {
    "sensor_msgs/msg/Image": Image,
    "sensor_msgs/msg/CompressedImage": CompressedImage,
    "nav_msgs/msg/Odometry": Odometry,
    "sensor_msgs/msg/JointState": JointState,
    "std_msgs/msg/String": String,
    "edgellm_ros/msg/AudioChunk": AudioChunk,
}
RECEIVED = {  # the node's counters, by input
    "image": "frames_received",
    "odom": "odometry_received",
    "command": "commands_received",
    "audio": "audio_received",
    JOINT_STATES: "joint_states_received",
}
FURTHER_RECEIVED = "further_frames_received"  # of all cameras but that of ~/image
OUTPUT_CLASSES = {
    "utterance": AudioChunk,
    "generation": Generation,
    "text": String,
    "text_stream": String,
    "action_chunk": ActionChunk,
    "path": Path,
    "overlay": Image,
}
# Counters of effects of inputs, and those that end in _refused.
OUTCOMES = ("plans_", "utterances", "joint_states_incomplete")
RELIABLE = QoSProfile(depth=10)
EVERYTHING = QoSProfile(history=HistoryPolicy.KEEP_ALL)
DELIVERY_S = 60.0  # a message within this computer that takes longer is lost
RETRY_S = 3.0
POLL_S = (0.001, 0.02)  # first and longest pause between two requests for the counters


class LinkError(RuntimeError):
    """A node that is missing, not active or silent, or outputs that were lost."""


@dataclass(frozen=True, eq=False)
class Answer:
    """Outputs and effects of one input."""

    outputs: dict[str, list[bytes]]  # serialized, by topic, in the order of arrival
    became: dict[str, int]  # growth of the node's counters of plans, utterances and refused messages


class ReplayLink(Node):
    """A node named `replay`.

    Everything happens on the caller's thread: methods spin while they wait.
    """

    def __init__(
        self,
        input_types: Mapping[str, str],
        overlay: bool = False,
        context: Context | None = None,
        check_alive: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the node; `input_types`: message types by input.

        `check_alive` is called while waiting, and raises if the node has died.
        """
        super().__init__("replay", context=context)
        self._check_alive = check_alive
        self._clock_publisher = self.create_publisher(Clock, "/clock", RELIABLE)
        self._inputs = {
            name: self.create_publisher(INPUT_CLASSES[kind], f"edgellm/{name}", RELIABLE)
            for name, kind in input_types.items()
        }
        names = [name for name in OUTPUT_CLASSES if overlay or name != "overlay"]
        self._outputs: dict[str, list[bytes]] = {name: [] for name in names}
        for name in names:
            self.create_subscription(
                OUTPUT_CLASSES[name], f"edgellm/{name}", self._outputs[name].append, EVERYTHING, raw=True
            )
        self._metrics_client = self.create_client(GetMetrics, "edgellm/get_metrics")
        self._state_client = self.create_client(GetState, "edgellm/get_state")
        self._parameters_client = self.create_client(GetParameters, "edgellm/get_parameters")
        self._loras_client = self.create_client(ListLoras, "edgellm/list_loras")
        self._seed_client = self.create_client(SetNoiseSeed, "edgellm/set_noise_seed")
        self._executor = SingleThreadedExecutor(context=self.context)
        self._executor.add_node(self)
        self._counts: dict[str, float] = {}

    def destroy_node(self) -> None:
        """Stop spinning and free all resources."""
        self._executor.shutdown()
        super().destroy_node()

    def wait_until_active(self, timeout_s: float) -> None:
        """Wait until the node is active.

        Raises LinkError with the reason if it is not.
        """
        deadline = time.monotonic() + timeout_s
        self._until(self._state_client.service_is_ready, deadline, lambda: "the node is not there")
        # The node answers after the transitions of `autostart`.
        state = self._call(self._state_client, GetState.Request(), deadline).current_state.label
        if state != "active":
            raise LinkError(f"the node is {state}, expected active: it could not load the engines")

    def wait_until_connected(self, timeout_s: float) -> None:
        """Wait until all topics are connected.

        Raises LinkError with the topics that are not.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._counts = self._metrics(deadline)
            lacking = {
                "inputs": len(self._inputs) - self._counts["inputs_connected"],
                "outputs": len(self._outputs) - self._counts["outputs_connected"],
            }
            if max(lacking.values()) <= 0:
                return
            if time.monotonic() > deadline:
                unheard = [n for n, sender in self._inputs.items() if not sender.get_subscription_count()]
                names = ", ".join(f"~/{name}" for name in unheard)
                raise LinkError(
                    f"topics of the node that are not connected: {names or lacking} after {timeout_s:.0f} s"
                )
            self._pause(POLL_S[1])

    def check_parameters(self, expected: Mapping[str, Any]) -> None:
        """Raise LinkError unless the node's parameters have these values."""
        for (name, value), found in zip(expected.items(), self.parameters(*expected), strict=True):
            if found != value:
                raise LinkError(
                    f"the node's parameter {name} is {quoted(found)}, expected {quoted(value)} for "
                    "this replay"
                )

    def parameters(self, *names: str) -> list[Any]:
        """Return the values of parameters of the node."""
        response = self._ask(self._parameters_client, GetParameters.Request(names=names))
        return [parameter_value_to_python(value) for value in response.values]

    def active_lora(self) -> str:
        """Return the active adapter; "" is the base model."""
        return self._ask(self._loras_client, ListLoras.Request()).active

    def check_lora(self, name: str) -> None:
        """Raise LinkError unless this adapter is active."""
        active = self.active_lora()
        if active != canonical_name(name):
            raise LinkError(
                f"the node's active adapter is {quoted(active)}, expected {quoted(name)} for this replay"
            )

    def set_noise_seed(self, seed: int) -> None:
        """Set the seed of the node's action noise.

        Raises LinkError if the node refuses it.
        """
        response = self._ask(self._seed_client, SetNoiseSeed.Request(seed=seed))
        if not response.success:
            raise LinkError(f"the node refuses the noise seed {seed}: {response.message}")

    def play(self, message: InputMessage) -> Answer:
        """Send one input at its time, and wait until the node has finished it.

        Sets /clock to the input's time, publishes the input, and waits until the node has received it and has
        no jobs left. Raises LinkError if the input or the time does not arrive, if another node publishes
        too, or if outputs are lost.
        """
        self._set_clock(message.clock)
        before, counter = self._counts, RECEIVED.get(message.name, FURTHER_RECEIVED)
        self._inputs[message.name].publish(message.data)
        deadline, pause_s = time.monotonic() + DELIVERY_S, POLL_S[0]
        while True:
            # Until counted, and no job is left. A running job ends by the parameter plan_timeout.
            self._counts = self._metrics(time.monotonic() + DELIVERY_S)
            received = self._grown(before, counter)
            if received and not self._counts["jobs_pending"]:
                break
            if not received and time.monotonic() > deadline:
                raise LinkError(f"the node did not get {_words(message)} within {DELIVERY_S:.0f} s")
            self._pause(pause_s)
            pause_s = min(2 * pause_s, POLL_S[1])
        if received > 1:
            raise LinkError(
                f"the node got {received} messages when {_words(message)} was sent: another node sends too"
            )
        return Answer(self._collect(before, message), self._became(before))

    def _set_clock(self, clock: int) -> None:
        """Publish the time until the node has received it: /clock is best effort."""
        wanted = clock * 1e-9  # the node computes it in the same way
        deadline = time.monotonic() + DELIVERY_S
        while self._counts.get("clock") != wanted:
            if time.monotonic() > deadline:
                raise LinkError(f"the node did not get the time {clock} ns on /clock: does it use_sim_time?")
            self._clock_publisher.publish(Clock(clock=Time(sec=clock // 10**9, nanosec=clock % 10**9)))
            self._counts = self._metrics(deadline)

    def _collect(self, before: Mapping[str, float], message: InputMessage) -> dict[str, list[bytes]]:
        """Return all outputs that the node has published since `before`."""
        expected = {name: self._grown(before, f"{name}_published") for name in self._outputs}

        def state() -> str:
            return ", ".join(f"~/{name} {len(self._outputs[name])} of {n}" for name, n in expected.items())

        self._until(
            lambda: all(len(self._outputs[name]) >= n for name, n in expected.items()),
            time.monotonic() + DELIVERY_S,
            lambda: f"outputs of {_words(message)} got lost: {state()}",
        )
        outputs = {name: list(messages) for name, messages in self._outputs.items()}
        if any(len(outputs[name]) != n for name, n in expected.items()):
            raise LinkError(f"there were more outputs of {_words(message)} than published: {state()}")
        for messages in self._outputs.values():
            messages.clear()
        return outputs

    def _became(self, before: Mapping[str, float]) -> dict[str, int]:
        names = [name for name in self._counts if name.startswith(OUTCOMES) or name.endswith("_refused")]
        return {name: grown for name in names if (grown := self._grown(before, name))}

    def _grown(self, before: Mapping[str, float], name: str) -> int:
        return round(self._counts.get(name, 0.0) - before.get(name, 0.0))

    def _metrics(self, deadline: float) -> dict[str, float]:
        self._until(self._metrics_client.service_is_ready, deadline, lambda: "no service get_metrics")
        response = self._call(self._metrics_client, GetMetrics.Request(), deadline)
        return dict(zip(response.names, response.values, strict=True))

    def _ask(self, client: Any, request: Any) -> Any:
        deadline = time.monotonic() + DELIVERY_S
        self._until(client.service_is_ready, deadline, lambda: f"no service {client.srv_name}")
        return self._call(client, request, deadline)

    def _call(self, client: Any, request: Any, deadline: float) -> Any:
        """Call a service, and repeat the request until there is a response.

        The first response is lost if the node has not discovered the client. Requests must be safe to repeat.
        """
        while True:
            future = client.call_async(request)
            again = min(time.monotonic() + RETRY_S, deadline)
            while not future.done() and (left := again - time.monotonic()) > 0:
                self._pause(left, once=True)
            if future.done():
                return future.result()
            client.remove_pending_request(future)
            if time.monotonic() >= deadline:
                raise LinkError(f"no answer from {client.srv_name}")

    def _until(self, done: Callable[[], bool], deadline: float, problem: Callable[[], str]) -> None:
        while not done():
            if time.monotonic() > deadline:
                raise LinkError(problem())
            self._pause(POLL_S[1], once=True)

    def _pause(self, seconds: float, once: bool = False) -> None:
        """Receive messages for some seconds; `once`: until one has arrived."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._check_alive()
            self._executor.spin_once(timeout_sec=min(left, 0.1))
            if once:
                return


def _words(message: InputMessage) -> str:
    return f"the message of ~/{message.name} at {message.stamp} ns"
