# SPDX-License-Identifier: Apache-2.0
"""Writes the node's outputs to an output bag: equal outputs give equal bytes.

The bag's time of a message is the stamp of the input that the message answers, and the order of messages is
fixed. Values that depend on the computer are removed: latencies are 0, and the pieces of ~/text_stream,
whose borders depend on timing, are joined. ~/replay/input records each input and how its plans ended.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rosbags.rosbag2 import StoragePlugin, Writer

from edgellm_ros.replay.inputs import NODE, InputMessage, nanoseconds
from edgellm_ros.replay.message_types import typestore

STORAGES = {"mcap": StoragePlugin.MCAP, "sqlite3": StoragePlugin.SQLITE3}
BAG_VERSION = 9
STRING = "std_msgs/msg/String"
INPUT = "replay/input"
# Topics of an output bag without /edgellm/, in the order in which messages of the same time are written.
OUTPUT_TYPES: dict[str, str] = {
    INPUT: STRING,
    "utterance": "edgellm_ros/msg/AudioChunk",
    "generation": "edgellm_ros/msg/Generation",
    "text": STRING,
    "text_stream": STRING,
    "action_chunk": "edgellm_ros/msg/ActionChunk",
    "path": "nav_msgs/msg/Path",
    "overlay": "sensor_msgs/msg/Image",
}
ENGINE_KEY = "engine"  # in the metadata: SHA-256 of the files of the engine and of its adapter


class Recording:
    """An output bag that is being written.

    The bag gets its name when the context ends without an error.
    """

    def __init__(self, path: str | Path, storage: str, engine: Mapping[str, str], overlay: bool) -> None:
        """Create the bag; `engine`: SHA-256 by file.

        Raises FileExistsError if the path exists.
        """
        self.path = Path(path)
        refuse_existing(self.path)
        self.counts: Counter[str] = Counter()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A bag's files have the name of its folder; a fixed name makes them equal in any place.
        self._folder = Path(tempfile.mkdtemp(prefix=f".{self.path.name}.", dir=self.path.parent))
        self._writer = Writer(self._folder / "replay", version=BAG_VERSION, storage_plugin=STORAGES[storage])
        self._writer.set_custom_data(ENGINE_KEY, json.dumps(dict(engine), sort_keys=True))
        self._writer.open()
        self._connections = {
            name: self._writer.add_connection(f"{NODE}/{name}", kind, typestore=typestore())
            for name, kind in OUTPUT_TYPES.items()
            if overlay or name != "overlay"
        }

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._writer.close()
                refuse_existing(self.path)
                (self._folder / "replay").rename(self.path)
            else:
                self._writer.abort()
        finally:
            shutil.rmtree(self._folder)

    def add(
        self, message: InputMessage, outputs: Mapping[str, Sequence[bytes]], became: Mapping[str, int]
    ) -> None:
        """Write the record of one input and its outputs (serialized, by topic).

        `became`: by how much this input increased the node's counters: plans by outcome, refused inputs.
        """
        self._write(INPUT, message.stamp, _input_record(message, became))
        generations = [_without_latencies(_decode("generation", data)) for data in outputs["generation"]]
        stamps = [nanoseconds(generation.header.stamp) or message.stamp for generation in generations]
        for stamp, generation in zip(stamps, generations, strict=True):
            self._write("generation", stamp, generation)
        for stamp, data in zip(stamps, outputs["text"], strict=True):
            self._write("text", stamp, _decode("text", data))
        if generations:  # otherwise chunks of an unfinished answer, whose number is random
            pieces = [_decode("text_stream", data).data for data in outputs["text_stream"]]
            self._write("text_stream", stamps[-1], _string("".join(pieces)))
        for name in ("utterance", "action_chunk", "path", "overlay"):
            for data in outputs.get(name, ()):
                decoded = _decode(name, data)
                self._write(name, nanoseconds(decoded.header.stamp) or message.stamp, decoded)

    def _write(self, name: str, stamp: int, message: Any) -> None:
        # Serialized again, because padding bytes in a received message are arbitrary.
        data = typestore().serialize_cdr(message, OUTPUT_TYPES[name])
        self._writer.write(self._connections[name], stamp, data)
        self.counts[name] += 1


def refuse_existing(path: Path) -> None:
    """Raise FileExistsError if the path exists: a bag is never overwritten."""
    if path.exists() or path.is_symlink():
        raise FileExistsError(f"{path}: exists already; name a new bag, or remove it")


def _input_record(message: InputMessage, became: Mapping[str, int]) -> Any:
    record = {
        "topic": f"~/{message.name}",
        "type": message.type,
        "sha256": hashlib.sha256(message.data).hexdigest(),
        "became": {name: became[name] for name in sorted(became)},
    }
    return _string(json.dumps(record))


def _without_latencies(generation: Any) -> Any:
    names = [field.name for field in dataclasses.fields(generation) if field.name.endswith("_latency")]
    return dataclasses.replace(generation, **dict.fromkeys(names, 0.0))


def _decode(name: str, data: bytes) -> Any:
    return typestore().deserialize_cdr(data, OUTPUT_TYPES[name])


def _string(text: str) -> Any:
    return typestore().types[STRING](data=text)
