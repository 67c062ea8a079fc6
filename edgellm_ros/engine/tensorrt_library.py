# SPDX-License-Identifier: Apache-2.0
"""The installed TensorRT library, full or lean: log, errors, names of plans."""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import re
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from edgellm_ros.engine.errors import DeviceLostError, DeviceMemoryError, EngineError

if TYPE_CHECKING:
    import tensorrt as trt

T = TypeVar("T")
FULL, LEAN = (
    "tensorrt",
    "tensorrt_lean",
)  # Python modules; the lean library only loads version-compatible plans
FIRST_VERSION = (10, 15)  # the first parser with TensorScatter, which becomes an update in place
COMPATIBLE = "-compatible"  # ends the name of a version-compatible plan
KEPT_LINES = 20
OUT_OF_MEMORY = ("out of memory", "outofmemory", "failed_allocation", "could not be allocated")
LOST = ("illegal memory access", "unspecified launch failure", "misaligned address", "device-side assert")
# Words of TensorRT's reasons for not loading a plan, with their meaning; the first that match count. TensorRT
# 11.4 writes "[file::function::line] Error Code 1: Cuda Runtime (...)" or "IRuntime::deserializeCudaEngine:
# Error Code 1: Serialization (...)". Names of files and functions say nothing about the reason.
NAMES = re.compile(r"\[[^\[\]]*::[^\[\]]*\]|[\w~]+(?:::[\w~]+)+(?:\([^()]*\))?")
GPU_REASON = (
    "cuda runtime",
    "cuda driver",
    "cuda initialization",
    "cuda error",
    "cudaerror",
    "insufficient driver",
)
BAD_PLAN = (
    (
        (
            "incompatible device",
            "expecting compute",
            "compute capability",
            "current device",
            "platform specific tag",
        ),
        "the plan was made for another GPU or platform",
    ),
    (
        (
            "version of tensorrt",
            "version tag",
            "expecting library version",
            "serialization version",
            "runtime major version",
            "deserialization call on a newer plan",
            "supported starting tensorrt",
        ),
        "another TensorRT made the plan",
    ),
    (
        (
            "serialization assertion",
            "magic tag",
            "not a valid plan",
            "no engine found in plan",
            "empty blob",
            "empty memory buffer",
            "post deserialization check",
            "failed to read plan",
            "planentrytype",
            "truncated",
            "corrupt",
        ),
        "the file is damaged or no plan",
    ),
)


class Library(Protocol):
    """The parts of the module `tensorrt` that we use.

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


def load_library(*names: str) -> Library:
    """Import TensorRT: the first of the modules `names` that is installed.

    Without names: the full library, else the lean runtime. EngineError if none is installed, or if the
    version is too old.
    """
    problems = []
    for name in names or (FULL, LEAN):
        try:
            library = cast(Library, importlib.import_module(name))
        except ImportError as error:
            problems.append(str(error))
            continue
        if version_of(library.__version__) < FIRST_VERSION:
            raise EngineError(f"TensorRT {library.__version__} is too old, 10.15 or later is needed")
        return library
    raise EngineError(
        f"TensorRT is not installed ({'; '.join(problems)}): pip install tensorrt-cu13"
        + ("" if names else ", or tensorrt-lean-cu13, which runs plans made with --version-compatible")
    )


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
        raise engine_error(f"TensorRT {library.__version__} does not work here: {log.take()}")
    return made


def engine_error(message: str) -> EngineError:
    """Make the kind of EngineError that fits a message of TensorRT."""
    lowered = message.lower()
    if any(words in lowered for words in OUT_OF_MEMORY):
        return DeviceMemoryError(message)
    if any(words in lowered for words in LOST):
        return DeviceLostError(message)
    return EngineError(message)


def plan_error(path: Path, version: str, reason: str) -> EngineError:
    """Make the error for a plan that cannot be loaded.

    The text has TensorRT's reason, its meaning, and advice.
    """
    error = engine_error(f"{path}: TensorRT {version} cannot load the plan: {reason}")
    if type(error) is not EngineError:
        return error
    words = NAMES.sub("", reason).lower()
    if any(word in words for word in GPU_REASON):
        return EngineError(f"{error} (the GPU or its driver is the reason, not the plan: see `nvidia-smi`)")
    meaning = next((text for found, text in BAD_PLAN if any(word in words for word in found)), "")
    advice = f"`edgellm build {path.parent.parent}` makes one for this GPU and this TensorRT"
    return EngineError(f"{error} ({meaning + ': ' if meaning else ''}{advice})")


def plan_path(model: Path, arch: str, version: str, compatible: bool = False) -> Path:
    """Return the path of a graph's plan, named after GPU and TensorRT."""
    return model.with_name(f"{arch}-trt{version}{COMPATIBLE if compatible else ''}.plan")


def find_plan(model: Path, arch: str, library: Library) -> Path:
    """Find the plan of a graph for this GPU and this library.

    The plan of the same TensorRT version, or else the latest version-compatible plan of an older version; the
    lean library loads only the latter. EngineError lists the plans that exist.
    """
    version = library.__version__
    exact = plan_path(model, arch, version)
    if exact.is_file() and library.__name__ != LEAN:
        return exact
    found = {}
    for path in model.parent.glob(f"{arch}-trt*{COMPATIBLE}.plan"):
        made_by = version_of(path.name.removeprefix(f"{arch}-trt").removesuffix(f"{COMPATIBLE}.plan"))
        if made_by <= version_of(version):
            found[made_by] = path
    if found:
        return found[max(found)]
    there = ", ".join(sorted(path.name for path in model.parent.glob("*.plan"))) or "none"
    kind = "version-compatible plan" if library.__name__ == LEAN else "plan"
    option = " --version-compatible" if library.__name__ == LEAN else ""
    raise EngineError(
        f"{model.parent}: no {kind} for {arch} and TensorRT {version} (there: {there}); "
        f"run `edgellm build {model.parent.parent}{option}` on this machine"
    )
