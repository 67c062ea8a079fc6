# SPDX-License-Identifier: Apache-2.0
"""Selects and checks the messages of a bag that become inputs of the node."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgellm_ros.echo import quoted
from edgellm_ros.replay.bag import Bag, BagError, BagMessage, Topic, reason
from edgellm_ros.replay.message_types import typestore

NODE = "/edgellm"
CLOCK = "/clock"
CLOCK_TYPE = "rosgraph_msgs/msg/Clock"
COMPRESSED = "sensor_msgs/msg/CompressedImage"
MAX_TIME = 2**31 * 10**9  # ns; the seconds of a ROS time are an int32
IMAGES = ("sensor_msgs/msg/Image", COMPRESSED)
JOINT_STATES = "joint_states"
CAMERA = re.compile("[A-Za-z][A-Za-z0-9_]*/image")  # a policy's further camera
# As in the node, which cannot be imported here; a test compares them.
WAIT_NS = 50_000_000  # for inputs as new as a frame: the default of the node's parameter odom_wait
SAME_TIME_NS = 5_000_000  # by which stamps of cameras that were triggered together may differ
# The input topics of every node with the message types that they may have, in the order of reports.
INPUT_TYPES: dict[str, tuple[str, ...]] = {
    "image": IMAGES,
    "odom": ("nav_msgs/msg/Odometry",),
    "command": ("std_msgs/msg/String",),
    "audio": ("edgellm_ros/msg/AudioChunk",),
}


def types_of(name: str) -> tuple[str, ...]:
    """Return the message types that the node's input ~/`name` may have.

    Empty if no node has this input. Nodes with a policy have ~/joint_states and ~/NAME/image besides
    INPUT_TYPES.
    """
    if name == JOINT_STATES:
        return ("sensor_msgs/msg/JointState",)
    return IMAGES if CAMERA.fullmatch(name) else INPUT_TYPES.get(name, ())


@dataclass(frozen=True, eq=False)
class InputMessage:
    """A message for the node's topic ~/`name`."""

    name: str
    type: str
    data: bytes  # serialized as CDR
    stamp: int  # the message's own in nanoseconds; the bag's time if the message has none
    clock: int  # time of the node's clock when the message arrives, in nanoseconds


class Inputs:
    """The messages of a bag that are played into the node."""

    def __init__(self, bag: Bag, topics: Mapping[str, Topic], of_policy: Sequence[str] = ()) -> None:
        self._bag = bag
        self._of_policy = of_policy
        self._names = {topic.name: name for name, topic in topics.items()}
        # The bag's topics by the node's names for them.
        self.topics = dict(topics)
        # A bag of a simulation has its own clock, to which the stamps belong.
        self._has_clock = CLOCK in bag.topics and bag.topics[CLOCK].type == CLOCK_TYPE

    @property
    def types(self) -> dict[str, str]:
        """Return the message types by the node's names."""
        return {name: topic.type for name, topic in self.topics.items()}

    def check(self) -> None:
        """Read and decode every message once.

        Raises BagError for the first one that is damaged.
        """
        for _ in self:
            pass

    def __len__(self) -> int:
        return sum(topic.count for topic in self.topics.values())

    def __iter__(self) -> Iterator[InputMessage]:
        return frames_last(self._messages(), self._of_policy) if self._of_policy else self._messages()

    def _messages(self) -> Iterator[InputMessage]:
        clock: int | None = None
        for message in self._bag.messages([*self._names, *([CLOCK] if self._has_clock else [])]):
            decoded = self._decode(message)
            if message.topic.name == CLOCK:
                clock = nanoseconds(decoded.clock)
                continue
            topic, header = message.topic, getattr(decoded, "header", None)
            stamp = nanoseconds(header.stamp) if header is not None else 0
            now = message.time
            if self._has_clock:  # before its first tick, the message's own time
                now = clock if clock is not None else stamp or now
            for time, words in ((now, "at"), (stamp, "with the stamp")):
                if not 0 <= time < MAX_TIME:
                    raise BagError(
                        f"{self._bag.path}: a message of {topic.name} {words} {time} ns: not a time"
                    )
            yield InputMessage(self._names[topic.name], topic.type, message.data, stamp or now, now)

    def _decode(self, message: BagMessage) -> Any:
        try:
            return message.decode()
        except Exception as error:  # damaged data raises errors of any class
            raise BagError(
                f"{self._bag.path}: damaged: the message of {message.topic.name} at {message.time} ns is not "
                f"a {message.topic.type}: {reason(error)}"
            ) from error


def frames_last(messages: Iterable[InputMessage], of_policy: Sequence[str]) -> Iterator[InputMessage]:
    """Move frames of ~/image behind a policy's other inputs of the same time.

    On the robot, a plan on such a frame waits for them: here they come first, if they follow within WAIT_NS.
    Commands keep their place. `of_policy`: inputs such as wrist/image and joint_states.
    """
    newest = dict.fromkeys(of_policy, -SAME_TIME_NS)  # stamps
    held: InputMessage | None = None
    clock = 0

    def is_complete(frame: InputMessage) -> bool:
        return all(
            stamp + (0 if name == JOINT_STATES else SAME_TIME_NS) >= frame.stamp
            for name, stamp in newest.items()
        )

    for message in messages:
        if held is not None and (message.name not in newest or message.clock > held.clock + WAIT_NS):
            yield replace(held, clock=clock)
            held = None
        clock = message.clock
        if message.name == "image":
            held = message
        else:
            yield message
            if message.name in newest:
                newest[message.name] = max(message.stamp, newest[message.name])
        if held is not None and is_complete(held):
            yield replace(held, clock=clock)
            held = None
    if held is not None:
        yield replace(held, clock=clock)


