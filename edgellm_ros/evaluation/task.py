# SPDX-License-Identifier: Apache-2.0
"""A task: what workers do with an item, and what is kept of it."""

from __future__ import annotations

import hashlib
import math
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine_directory.adapters.adapter_folder import find_adapter
from edgellm_ros.engine_directory.adapters.adapter_source import find_source
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.engine_directory.files import list_files
from edgellm_ros.engine_directory.schema import to_dict

# {"result", "measured"} of an item that was finished, or {"failed": reason}
Outcome = dict[str, Any]
Run = Callable[[str], Outcome]

UNUSABLE = (ValueError, OSError, ImportError, NotImplementedError, EngineError)  # not a bug: bad input
SOURCES = ("*.py", "*.cu", "*.cuh", "sm_*.json")  # what a result depends on


class WorkerError(RuntimeError):
    """Error for workers that cannot begin, or that a bug has ended."""


class Task(Protocol):
    """What every worker does; can be pickled."""

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """Errors that end one item and not the evaluation."""

    @property
    def cores(self) -> int:
        """The number of cores that one worker keeps busy."""

    @property
    def gpus(self) -> int:
        """The number of GPUs that one worker needs."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables of the workers."""

    def open(self) -> AbstractContextManager[Run]:
        """Load what items need; yield the function that executes one item."""


def open_task(task: Task, stack: ExitStack) -> Run:
    """Open a task until the stack closes it.

    The returned function turns failures of an item into outcomes. A result with a number that is not finite
    is a failure: the results file has JSON. ValueError, from the function too, for options that cannot be
    used on this computer; WorkerError for a bug.
    """

    def checked(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except UNUSABLE as error:
            raise ValueError(str(error)) from error
        except Exception:
            raise WorkerError(f"a worker failed:\n{traceback.format_exc()}") from None

    run: Run = checked(lambda: stack.enter_context(task.open()))

    def run_safely(item: str) -> Outcome:
        try:
            outcome = run(item)
        except task.failures as error:
            return {"failed": f"{type(error).__name__}: {error}"}
        wrong = _not_finite("", outcome)
        return outcome if wrong is None else {"failed": f"{wrong}, expected a finite number"}

    return lambda item: checked(lambda: run_safely(item))


def _not_finite(name: str, value: Any) -> str | None:
    """Return name and value of the first number that JSON cannot hold."""
    if isinstance(value, Mapping):
        children = ((f"{name}.{key}".lstrip("."), child) for key, child in value.items())
    elif isinstance(value, (list, tuple)):
        children = ((f"{name}[{index}]", child) for index, child in enumerate(value))
    else:
        wrong = isinstance(value, float) and not math.isfinite(value)
        return f"{name} is {value}" if wrong else None
    return next(filter(None, (_not_finite(*child) for child in children)), None)


def code_digest(*others: str) -> str:
    """Return the SHA-256 in hex of the sources of `edgellm_ros` and of other packages.

    others: their names.
    """
    digest = hashlib.sha256()
    for name in ("edgellm_ros", *others):
        package = Path(str(import_module(name).__file__)).parent
        files = {path.relative_to(package) for pattern in SOURCES for path in package.rglob(pattern)}
        digest.update(_digest(package, sorted(files)).encode())
    return digest.hexdigest()


def engine_digest(engine_dir: Path, lora: str = "") -> str:
    """Return the SHA-256 of an engine's configuration and of an adapter, in hex.

    The configuration has the SHA-256 of every other file.
    """
    digest = hashlib.sha256(repr(to_dict(EngineConfig.load(engine_dir))).encode())
    adapter = find_adapter(engine_dir, lora)
    if adapter is not None:
        paths = find_source(adapter).files.values()
        entries = tuple(entry for path in paths for entry in list_files(path.parent, [path.name]))
        digest.update(repr(entries).encode())
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """Return the SHA-256 in hex of a file, or of all files of a folder.

    A folder's hash includes the names of its files.
    """
    if path.is_file():
        return _digest(path.parent, [Path(path.name)])
    return _digest(path, sorted(file.relative_to(path) for file in path.rglob("*") if file.is_file()))


def _digest(folder: Path, files: list[Path]) -> str:
    return hashlib.sha256(repr(list_files(folder, files)).encode()).hexdigest()
