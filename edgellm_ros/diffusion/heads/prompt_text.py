# SPDX-License-Identifier: Apache-2.0
"""Texts of prompts that policies share."""

from __future__ import annotations

import numpy as np

BINS = 256  # of a value from -1 to 1


def line(task: str) -> str:
    """Return the task with a line break at its end."""
    return task if task.endswith("\n") else f"{task}\n"


def cleaned(task: str) -> str:
    """Return the task stripped, with spaces in place of underscores and line breaks."""
    return task.strip().replace("_", " ").replace("\n", " ")


def state_bins(values: np.ndarray) -> list[int]:
    """Return the bin of each normalised value: 0 to 255 from -1 to 1.

    A value below -1 has the bin -1, as in the training of pi0.5; one above 1 has 255.
    """
    edges = np.linspace(-1, 1, BINS + 1)[:-1]
    return (np.searchsorted(edges, values, side="right") - 1).tolist()