def find_inputs(
    bag: Bag,
    remappings: Mapping[str, str],
    needs_image: bool,
    needs_odometry: bool,
    hears: bool,
    of_policy: Sequence[str] = (),
    advice: str = ": name the topic with --remap",
) -> Inputs:
    """Find the bag's topics for the node's inputs: /edgellm/image and so on.

    `remappings`: topic of the bag -> input, from `parse_remappings`; these replace the topics named above.
    A model that `hears` takes audio in place of a command. `of_policy`: further inputs of a policy, all of
    them needed, such as wrist/image. `advice`: what can be done about a topic that is missing. Raises
    BagError for a topic that is needed and missing, or has another type.
    """
    for source, name in remappings.items():
        if source not in bag.topics:
            raise BagError(f"{bag.path}: no topic {source} to remap to ~/{name}; {_listing(bag)}")
    sources = {name: f"{NODE}/{name}" for name in (*INPUT_TYPES, *of_policy)}
    for source, name in remappings.items():
        if name not in sources:
            inputs = ", ".join(f"~/{known}" for known in sources)
            raise BagError(f"{source}: expected a remapping to one of {inputs}, got ~/{name}")
    sources |= {name: source for source, name in remappings.items()}
    topics = {
        name: bag.topics[source]
        for name, source in sources.items()
        if source in bag.topics and bag.topics[source].count and remappings.get(source, name) == name
    }
    needed = [("image",)] * needs_image + [("odom",)] * needs_odometry
    needed += [(name,) for name in of_policy]
    needed.append(("command", "audio") if hears else ("command",))
    for names in needed:
        if not any(name in topics for name in names):
            wanted = " or ".join(f"~/{name} ({sources[name]})" for name in names)
            without = ""
            if names == ("odom",):
                without = ", or play without odometry with --no-odometry"
            elif CAMERA.fullmatch(names[0]):
                without = ", or name the cameras that the robot has with --cameras"
            raise BagError(f"{bag.path}: no messages for {wanted}{advice}{without}; {_listing(bag)}")
    for name, topic in topics.items():
        _check_type(bag, name, topic)
    transports = {topic.type: topic.name for name, topic in topics.items() if types_of(name) == IMAGES}
    if len(transports) > 1:
        (one, first), (other, second) = transports.items()
        raise BagError(
            f"{bag.path}: {first} has type {one} and {second} {other}, expected one type for all cameras"
        )
    return Inputs(bag, topics, of_policy)


def parse_remapping(text: str) -> tuple[str, str]:
    """Parse FROM:=TO to (topic of the bag, name of the node's input).

    TO is ~/image, image or /edgellm/image, and likewise odom, command, audio, joint_states and wrist/image
    for a camera. Raises ValueError for any other text.
    """
    source, separator, target = text.partition(":=")
    name = target.removeprefix("~/").removeprefix(f"{NODE}/")
    if not separator or not source.startswith("/") or not types_of(name):
        choices = ", ".join(f"~/{name}" for name in (*INPUT_TYPES, JOINT_STATES, "CAMERA/image"))
        raise ValueError(
            f"expected /TOPIC:=TO, TO one of {choices} (CAMERA of letters, digits and _), got {quoted(text)}"
        )
    return source, name


def parse_remappings(texts: Iterable[str]) -> dict[str, str]:
    """Parse several FROM:=TO.

    Raises ValueError for an invalid one, or for two that contradict each other.
    """
    remappings: dict[str, str] = {}
    for text in texts:
        source, name = parse_remapping(text)
        if source in remappings or name in remappings.values():
            raise ValueError(f"{quoted(text)} contradicts another remapping")
        remappings[source] = name
    return remappings


def nanoseconds(stamp: Any) -> int:
    """Convert a decoded builtin_interfaces/Time to nanoseconds."""
    return stamp.sec * 10**9 + stamp.nanosec


def _check_type(bag: Bag, name: str, topic: Topic) -> None:
    expected = types_of(name)
    if topic.type not in expected:
        raise BagError(
            f"{bag.path}: {topic.name} has type {topic.type}, expected {' or '.join(expected)} for ~/{name}"
        )
    ours = typestore().hash_rihs01(topic.type)
    if topic.type_hash and topic.type_hash != ours:
        raise BagError(
            f"{bag.path}: {topic.name} was recorded with another definition of {topic.type}: "
            f"{topic.type_hash}, expected {ours}"
        )


def _listing(bag: Bag) -> str:
    return "the bag has " + ", ".join(sorted(f"{t.name} ({t.type}, {t.count})" for t in bag.topics.values()))
