# SPDX-License-Identifier: Apache-2.0
"""Files of numbers of a request: past poses, and a robot's state."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from edgellm_ros.echo import quoted
from edgellm_ros.io.contents import read_bytes
from edgellm_ros.strict_json import parse_json

if TYPE_CHECKING:
    import numpy as np


def read_history(path: str | Path) -> np.ndarray:
    """Read past poses from a .json, .npy or .csv file, oldest first.

    Returns float64 [N, 2..4]: x and y in metres, heading in radians, z in metres, in the robot's frame.
    """
    import numpy as np

    suffix = Path(path).suffix.lower()
    data = read_bytes(path)
    try:
        if suffix == ".json":
            poses = np.asarray(parse_json(data), np.float64)
        elif suffix == ".npy":
            poses = np.asarray(np.load(path, allow_pickle=False), np.float64)
        elif suffix == ".csv":
            rows = [line.split(",") for line in data.decode().splitlines() if line.strip()]
            poses = np.asarray([[float(cell) for cell in row] for row in rows], np.float64)
        else:
            raise ValueError(f"expected a .json, .npy or .csv file, got {quoted(suffix)}")
        if poses.ndim != 2 or poses.shape[1] not in (2, 3, 4) or not len(poses):
            raise ValueError(f"expected N rows of x, y[, heading[, z]], got shape {list(poses.shape)}")
        if not np.isfinite(poses).all():
            raise ValueError("poses must be finite")
    except (ValueError, TypeError, EOFError) as error:
        raise ValueError(f"{path}: {error}") from None
    return poses


def read_state(given: str) -> np.ndarray:
    """Read a robot's state from numbers separated by commas, or from a file.

    The file is a .json or .npy file with a list. Returns float32 [D]. ValueError or OSError.
    """
    import numpy as np

    suffix = Path(given).suffix.lower()
    try:
        if suffix == ".json":
            values = np.asarray(parse_json(read_bytes(given)), np.float32)
        elif suffix == ".npy":
            read_bytes(given)
            values = np.asarray(np.load(given, allow_pickle=False), np.float32)
        else:
            values = np.asarray([float(part) for part in given.split(",")], np.float32)
        if values.ndim != 1:
            raise ValueError(f"expected a list of numbers, got shape {list(values.shape)}")
    except (ValueError, TypeError, EOFError) as error:
        raise ValueError(f"--state {given}: {error}") from None
    return values
