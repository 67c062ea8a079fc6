# SPDX-License-Identifier: Apache-2.0
"""Compares two output bags: everything equal, but numbers of actions and paths within a tolerance."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from edgellm_ros.replay.bag import Bag, BagError, reason
from edgellm_ros.replay.inputs import INPUT_TYPES, NODE
from edgellm_ros.replay.recording import ENGINE_KEY, INPUT, OUTPUT_TYPES

COMPARED = tuple(name for name in OUTPUT_TYPES if name != "overlay")  # that is a drawing of the others
# Of one stamp, causes come first.
INPUT_TOPICS = [f"~/{name}" for name in INPUT_TYPES]
ORDER = INPUT_TOPICS + [f"~/{name}" for name in COMPARED]
IGNORED = {"request_id"}  # counts the plans before this one
NOTHING = "nothing"
SHOWN = 200  # characters of a long value


@dataclass(frozen=True)
class Difference:
    """Where two output bags differ: `stamp` of the input in nanoseconds; both values in words."""

    topic: str
    stamp: int
    field: str
    expected: str
    got: str

    @property
    def is_input(self) -> bool:
        """Whether the bags that were played differ, and not what the node made of them."""
        return self.topic in INPUT_TOPICS and self.field in ("message", "type", "sha256")

    def __str__(self) -> str:
        seconds, rest = divmod(self.stamp, 10**9)
        return (
            f"  topic     {self.topic}\n  stamp     {seconds}.{rest:09d}\n  field     {self.field}\n"
            f"  expected  {self.expected}\n  got       {self.got}"
        )


@dataclass(frozen=True)
class Comparison:
    """How an output bag compares with the expected one.

    messages: compared; differing: messages that differ, are missing, or are too many; first: the first of
    these by stamp, inputs that differ before outputs; deviation: the largest difference of numbers, also
    where it is within the tolerance; engine_files: those of the engine and the adapter that were not the
    same, or were there only once.
    """

    messages: int
    differing: int
    first: Difference | None
    deviation: float
    engine_files: tuple[str, ...]

    def report(self, expected: str, tolerance: float) -> str:
        """The comparison in words; `expected` is the other bag's name."""
        lines = []
        if self.engine_files:
            lines.append(f"the engine is not that of {expected}: {', '.join(self.engine_files)}")
        if self.first is None:
            how = (
                f"within {tolerance:g} (largest difference {self.deviation:.3g})"
                if self.deviation
                else "exactly"
            )
            lines.append(f"all {self.messages} messages are equal to those of {expected}, {how}")
        else:
            lines.append(f"{self.differing} of {self.messages} messages differ from {expected}; the first:")
            lines.append(str(self.first))
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class OutputBag:
    """An output bag in memory: messages by (stamp, topic), inputs' records among them under the names of
    their inputs, and the hashes of the files of the engine and the adapter.
    """

    messages: dict[tuple[int, str], list[Any]]
    engine: dict[str, str]


def read_output_bag(path: str | Path) -> OutputBag:
    """Read what `edgellm replay` has written. BagError if it cannot be read or is another bag."""
    names = {f"{NODE}/{name}": name for name in COMPARED}
    messages: dict[tuple[int, str], list[Any]] = defaultdict(list)
    with Bag(path) as bag:
        if ENGINE_KEY not in bag.custom:
            raise BagError(f"{path}: not an output bag of `edgellm replay`: no record of the engine")
        types = bag.recorded_types()
        try:
            engine = json.loads(bag.custom[ENGINE_KEY])
            for message in bag.messages([name for name in names if name in bag.topics]):
                name, decoded = names[message.topic.name], message.decode(types)
                content = json.loads(decoded.data) if name == INPUT else _samples_as_numbers(decoded)
                topic = content["topic"] if name == INPUT else f"~/{name}"
                messages[message.time, ORDER[ORDER.index(topic)]].append(content)
        except BagError:
            raise
        except Exception as error:  # as in Bag: whatever damaged data leads to
            raise BagError(f"{path}: damaged: {reason(error)}") from error
    return OutputBag(dict(messages), engine)


