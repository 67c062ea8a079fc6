# SPDX-License-Identifier: Apache-2.0
"""Reads rosbag2 bags (sqlite3 and mcap), and believes nothing that a damaged one claims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rosbags.interfaces import MessageDefinitionFormat
from rosbags.rosbag2 import Reader
from rosbags.typesys import Stores, get_types_from_msg, get_typestore
from rosbags.typesys.store import Typestore

from edgellm_ros.replay.message_types import typestore


class BagError(ValueError):
    """A bag that cannot be used; the message names the bag and says why."""


@dataclass(frozen=True)
class Topic:
    """A topic of a bag: its type, the hash of the type's definition (empty if unknown), its messages."""

    name: str
    type: str
    type_hash: str
    count: int


@dataclass(frozen=True, eq=False)
class BagMessage:
    """One recorded message: `time` in nanoseconds is the bag's, `data` is serialized as CDR."""

    topic: Topic
    time: int
    data: bytes

    def decode(self, types: Typestore | None = None) -> Any:
        """The message as a dataclass of the bag library, by this package's types unless others are given.
        Raises what the library raises for broken data.
        """
        return (types or typestore()).deserialize_cdr(self.data, self.topic.type)


class Bag:
    """A bag open for reading: a directory with metadata.yaml, or a single .mcap or .db3 file."""

    def __init__(self, path: str | Path) -> None:
        """Open it. BagError if it is not there, not a bag, damaged, or empty."""
        self.path = Path(path)
        if not self.path.exists():
            raise BagError(f"{path}: no such bag")
        with self._readable():
            self._reader = Reader(self.path)
            self._reader.open()
        try:
            with self._readable():
                self.topics = {topic.name: topic for topic in self._topics()}
                # What the writer added to the bag's metadata, by name.
                self.custom: dict[str, str] = self._reader.storage.metadata.custom or {}
            if not any(topic.count for topic in self.topics.values()):
                raise BagError(f"{path}: the bag is empty: it has no messages")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the files."""
        self._reader.close()

    def __enter__(self) -> Bag:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def messages(self, topics: Collection[str]) -> Iterator[BagMessage]:
        """The messages of these topics in the order of their time.

        BagError at the place where the bag is damaged, or at the end if messages are missing.
        """
        connections = [c for c in self._reader.connections if c.topic in topics]
        found: Counter[str] = Counter()
        with self._readable():
            for connection, time, data in self._reader.messages(connections):
                found[connection.topic] += 1
                yield BagMessage(self.topics[connection.topic], time, bytes(data))
        for name in topics:
            if found[name] != self.topics[name].count:
                raise BagError(
                    f"{self.path}: damaged: {name} has {found[name]} messages, "
                    f"expected {self.topics[name].count} by the bag's index"
                )

    def recorded_types(self) -> Typestore:
        """The types as they were when the bag was recorded; this package's if the bag does not say."""
        definitions = {
            connection.msgtype: connection.msgdef.data
            for connection in self._reader.connections
            if connection.msgdef.format == MessageDefinitionFormat.MSG
        }
        if not definitions:
            return typestore()
        store = get_typestore(Stores.EMPTY)
        with self._readable():
            for name, text in definitions.items():
                store.register(get_types_from_msg(text, name))
        return store

    def _topics(self) -> Iterator[Topic]:
        for name in dict.fromkeys(connection.topic for connection in self._reader.connections):
            connections = [c for c in self._reader.connections if c.topic == name]
            types = {connection.msgtype for connection in connections}
            if len(types) > 1:
                raise BagError(f"{self.path}: topic {name} has several types: {', '.join(sorted(types))}")
            count = sum(connection.msgcount for connection in connections)
            yield Topic(name, types.pop(), connections[0].digest, count)

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except BagError:
            raise
        except Exception as error:  # there is nothing that the library does not raise for a damaged file
            raise BagError(f"{self.path}: not a readable bag: {reason(error)}") from error


def reason(error: Exception) -> str:
    """What an error says; its class where it says nothing."""
    return str(error) or type(error).__name__
