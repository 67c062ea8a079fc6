# SPDX-License-Identifier: Apache-2.0
"""The installed TensorRT libraries, and their log.

Three libraries have the same interface: TensorRT; its lean runtime, which loads version-compatible plans;
and TensorRT for RTX, which has plans of its own.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import platform
import sys
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.tensorrt.errors import engine_error
from edgellm_ros.engine.tensorrt.plan_file import RTX, TENSORRT, TITLES

if TYPE_CHECKING:
    import tensorrt as trt

T = TypeVar("T")
LEAN = "tensorrt_lean"  # Python module of the lean runtime
LIBRARIES = (TENSORRT, RTX, LEAN)  # in the order in which they are tried
FIRST_VERSIONS = {TENSORRT: (10, 15), LEAN: (10, 15), RTX: (1, 7)}  # 10.15: the first with TensorScatter
PACKAGES = {TENSORRT: "tensorrt-cu13", LEAN: "tensorrt-lean-cu13", RTX: "tensorrt_rtx_cu13"}  # for pip
RTX_MACHINES, RTX_PYTHONS = ("x86_64", "AMD64"), ((3, 9), (3, 14))  # that TensorRT for RTX has wheels for
KEPT_LINES = 20  # of the log, in errors


class Library(Protocol):
    """The parts of the modules `tensorrt` and `tensorrt_rtx` that we use.

    `tensorrt_lean` has the parts for loading and running.
    """

    __name__: str
    __version__: str
    Builder: type[trt.Builder]
    BuilderFlag: type[trt.BuilderFlag]
    DataType: type[trt.DataType]
    ExecutionContextAllocationStrategy: type[trt.ExecutionContextAllocationStrategy]
    IAttentionOutputLayer: type[trt.IAttentionOutputLayer]
    ILogger: type[trt.ILogger]
    LayerType: type[trt.LayerType]
    MemoryPoolType: type[trt.MemoryPoolType]
    NetworkDefinitionCreationFlag: type[trt.NetworkDefinitionCreationFlag]
    OnnxParser: type[trt.OnnxParser]
    Runtime: type[trt.Runtime]
    TensorIOMode: type[trt.TensorIOMode]
    TensorLocation: type[trt.TensorLocation]

    def __hash__(self) -> int: ...


class LibraryLog(Protocol):
    """The log of a library."""

    failed: bool  # whether there was an error since the last `take`

    def take(self) -> str:
        """Return the latest warnings and errors as one text, and clear them."""
        ...


def load_library(name: str) -> Library:
    """Import a library by its module's name.

    EngineError if it is not installed, cannot be installed here, or is too old.
    """
    try:
        library = cast(Library, importlib.import_module(name))
    except (ImportError, OSError) as error:
        raise EngineError(f"{_title(name)} is not installed ({error}): {_how_to_install(name)}") from None
    if version_of(library.__version__) < FIRST_VERSIONS[name]:
        first = ".".join(map(str, FIRST_VERSIONS[name]))
        raise EngineError(f"{title_of(library)} is too old, {first} or later is needed")
    return library


def title_of(library: Library) -> str:
    """Return name and version of a library, for messages."""
    return f"{_title(library.__name__)} {library.__version__}"


def _title(name: str) -> str:
    return TITLES.get(name, "TensorRT's lean runtime")


def _how_to_install(name: str) -> str:
    here = (platform.machine(), sys.version_info[:2])
    if name == RTX and not (here[0] in RTX_MACHINES and RTX_PYTHONS[0] <= here[1] <= RTX_PYTHONS[1]):
        first, last = (".".join(map(str, version)) for version in RTX_PYTHONS)
        python = ".".join(map(str, here[1]))
        return f"it is for x86-64 and Python {first} to {last}, this is Python {python} on {here[0]}"
    return f"pip install {PACKAGES[name]}"


def version_of(text: str) -> tuple[int, ...]:
    """Return the numbers of a version, to compare."""
    return tuple(int(part) for part in text.split(".") if part.isdigit())


@functools.cache
def library_log(library: Library) -> Any:
    """Return the library's log: a `LibraryLog`, and an `ILogger` of the library.

    There is one log in the process, because TensorRT ignores every logger but the first. Everything also goes
    to Python's logging.
    """
    logger_class = library.ILogger

    class Log(logger_class):  # type: ignore[valid-type, misc]  # the module is imported at run time
        def __init__(self) -> None:
            logger_class.__init__(self)
            self._lines: deque[str] = deque(maxlen=KEPT_LINES)
            self.failed = False
            self._levels = {
                logger_class.Severity.INTERNAL_ERROR: logging.ERROR,
                logger_class.Severity.ERROR: logging.ERROR,
                logger_class.Severity.WARNING: logging.WARNING,
                logger_class.Severity.INFO: logging.DEBUG,
            }

        def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
            level = self._levels.get(severity)
            if level is None:
                return
            if level >= logging.WARNING:
                self._lines.append(msg.strip())
                self.failed = self.failed or level == logging.ERROR
            logging.getLogger(__name__).log(min(level, logging.INFO), "TensorRT: %s", msg)

        def take(self) -> str:
            lines, self._lines, self.failed = self._lines, deque(maxlen=KEPT_LINES), False
            return "; ".join(lines) or "TensorRT gave no reason"

    return Log()


def start(library: Library, make: Callable[[trt.ILogger], T]) -> T:
    """Make a Runtime or Builder of the library. EngineError if that fails here.

    Without a usable CUDA, TensorRT 11.4 logs an error and returns an object that crashes the process when it
    is called or freed; a null pointer becomes a TypeError.
    """
    log = library_log(library)
    log.take()
    try:
        made: T | None = make(log)
    except TypeError:
        made = None
    if made is None or log.failed:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))  # so that it is never freed
        raise engine_error(f"{title_of(library)} does not work here: {log.take()}")
    return made
