# SPDX-License-Identifier: Apache-2.0
"""Checks that a chunk of actions passes before a robot moves by it. Needs no ROS."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MAX_ROW_S, MAX_ROWS = 10.0, 1000
REMEMBERED = 256  # chunks that are recognised when they come again
TABLE_REASONS = ("wrong_names", "wrong_units", "wrong_dt", "wrong_size", "too_long", "not_finite")
ORDER_REASONS = (
    "stopped", "from_future", "repeated", "before_start", "out_of_order", "used_up", "too_old",
)  # fmt: skip


class RefusedChunkError(ValueError):
    """A chunk that is not followed. `reason` is the name of its counter."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def check_length(horizon: int, columns: int, values: Sequence[float] | NDArray, max_rows: int) -> None:
    """Raise RefusedChunkError for more than `max_rows` rows.

    The values are not read.
    """
    rows = max(horizon, len(values) // max(columns, 1))
    if rows > max_rows:
        raise RefusedChunkError("too_long", f"{rows} rows, at most {max_rows} (parameter max_chunk_rows)")


def read_rows(
    dt: float, horizon: int, columns: int, values: Sequence[float] | NDArray
) -> NDArray[np.float64]:
    """Return the values of an ActionChunk as rows [horizon, columns].

    Raises RefusedChunkError for a dt that is not positive or above MAX_ROW_S, for a wrong size, and for
    values that are not finite.
    """
    if not 0 < dt <= MAX_ROW_S:  # false for NaN
        raise RefusedChunkError("wrong_dt", f"dt must be above 0 and at most {MAX_ROW_S:g} s, got {dt}")
    table = np.asarray(values, np.float64)
    if horizon < 1 or table.size != horizon * columns:
        raise RefusedChunkError(
            "wrong_size", f"{table.size} values, expected horizon x names = {horizon} x {columns}"
        )
    if not np.isfinite(table).all():
        raise RefusedChunkError("not_finite", "values that are not finite")
    return table.reshape(horizon, columns)


class ChunkOrder:
    """Accepts each chunk once, in the order of the frames, while it is fresh."""

    def __init__(self, earliest: int) -> None:
        """`earliest`: frames from before this time (ns) are refused."""
        self._earliest = earliest
        self._newest: int | None = None
        self._seen: deque[tuple[int, str]] = deque(maxlen=REMEMBERED)

    def accept(
        self, stamp: int, request_id: str, *, end: int, now: int, max_age: float, future_tolerance: float
    ) -> None:
        """Remember a chunk.

        `stamp` of its frame, `end` of its last row and `now` in ns; `max_age` of the frame and
        `future_tolerance` in seconds. Raises RefusedChunkError for a chunk that is not to be followed.
        """
        age = (now - stamp) * 1e-9
        if age < -future_tolerance:
            raise RefusedChunkError("from_future", f"a frame {-age:.2f} s in the future")
        if (stamp, request_id) in self._seen:
            raise RefusedChunkError("repeated", "a chunk that arrived before")
        if stamp < self._earliest:
            raise RefusedChunkError("before_start", "a frame from before the activation or ~/resume")
        if self._newest is not None and stamp < self._newest:
            behind = (self._newest - stamp) * 1e-9
            raise RefusedChunkError("out_of_order", f"a frame {behind:.2f} s older than the newest chunk's")
        if end <= now:
            raise RefusedChunkError("used_up", f"all rows are past since {(now - end) * 1e-9:.2f} s")
        if age > max_age:
            raise RefusedChunkError("too_old", f"a frame {age:.2f} s old")
        self._seen.append((stamp, request_id))
        self._newest = stamp
