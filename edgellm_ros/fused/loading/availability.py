# SPDX-License-Identifier: Apache-2.0
"""Whether the fused kernels of a part are available, and what follows if not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from edgellm_ros.echo import quoted
from edgellm_ros.engine.device import Device
from edgellm_ros.engine.errors import DeviceLostError, DeviceMemoryError, EngineError
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.fused.plan.launch import OLDEST
from edgellm_ros.kernels.capability import compute_capability

AUTO, ENGINE, FUSED = DECODES = ("auto", "engine", "fused")  # values of the option `decode`
T = TypeVar("T")


class Unavailable(Exception):
    """The fused kernels of a part are not available; the text tells why."""


def check_decode(decode: str) -> None:
    """Raise ValueError for a value that the option `decode` does not have."""
    if decode not in DECODES:
        raise ValueError(f"decode must be one of {', '.join(DECODES)}, got {quoted(decode)}")


def load_if_wanted(
    load: Callable[[], T], decode: str, logger: logging.Logger, *, what: str, instead: str
) -> T | None:
    """Return what `load` loads; None where the engine runs.

    `decode` "auto": a line "`instead`: reason" goes to the log if `load` raises Unavailable. "fused": the
    reason is an EngineError. "engine": nothing is loaded.
    """
    if decode == ENGINE:
        return None
    try:
        return load()
    except Unavailable as reason:
        if decode == FUSED:
            raise EngineError(f"{what} not available: {reason}") from None
        logger.info("%s: %s", instead, reason)
        return None


def check_device(device: Device) -> None:
    """Raise Unavailable for a device that cannot run the fused kernels."""
    problem = device_problem(device)
    if problem is not None:
        raise Unavailable(problem)


def device_problem(device: Device) -> str | None:
    """Return why a device cannot run the fused kernels; None if it can."""
    if device.name != "cuda":
        return f"it needs the device 'cuda', not {device.name!r}"
    if compute_capability(device.arch) < OLDEST:
        return f"it needs a GPU of sm_{OLDEST} or later, not {device.description}"
    return None


def described(root: Path, name: str, config: EngineConfig, what: str) -> Path:
    """Return the path of a description; Unavailable without one.

    what: whose precision it is, such as "the engine".
    """
    if config.precision == "fp32":
        raise Unavailable(f"{what} has fp32, the kernels take fp16 and bf16")
    if not (root / name).is_file():
        raise Unavailable(f"the engine has no {name}: export it again")
    return root / name


def check_shape(problem: str | None, what: str) -> None:
    """Raise Unavailable if there is a reason why the kernels do not take a part."""
    if problem is not None:
        raise Unavailable(f"the kernels do not take {what}: {problem}")


@contextmanager
def made_or_unavailable() -> Iterator[None]:
    """Raise Unavailable where kernels cannot be made, for example without NVRTC."""
    try:
        yield
    except (DeviceLostError, DeviceMemoryError):
        raise
    except (EngineError, ImportError) as error:
        raise Unavailable(str(error)) from None
