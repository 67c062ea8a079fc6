# SPDX-License-Identifier: Apache-2.0
"""Past motion as tokens, as in Alpamayo.

The first point and the steps from point to point are quantised to bins.
"""

from __future__ import annotations

import numpy as np

from edgellm_ros.diffusion.config import TrajectoryHistoryConfig


def check_history(
    history: np.ndarray | None, config: TrajectoryHistoryConfig, speed: float = 0.0
) -> np.ndarray:
    """Check a history; return its positions [num_points, 2] in metres.

    history [num_points, 2 or 3]: x, y and an optional heading in the robot's current frame, oldest first,
    `dt` seconds apart; the last point is the current pose. None means that the robot drove straight on at
    `speed` (m/s). ValueError for another shape or values that are not finite.
    """
    if history is None:
        ahead = speed * config.dt * np.arange(1 - config.num_points, 1)
        return np.column_stack([ahead, np.zeros(config.num_points)])
    points = np.asarray(history, np.float64)
    if points.ndim != 2 or points.shape[0] != config.num_points or points.shape[1] not in (2, 3):
        raise ValueError(f"history must have shape [{config.num_points}, 2 or 3], got {list(points.shape)}")
    if not np.isfinite(points).all():
        raise ValueError("history has values that are not finite")
    return points[:, :2]


def history_tokens(points: np.ndarray, config: TrajectoryHistoryConfig) -> list[int]:
    """Convert points [num_points, 2] to token ids, point by point, x before y.

    Values outside [low, high] get the nearest bin.
    """
    values = np.concatenate([points[:1], np.diff(points, axis=0)])
    low, high = np.array(config.low), np.array(config.high)
    bins = np.round((values - low) / (high - low) * (config.num_tokens - 1))  # round half to even
    bins = np.clip(bins, 0, config.num_tokens - 1).astype(np.int64)
    return (config.first_token_id + bins).reshape(-1).tolist()


def history_speed(points: np.ndarray, config: TrajectoryHistoryConfig) -> float:
    """Return the speed over the last interval in m/s."""
    return float(np.linalg.norm(points[-1] - points[-2]) / config.dt)
