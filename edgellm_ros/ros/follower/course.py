# SPDX-License-Identifier: Apache-2.0
"""A chunk of actions as speeds and curvatures over time; checks that it must pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm_ros.echo import quoted
from edgellm_ros.ros.chunk_checks import MAX_ROWS, RefusedChunkError, check_length, read_rows

COLUMNS = {"acceleration": "m/s^2", "curvature": "1/m"}  # of a unicycle, with their units


@dataclass(frozen=True)
class Limits:
    """What the robot may do."""

    speed: float  # m/s
    acceleration: float  # m/s^2
    deceleration: float  # m/s^2, positive
    curvature: float  # 1/m, to either side
    lateral_acceleration: float  # m/s^2


@dataclass(frozen=True)
class Chunk:
    """The actions of one trajectory.

    Row k applies in [k dt, (k + 1) dt) after the stamp.
    """

    stamp: int  # ns, of the frame that the chunk answers
    request_id: str
    dt: float  # s
    accelerations: NDArray[np.float64]  # m/s^2 [T]
    curvatures: NDArray[np.float64]  # 1/m [T]

    @property
    def end(self) -> int:
        """The time in ns at which the last row ends."""
        return self.stamp + round(len(self.curvatures) * self.dt * 1e9)


def read_chunk(
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
    """Check the fields of an ActionChunk.

    Columns may have any order. Raises RefusedChunkError for more than `max_rows` rows, before the values are
    read, for other columns or units than COLUMNS, for a wrong size, for values that are not finite, and for a
    dt that is not positive or above MAX_ROW_S.
    """
    check_length(horizon, len(COLUMNS), values, max_rows)
    names, units = list(names), list(units)
    if sorted(names) != sorted(COLUMNS):
        raise RefusedChunkError(
            "wrong_names", f"columns {quoted(names)}: a unicycle takes {', '.join(COLUMNS)}"
        )
    expected = [COLUMNS[name] for name in names]
    if units != expected:
        raise RefusedChunkError("wrong_units", f"units {quoted(units)}, expected {', '.join(expected)}")
    columns = dict(zip(names, read_rows(dt, horizon, len(names), values).T, strict=True))
    return Chunk(stamp, request_id, dt, columns["acceleration"], columns["curvature"])


@dataclass(frozen=True)
class Course:
    """Speeds and curvatures of a chunk over time, within the robot's limits.

    The follower takes the speeds of a plan, not its accelerations, so deviations do not accumulate.
    """

    stamp: int  # ns
    dt: float  # s
    end: int  # ns
    speeds: NDArray[np.float64]  # m/s at the rows' borders [T+1], linear between them
    curvatures: NDArray[np.float64]  # 1/m [T]

    @classmethod
    def of(cls, chunk: Chunk, speed: float, limits: Limits) -> Course:
        """Integrate the accelerations from `speed` (m/s), the robot's at the stamp.

        The robot does not drive backwards.
        """
        changes = np.clip(chunk.accelerations, -limits.deceleration, limits.acceleration) * chunk.dt
        speeds = [min(max(speed, 0.0), limits.speed)]
        for change in changes.tolist():
            speeds.append(min(max(speeds[-1] + change, 0.0), limits.speed))
        curvatures = np.clip(chunk.curvatures, -limits.curvature, limits.curvature)
        return cls(chunk.stamp, chunk.dt, chunk.end, np.array(speeds), curvatures)

    def speed_at(self, time: int) -> float:
        """Return the speed in m/s at `time` (ns).

        Before the stamp it is the first speed, after the end the last.
        """
        row = min(max((time - self.stamp) * 1e-9 / self.dt, 0.0), float(len(self.curvatures)))
        index = min(int(row), len(self.curvatures) - 1)
        before, after = self.speeds[index : index + 2]
        return float(before + (row - index) * (after - before))

    def curvature_at(self, time: int) -> float:
        """Return the curvature in 1/m at `time` (ns).

        Before the stamp it is the first curvature, after the end the last.
        """
        row = math.floor((time - self.stamp) * 1e-9 / self.dt)
        return float(self.curvatures[min(max(row, 0), len(self.curvatures) - 1)])
