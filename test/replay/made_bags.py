# SPDX-License-Identifier: Apache-2.0
"""Bags for the tests: the shipped one, and copies of it that differ in one thing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rosbags.rosbag2 import CompressionFormat, CompressionMode, StoragePlugin, Writer

from edgellm_ros.replay.bag import Bag, BagMessage
from edgellm_ros.replay.message_types import typestore

ROOT = Path(__file__).parents[2]
ARENA = ROOT / "bags" / "arena"
EXPECTED = ROOT / "bags" / "arena_expected"
Message = tuple[str, str, int, Any]  # topic, type, time in ns, message as dataclass or serialized


def write_bag(
    path: Path, messages: Iterable[Message], storage: str = "MCAP", compression: str = "NONE"
) -> Path:
    """A bag of these messages; its topics are those of the messages."""
    unopened = Writer(path, version=9, storage_plugin=StoragePlugin[storage])
    unopened.set_compression(CompressionMode[compression], CompressionFormat.ZSTD)
    with unopened as writer:
        connections = {}
        for topic, kind, time, content in messages:
            if (topic, kind) not in connections:
                connections[topic, kind] = writer.add_connection(topic, kind, typestore=typestore())
            data = content if isinstance(content, bytes) else typestore().serialize_cdr(content, kind)
            writer.write(connections[topic, kind], time, data)
    return path


def copy_bag(
    path: Path,
    keep: Callable[[BagMessage], bool] = lambda message: True,
    rename: dict[str, str] | None = None,
    storage: str = "MCAP",
    compression: str = "NONE",
    source: Path = ARENA,
) -> Path:
    """A copy of a bag with some of its messages, its topics renamed, or stored otherwise."""
    with Bag(source) as bag:
        messages = [
            ((rename or {}).get(m.topic.name, m.topic.name), m.topic.type, m.time, m.data)
            for m in bag.messages(list(bag.topics))
            if keep(m)
        ]
    return write_bag(path, messages, storage, compression)


def make(kind: str, **fields: Any) -> Any:
    """A message of the bag library."""
    return typestore().types[kind](**fields)


def header(stamp: int = 0, frame_id: str = "") -> Any:
    """A header of this stamp in nanoseconds."""
    time = make("builtin_interfaces/msg/Time", sec=stamp // 10**9, nanosec=stamp % 10**9)
    return make("std_msgs/msg/Header", stamp=time, frame_id=frame_id)


def string(text: str) -> Any:
    """A std_msgs/String."""
    return make("std_msgs/msg/String", data=text)


def serialized(kind: str, messages: Sequence[Any]) -> list[bytes]:
    """Messages as they come over the wire."""
    return [bytes(typestore().serialize_cdr(message, kind)) for message in messages]
