# SPDX-License-Identifier: Apache-2.0
"""Input files of a request: images and past poses. Every error names the file."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm_ros.echo import quoted

if TYPE_CHECKING:
    import numpy as np


def read_image(path: str | Path) -> np.ndarray:
    """Read an image file that OpenCV can decode as RGB uint8 [H, W, 3].

    Raises ValueError for an unreadable or empty file.
    """
    import cv2
    import numpy as np

    data = read_bytes(path)
    if not data:
        raise ValueError(f"{path}: the image file is empty")
    with silenced_stderr():
        image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    if image is None:
        raise ValueError(f"{path}: not an image that OpenCV can read ({len(data)} bytes)")
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)


def read_history(path: str | Path) -> np.ndarray:
    """Read past poses from a .json, .npy or .csv file, oldest first.

    Returns float64 [N, 2..3]: x and y in metres, heading in radians, in the robot's frame.
    """
    import numpy as np

    suffix = Path(path).suffix.lower()
    data = read_bytes(path)
    try:
        if suffix == ".json":
            poses = np.asarray(json.loads(data), np.float64)
        elif suffix == ".npy":
            poses = np.asarray(np.load(path, allow_pickle=False), np.float64)
        elif suffix == ".csv":
            rows = [line.split(",") for line in data.decode().splitlines() if line.strip()]
            poses = np.asarray([[float(cell) for cell in row] for row in rows], np.float64)
        else:
            raise ValueError(f"expected a .json, .npy or .csv file, got {quoted(suffix)}")
        if poses.ndim != 2 or poses.shape[1] not in (2, 3) or not len(poses):
            raise ValueError(f"expected N rows of x, y[, heading], got shape {list(poses.shape)}")
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
            values = np.asarray(json.loads(read_bytes(given)), np.float32)
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


@contextlib.contextmanager
def silenced_stderr() -> Iterator[None]:
    """Discard what image codecs write to file descriptor 2.

    Our error is the one line that names the file.
    """
    sys.stderr.flush()
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


def read_bytes(path: str | Path) -> bytes:
    """Return the contents of a file.

    Raise an error that names the path if it is not a file.
    """
    if Path(path).is_dir():
        raise IsADirectoryError(f"{path}: is a directory, expected a file")
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such file")
    return Path(path).read_bytes()