def compare(expected: OutputBag, got: OutputBag, tolerance: float) -> Comparison:
    """Compare message by message; `tolerance` is the largest difference that a number may have."""
    differences: list[Difference] = []
    compared, deviation = 0, 0.0
    keys = expected.messages.keys() | got.messages.keys()
    for stamp, topic in sorted(keys, key=lambda key: (key[0], ORDER.index(key[1]))):
        pairs = zip_longest(expected.messages.get((stamp, topic), []), got.messages.get((stamp, topic), []))
        for theirs, ours in pairs:
            compared += 1
            if theirs is None or ours is None:
                differences.append(Difference(topic, stamp, "message", _summary(theirs), _summary(ours)))
                continue
            fields = _FieldDifferences(tolerance)
            fields.compare("", theirs, ours)
            deviation = max(deviation, fields.deviation)
            if fields.first is not None:
                differences.append(Difference(topic, stamp, *fields.first))
    files = expected.engine.keys() | got.engine.keys()
    altered = sorted(file for file in files if expected.engine.get(file) != got.engine.get(file))
    # What was put in is the cause, also of outputs that carry an earlier stamp.
    first = min(differences, key=lambda difference: not difference.is_input, default=None)
    return Comparison(compared, len(differences), first, deviation, tuple(altered))


class _FieldDifferences:
    """The first field in which two messages differ. Fields that must be equal come before numbers."""

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._exact: tuple[str, str, str] | None = None
        self._number: tuple[str, str, str] | None = None
        self.deviation = 0.0

    @property
    def first(self) -> tuple[str, str, str] | None:
        """Field, expected and got; None if there is no difference."""
        return self._exact or self._number

    def compare(self, field: str, expected: Any, got: Any) -> None:
        """Walk both values, from the message down to numbers and words."""
        if dataclasses.is_dataclass(expected):
            for child in dataclasses.fields(expected):
                # A field that messages of an earlier version do not have cannot be compared.
                if child.name not in IGNORED and hasattr(got, child.name):
                    path = f"{field}.{child.name}".lstrip(".")
                    self.compare(path, getattr(expected, child.name), getattr(got, child.name))
        elif isinstance(expected, dict):
            for key in sorted(expected.keys() | got.keys()):
                path = f"{field}.{key}".lstrip(".")
                self.compare(path, expected.get(key, NOTHING), got.get(key, NOTHING))
        elif isinstance(expected, (list, np.ndarray)):
            if len(expected) != len(got):
                self._differ(f"{field}, length", len(expected), len(got))
            elif isinstance(expected, list) or not np.array_equal(expected, got):
                for index, pair in enumerate(zip(expected, got, strict=True)):
                    self.compare(f"{field}[{index}]", *pair)
        elif isinstance(expected, (float, np.floating)):
            self._compare_numbers(field, float(expected), float(got))
        elif expected != got:
            self._differ(field, expected, got)

    def _compare_numbers(self, field: str, expected: float, got: float) -> None:
        difference = abs(expected - got)
        if math.isfinite(difference):
            self.deviation = max(self.deviation, difference)
        if not difference <= self._tolerance and self._number is None:
            self._number = (field, f"{expected:.9g}", f"{got:.9g} (they differ by {difference:.3g})")

    def _differ(self, field: str, expected: Any, got: Any) -> None:
        if self._exact is None:
            self._exact = (field, _words(expected), _words(got))


def _samples_as_numbers(message: Any) -> Any:
    """The message; sound with its samples as numbers, which resampling may change in the last digits."""
    if getattr(message, "encoding", "") != "F32LE":
        return message
    return dataclasses.replace(message, data=np.frombuffer(message.data.tobytes(), "<f4"))


def _summary(message: Any) -> str:
    """What a message says, for one that has no counterpart."""
    if message is None:
        return NOTHING
    if isinstance(message, dict):
        return f"{message['type']} with SHA-256 {message['sha256']}"
    if hasattr(message, "sample_rate"):
        return f"{len(message.data) / message.sample_rate:.2f} s of sound"
    for field in ("text", "data"):
        if hasattr(message, field):
            return _words(getattr(message, field))
    return f"{len(message.poses)} poses" if hasattr(message, "poses") else f"{message.horizon} actions"


def _words(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"
