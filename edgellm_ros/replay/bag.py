# SPDX-License-Identifier: Apache-2.0
"""Reads rosbag2 bags (sqlite3 and mcap) and reports damaged ones."""

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

from edgellm_ros.replay.mcap_file import find_damage
from edgellm_ros.replay.message_types import typestore


class BagError(ValueError):
    """Error for an unusable bag; the message names the bag and the reason."""


@dataclass(frozen=True)
class Topic:
    """A topic of a bag."""

    name: str
    type: str
    type_hash: str  # of the type's definition (RIHS01); empty if unknown
    count: int  # messages, by the bag's index


@dataclass(frozen=True, eq=False)
class BagMessage:
    """One recorded message."""

    topic: Topic
    time: int  # the bag's, in nanoseconds
    data: bytes  # serialized as CDR

    def decode(self, types: Typestore | None = None) -> Any:
        """Decode the message to a dataclass of the bag library.

        `types`: message types; None for this package's. Damaged data raises any error of the library.
        """
        return (types or typestore()).deserialize_cdr(self.data, self.topic.type)


class Bag:
    """A bag open for reading: a folder with metadata.yaml, an .mcap or a .db3 file."""

    def __init__(self, path: str | Path) -> None:
        """Open the bag.

        Raises BagError if it does not exist, is not a bag, is damaged, or is empty.
        """
        self.path = Path(path)
        if not self.path.exists():
            raise BagError(f"{path}: no such bag")
        with self._readable():
            self._reader = Reader(self.path)
            self._reader.open()
        try:
            with self._readable():
                self.topics = {topic.name: topic for topic in self._topics()}
                # Custom metadata by name.
                self.custom: dict[str, str] = self._reader.storage.metadata.custom or {}
            if not any(topic.count for topic in self.topics.values()):
                raise BagError(f"{path}: the bag is empty: it has no messages")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._reader.close()

    def __enter__(self) -> Bag:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def messages(self, topics: Collection[str]) -> Iterator[BagMessage]:
        """Yield the messages of these topics in the order of their time.

        Raises BagError at the first damaged message, or at the end if messages are missing.
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
        """Return the message types that the bag recorded; this package's if it has none."""
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
        except Exception as error:  # the library raises errors of any class for a damaged file
            raise BagError(
                f"{self.path}: not a readable bag: {find_damage(self.path) or reason(error)}"
            ) from error


def reason(error: Exception) -> str:
    """Return the message of an error, or its class if the message is empty."""
    return str(error) or type(error).__name__
