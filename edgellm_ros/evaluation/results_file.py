# SPDX-License-Identifier: Apache-2.0
"""An evaluation's results as JSON lines; an interrupted evaluation continues them.

The first line has the kind of evaluation and its options, each other line the outcome of one item. One
process writes; a line is on the disk before the next item counts as finished. A last line that was cut short,
when the process or the computer was stopped, is ignored and removed.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from edgellm_ros.echo import printable
from edgellm_ros.evaluation.task import Outcome
from edgellm_ros.ros.processes import held_back_signals
from edgellm_ros.strict_json import parse_json, strict_json

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Results:
    """The contents of a results file."""

    kind: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    finished: dict[str, Outcome] = field(default_factory=dict)  # by item
    failed: dict[str, str] = field(default_factory=dict)  # reasons by item
    size: int = 0  # bytes of the lines that are complete


def read_results(path: Path) -> Results:
    """Read a results file.

    ValueError for a file of another kind, or damaged before its last line.
    """
    return _parse(path, path.read_bytes())


class ResultsFile:
    """A results file that is open for writing; at most one at a time."""

    def __init__(self, path: Path, kind: str, options: Mapping[str, Any], restart: bool = False) -> None:
        """Open or create the file.

        restart: discard the results of an earlier evaluation. ValueError if the file has other options, is
        damaged, or is open elsewhere.
        """
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._lock()
            results = Results() if restart else _parse(path, path.read_bytes())
            if results.kind:
                _check_same(path, results, kind, options)
            self._finished = results.finished
            os.ftruncate(self._file, results.size)
            os.lseek(self._file, results.size, os.SEEK_SET)
            if not results.kind:
                self._write({"evaluation": kind, "format_version": FORMAT_VERSION, "options": dict(options)})
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    @property
    def finished(self) -> Mapping[str, Outcome]:
        """Return the outcomes by item, without items that failed."""
        return self._finished

    def add(self, item: str, outcome: Outcome) -> bool:
        """Write an item's outcome; return False if the item is finished already.

        If so, nothing is written. OSError if the line cannot be written; the file then ends with the line
        before. SIGINT and SIGTERM wait until the outcome is written; KeyboardInterrupt follows. For the main
        thread.
        """
        if item in self._finished:
            return False
        with held_back_signals():
            self._write({"item": item, **outcome})
            if "failed" not in outcome:
                self._finished[item] = outcome
        return True

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{self.path}: another evaluation is writing to this file") from None

    def _write(self, content: Mapping[str, Any]) -> None:
        line = strict_json(content).encode() + b"\n"
        size = os.lseek(self._file, 0, os.SEEK_CUR)
        try:
            written = os.write(self._file, line)
            if written != len(line):  # the disk is full
                written += os.write(self._file, line[written:])
            os.fsync(self._file)
        except BaseException:
            os.ftruncate(self._file, size)
            os.lseek(self._file, size, os.SEEK_SET)
            raise


def _parse(path: Path, data: bytes) -> Results:
    lines = data.split(b"\n")[:-1]  # what follows the last line break was cut short
    contents: list[dict[str, Any]] = []
    size = 0
    for number, line in enumerate(lines, 1):
        try:
            content = parse_json(line)
            if not isinstance(content, dict) or not ("item" in content if contents else _is_header(content)):
                raise ValueError
        except ValueError:
            if number == len(lines) and contents:
                break  # a computer that was switched off may leave zeros
            raise ValueError(f"{path}: line {number} is not one of an evaluation's results") from None
        contents.append(content)
        size += len(line) + 1
    if not contents:
        if data and not b'{"evaluation"'.startswith(data[:13]):
            raise ValueError(f"{path}: line 1 is not one of an evaluation's results")
        return Results()
    header, *outcomes = contents
    if header["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"{path}: format version {printable(str(header['format_version']))}, expected {FORMAT_VERSION}"
        )
    results = Results(header["evaluation"], header["options"], size=size)
    for outcome in outcomes:
        item = outcome.pop("item")
        if "failed" in outcome:
            results.failed[item] = outcome["failed"]
        elif item not in results.finished:
            results.finished[item] = outcome
            results.failed.pop(item, None)
    return results


def _is_header(content: Mapping[str, Any]) -> bool:
    return {"evaluation", "format_version", "options"} <= content.keys()


def _check_same(path: Path, results: Results, kind: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError, with every difference, if a file has results of other options."""
    advice = "name another --out, or start over with --restart"
    if results.kind != kind:
        raise ValueError(f"{path}: results of `evaluate {printable(results.kind)}`: {advice}")
    names = list(dict.fromkeys([*results.options, *options]))
    differences = [
        f"{name} is {_short(options.get(name))}, there {_short(results.options.get(name))}"
        for name in names
        if results.options.get(name) != options.get(name)
    ]
    if differences:
        raise ValueError(f"{path}: results with other options ({'; '.join(differences)}): {advice}")


def _short(value: Any) -> str:
    text = printable(json.dumps(value))
    return text if len(text) <= 40 else text[:12] + '..."'
