# SPDX-License-Identifier: Apache-2.0
"""Past motion as tokens, as in Alpamayo.

The first point and the steps from point to point are quantised to bins.
"""

from __future__ import annotations

import numpy as np

from edgellm_ros.diffusion.config import TrajectoryHistoryConfig

FARTHEST = 1e30  # metres; any position beyond gets the last bin, and fp32 does not overflow


def check_history(
    history: np.ndarray | None, config: TrajectoryHistoryConfig, speed: float = 0.0
) -> np.ndarray:
    """Check a history; return its positions [num_points, axes] in metres.

    history [num_points, 2 or 3]: x, y and an optional heading in the robot's current frame, oldest first,
    `dt` seconds apart; the last point is the current pose. With an axis z also [num_points, 4]: x, y, heading
    and z, which is 0 otherwise. None means that the robot drove straight on at `speed` (m/s). ValueError for
    another shape or values that are not finite.
    """
    count, axes = config.num_points, len(config.axes)
    positions = np.zeros((count, axes))
    if history is None:
        positions[:, 0] = speed * config.dt * np.arange(1 - count, 1)
        return positions
    points, widths = np.asarray(history, np.float64), (2, 3) if axes == 2 else (2, 3, 4)
    if points.ndim != 2 or points.shape[0] != count or points.shape[1] not in widths:
        named = "2 or 3" if axes == 2 else "2, 3 or 4"
        raise ValueError(f"history must have shape [{count}, {named}], got {list(points.shape)}")
    if not np.isfinite(points).all():
        raise ValueError("history has values that are not finite")
    positions[:, :2] = points[:, :2]
    if points.shape[1] == 4:
        positions[:, 2] = points[:, 3]
    return positions


def history_tokens(points: np.ndarray, config: TrajectoryHistoryConfig) -> list[int]:
    """Convert points [num_points, axes] to token ids, point by point.

    Axes have the order of the configuration. Values outside [low, high] get the nearest bin.
    """
    dtype = np.float32 if config.single_precision else np.float64
    points = np.clip(points, -FARTHEST, FARTHEST).astype(dtype)
    values = np.concatenate([points[:1], np.diff(points, axis=0)])
    low, high = np.array(config.low, dtype), np.array(config.high, dtype)
    bins = np.round((values - low) / (high - low) * dtype(config.num_tokens - 1))  # half to even
    bins = np.clip(bins, 0, config.num_tokens - 1).astype(np.int64)
    return (config.first_token_id + bins).reshape(-1).tolist()


def history_speed(points: np.ndarray, config: TrajectoryHistoryConfig) -> float:
    """Return the speed over the last interval in m/s."""
    return float(np.linalg.norm(points[-1, :2] - points[-2, :2]) / config.dt)
