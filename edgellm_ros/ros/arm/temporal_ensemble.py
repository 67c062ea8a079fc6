# SPDX-License-Identifier: Apache-2.0
"""Temporal ensembling: the weighted mean of all chunks that predict one time.

    chunk 0   o--o--o--o--o            weights at this time, for the coefficient m:
    chunk 1      o--o--o--o--o         exp(0)
    chunk 2         o--o-|o--o--o      exp(-m)
                         |             exp(-2 m), divided by their sum

The arithmetic of LeRobot's ACTTemporalEnsembler, by the stamps of the frames in place of the count of steps.
Needs no ROS and reads no clock.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MAX_CHUNKS = 256  # the newest ones count
ON_THE_ROW = 1e-4  # of a row: stamps are whole ns


class TemporalEnsemble:
    """The chunks that a mean is made of, from the oldest to the newest."""

    def __init__(self) -> None:
        self._chunks: list[tuple[int, float, NDArray[np.float64]]] = []

    def clear(self) -> None:
        """Forget all chunks."""
        self._chunks.clear()

    def add(self, stamp: int, dt: float, rows: NDArray[np.float64], coeff: float) -> NDArray[np.float64]:
        """Store a chunk, and return the mean [T, J] at the times of its rows [T, J].

        - Row k is for the time `stamp` (ns) + (k + 1) `dt` (s). No chunk has an older stamp than the one
          before it.
        - A chunk counts for the times from its first row to its last, on a straight line from row to row. Of
          the chunks that count for a time, the oldest has the weight 1, each next one exp(-coeff) times that
          of the one before.
        """
        self._chunks = [*self._chunks[1 - MAX_CHUNKS :], (stamp, dt, rows)]
        lengths = np.array([len(each) for _, _, each in self._chunks])[:, None]
        behind = np.array([(stamp - each) * 1e-9 for each, _, _ in self._chunks])[:, None]
        dts = np.array([each for _, each, _ in self._chunks])[:, None]
        # the row [C, T] of each chunk at the times of the new one's rows
        places = (behind + dt * np.arange(1, len(rows) + 1)) / dts - 1
        counts = (places > -ON_THE_ROW) & (places < lengths - 1 + ON_THE_ROW)
        all_rows = np.concatenate([each for _, _, each in self._chunks])
        self._chunks = [each for each, has in zip(self._chunks, counts.any(1), strict=True) if has]
        places = np.clip(places, 0, lengths - 1)
        before = places.astype(np.int64)
        after = np.minimum(before + 1, lengths - 1)
        part = (places - before)[..., None]
        first = np.cumsum(lengths)[:, None] - lengths
        values = all_rows[first + before] * (1 - part) + all_rows[first + after] * part
        weights = counts * np.exp(-coeff * (np.cumsum(counts, 0) - 1))
        return np.einsum("ct,ctj->tj", weights / weights.sum(0), values)
