# SPDX-License-Identifier: Apache-2.0
"""Compares two output bags.

Numbers of actions and paths may differ within a tolerance; everything else must be equal.
"""

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
from edgellm_ros.replay.inputs import INPUT_TYPES, JOINT_STATES, NODE, types_of
from edgellm_ros.replay.recording import ENGINE_KEY, INPUT, OUTPUT_TYPES

COMPARED = tuple(name for name in OUTPUT_TYPES if name != "overlay")  # a drawing of the others
IGNORED = {"request_id"}  # a counter of plans
NOTHING = "nothing"
SHOWN = 200  # characters of a long value


@dataclass(frozen=True)
class Difference:
    """A difference between two output bags."""

    topic: str
    stamp: int  # of the input, in nanoseconds
    field: str
    expected: str  # both values as text
    got: str

    @property
    def is_input(self) -> bool:
        """Return whether the inputs differ, and not the node's outputs."""
        return _is_input(self.topic) and self.field in ("message", "type", "sha256")

    def __str__(self) -> str:
        seconds, rest = divmod(self.stamp, 10**9)
        return (
            f"  topic     {self.topic}\n  stamp     {seconds}.{rest:09d}\n  field     {self.field}\n"
            f"  expected  {self.expected}\n  got       {self.got}"
        )


@dataclass(frozen=True)
class Comparison:
    """Result of the comparison with the expected output bag."""

    messages: int  # compared
    differing: int  # that differ, are missing, or have no counterpart
    first: Difference | None  # the first by stamp; inputs that differ come before outputs
    deviation: float  # the largest difference of numbers, within the tolerance too
    engine_files: tuple[str, ...]  # of the engine and the adapter, that differ or are in one of the bags only

    def report(self, expected: str, tolerance: float) -> str:
        """Describe the comparison; `expected`: the name of the expected bag."""
        lines = []
        if self.engine_files:
            lines.append(f"the engine differs from that of {expected}: {', '.join(self.engine_files)}")
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
    """Contents of an output bag."""

    messages: dict[
        tuple[int, str], list[Any]
    ]  # by stamp and topic; a record of an input under its input's topic
    engine: dict[str, str]  # SHA-256 by file of the engine and the adapter


def read_output_bag(path: str | Path) -> OutputBag:
    """Read an output bag of `edgellm replay`.

    Raises BagError if it is damaged or another kind of bag.
    """
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
                if name == INPUT and not _is_input(topic):
                    raise ValueError(f"a record of an input on {topic!r}, which is no input")
                messages[message.time, topic].append(content)
        except BagError:
            raise
        except Exception as error:  # as in Bag: damaged data raises errors of any class
            raise BagError(f"{path}: damaged: {reason(error)}") from error
    return OutputBag(dict(messages), engine)


def compare(expected: OutputBag, got: OutputBag, tolerance: float) -> Comparison:
    """Compare message by message.

    `tolerance`: the largest allowed difference of numbers.
    """
    differences: list[Difference] = []
    compared, deviation = 0, 0.0
    keys = expected.messages.keys() | got.messages.keys()
    for stamp, topic in sorted(keys, key=lambda key: (key[0], _rank(key[1]))):
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
    # Inputs are the cause, of outputs with an earlier stamp too.
    first = min(differences, key=lambda difference: not difference.is_input, default=None)
    return Comparison(compared, len(differences), first, deviation, tuple(altered))


def _is_input(topic: str) -> bool:
    return topic.startswith("~/") and bool(types_of(topic.removeprefix("~/")))


def _rank(topic: str) -> tuple[bool, int, str]:
    """Return the place of a topic among messages of one stamp: inputs come first."""
    name, is_output = topic.removeprefix("~/"), not _is_input(topic)
    known = COMPARED if is_output else (*INPUT_TYPES, JOINT_STATES)
    return is_output, known.index(name) if name in known else len(known), name  # the last ones: cameras


class _FieldDifferences:
    """Finds the first field in which two messages differ.

    Exact fields come before numbers.
    """

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._exact: tuple[str, str, str] | None = None
        self._number: tuple[str, str, str] | None = None
        self.deviation = 0.0

    @property
    def first(self) -> tuple[str, str, str] | None:
        """Return field, expected and actual value; None if there is no difference."""
        return self._exact or self._number

    def compare(self, field: str, expected: Any, got: Any) -> None:
        """Compare two values down to their numbers and strings."""
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
    """Return the message with audio samples as numbers.

    Resampling may change their last digits on another CPU.
    """
    if getattr(message, "encoding", "") != "F32LE":
        return message
    return dataclasses.replace(message, data=np.frombuffer(message.data.tobytes(), "<f4"))


def _summary(message: Any) -> str:
    """Summarise a message that has no counterpart."""
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
