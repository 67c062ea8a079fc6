# SPDX-License-Identifier: Apache-2.0
"""Streams that a caller gives to a device."""

from __future__ import annotations

from edgellm_ros.echo import quoted

DEFAULTS = {0: "legacy default", 1: "legacy default", 2: "per-thread default"}  # by handle


def stream_handle(stream: object) -> int:
    """Return the handle of a CUDA stream: a `cudaStream_t`.

    stream: the handle, or an object with the method `__cuda_stream__` of CUDA Python's stream protocol.
    ValueError for another value, and for the default streams: no graph can be recorded on the legacy one, and
    the per-thread one is another in each thread.
    """
    handle: object = stream
    if hasattr(stream, "__cuda_stream__"):
        version, handle = stream.__cuda_stream__()
        if version != 0:
            raise ValueError(f"stream: version {quoted(version)} of the protocol is not known, only 0 is")
    try:
        if isinstance(handle, (bool, float, str, bytes)):
            raise TypeError
        number = int(handle)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        raise ValueError(
            f"stream must be a handle or an object with __cuda_stream__, got {quoted(stream)}"
        ) from None
    if number < 0:
        raise ValueError(f"stream must be a handle of a stream, got {number}")
    if number in DEFAULTS:
        raise ValueError(
            f"stream must be a stream of its own, got the {DEFAULTS[number]} stream ({number}): "
            "graphs need one stream for all threads that can be recorded"
        )
    return number
