# SPDX-License-Identifier: Apache-2.0
"""A chunk of joint positions, read from an ActionChunk. Needs no ROS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm_ros.ros.arm.contract import Contract, check_columns
from edgellm_ros.ros.chunk_checks import MAX_ROWS, RefusedChunkError, check_length, read_rows


@dataclass(frozen=True)
class Chunk:
    """Positions of the joints in ROS's units.

    Row k is reached (k + 1) dt after the stamp.
    """

    stamp: int  # ns, of the frame that the chunk answers
    request_id: str
    dt: float  # s
    targets: NDArray[np.float64]  # rad or m [T, J]


def read_chunk(
    contract: Contract,
    stamp: int,
    *,
    request_id: str,
    dt: float,
    horizon: int,
    names: Sequence[str],
    units: Sequence[str],
    values: Sequence[float] | NDArray,
    max_rows: int = MAX_ROWS,
) -> Chunk:
    """Check the fields of an ActionChunk, and convert its values.

    Columns may have any order. Raises RefusedChunkError for a chunk that is too long, does not fit the
    contract, or is malformed in any value.
    """
    check_length(horizon, len(names), values, max_rows)
    if len(units) != len(names):
        raise RefusedChunkError("wrong_units", f"{len(units)} units for {len(names)} names")
    try:
        check_columns(contract, names, [""] * len(names))
    except ValueError as error:
        raise RefusedChunkError("wrong_names", str(error)) from None
    try:
        check_columns(contract, names, units)
    except ValueError as error:
        raise RefusedChunkError("wrong_units", str(error)) from None
    rows = read_rows(dt, horizon, len(names), values)
    columns = [list(names).index(name) for name in contract.policy_names]
    return Chunk(stamp, request_id, dt, contract.to_ros(rows[:, columns]))
