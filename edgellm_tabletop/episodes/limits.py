# SPDX-License-Identifier: Apache-2.0
"""How near an arm's commands came to the limits of its contract."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgellm_ros.ros.arm.contract import Contract
from edgellm_tabletop.episodes.robot import PERIOD_S, Record

ROUNDING = 1e-6  # of a limit


def shares_of_limits(record: Record, contract: Contract) -> dict[str, np.ndarray]:
    """Return positions, speeds, accelerations and jerks as shares of the limits.

    Each is [N, J], for all commands. A position's share is its distance from the middle of the range: 1 is an
    end of the range. A speed is that of the trajectory or the way in a period of the controller, whichever is
    larger; an acceleration is the change of speed in a period, a jerk that of the acceleration.
    """
    positions, speeds = np.array(record.positions), np.array(record.speeds)
    ways = np.diff(positions, axis=0, prepend=positions[:1]) / PERIOD_S
    accelerations = np.diff(speeds, axis=0, prepend=speeds[:1]) / PERIOD_S
    jerks = np.diff(accelerations, axis=0, prepend=accelerations[:1]) / PERIOD_S
    low, high = contract.limits("position").T
    return {
        "position": np.abs(positions - (low + high) / 2) / ((high - low) / 2),
        "speed": np.maximum(np.abs(speeds), np.abs(ways)) / contract.limits("speed"),
        "acceleration": np.abs(accelerations) / contract.limits("acceleration"),
        "jerk": np.abs(jerks) / contract.limits("jerk"),
    }


def check_limits(record: Record, contract: Contract) -> dict[str, Any]:
    """Return the largest share of each limit, and the number of commands beyond one."""
    shares = shares_of_limits(record, contract)
    beyond = np.any([share > 1 + ROUNDING for share in shares.values()], axis=(0, 2))
    largest = {f"largest_{name}": float(share.max()) for name, share in shares.items()}
    return {**largest, "violations": int(beyond.sum())}
