# SPDX-License-Identifier: Apache-2.0
"""Sampling: the actions of one request while they are sampled, part by part."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from edgellm_ros.diffusion.chunking import ConditionedRun
from edgellm_ros.engine.device import HostCopy
from edgellm_ros.engine.errors import EngineError


@dataclass(frozen=True)
class Part:
    """Steps of some samples that are queued together."""

    samples: range
    steps: range


def parts_of(samples: int, steps: int, most_samples: int, most_steps: int) -> list[Part]:
    """Divide a sampling: into groups of samples, and the steps of each group.

    Groups have at most `most_samples` and nearly equal sizes. A part has about as much work as one step of
    `most_samples`, unless `most_steps` is less.
    """
    groups = -(-samples // most_samples)
    bounds = [samples * number // groups for number in range(groups + 1)]
    parts = []
    for first, end in pairwise(bounds):
        size = min(most_steps, max(1, most_samples // (end - first)))
        for start in range(0, steps, size):
            parts.append(Part(range(first, end), range(start, min(start + size, steps))))
    return parts


class Sampling:
    """What is left of a sampling, and its results.

    `ActionRunner.begin` makes it, `queue_part` goes on with it.

    - noise [n, 1+N, T, A] float32: of the start, then that which the first N steps add
    - steps: of each sample
    - report: called before every step of a group of samples with the number of steps before; False cancels
    - run: None = no chunk is continued
    """

    def __init__(
        self,
        noise: np.ndarray,
        seed: int,
        steps: int,
        report: Callable[[int], bool],
        parts: list[Part],
        run: ConditionedRun | None = None,
    ) -> None:
        self.steps = steps
        self.run = run
        self.is_cancelled = False
        self._noise = noise
        self._report = report
        self._reported = 0
        self._origin = f"noise seed {seed}, {steps} steps"  # for errors
        self._parts = deque(parts)
        self._saved: HostCopy | None = None  # before the next part, if others were queued meanwhile
        self._copies: list[HostCopy] = []  # of each group of samples, after its last step

    @property
    def done(self) -> bool:
        """Whether no part is left."""
        return self.is_cancelled or not self._parts

    @property
    def part(self) -> Part:
        """The next part."""
        return self._parts[0]

    def save(self, trajectory: HostCopy) -> None:
        """Keep the trajectory with which the next part begins."""
        self._saved = trajectory

    def start(self) -> np.ndarray:
        """Return the trajectory [n,T,A] with which the next part begins.

        The trajectory is noise, or the saved one. May be called once for each part.
        """
        if self.part.steps.start:
            assert self._saved is not None
            return self._saved.wait()
        return np.ascontiguousarray(self._noise[self.part.samples, 0])

    def added(self) -> np.ndarray:
        """Return the noise [steps,n,T,A] that the steps of the next part add.

        There may be less of it than steps.
        """
        samples, steps = self.part.samples, self.part.steps
        added = self._noise[samples.start : samples.stop, 1 + steps.start : 1 + steps.stop]
        return np.ascontiguousarray(added.swapaxes(0, 1))

    def report(self) -> bool:
        """Report a step before it is queued; return False if the sampling ends there."""
        self.is_cancelled = not self._report(self._reported)
        self._reported += 1
        return not self.is_cancelled

    def queued(self, trajectory: HostCopy | None) -> None:
        """Take note that the next part has been queued; trajectory: after the last step."""
        self._parts.popleft()
        if trajectory is not None:
            self._copies.append(trajectory)

    def read(self) -> np.ndarray:
        """Wait for the actions [n,T,A] float32 of all parts.

        EngineError if they are not finite.
        """
        copies = [copy.wait() for copy in self._copies]
        actions = copies[0] if len(copies) == 1 else np.concatenate(copies)
        if not np.isfinite(actions).all():
            raise EngineError(f"the actions are not finite ({self._origin})")
        return actions
