# SPDX-License-Identifier: Apache-2.0
"""A thread of encoders without a thread: its runs end some turns after they began."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.runtime.scheduling.encoder_thread import EncodedRun

MOST_TURNS = 6  # that a run takes


class PlayedEncoder:
    """Takes the place of an EncoderThread; a seed decides how long runs take.

    turns: that each run takes, None = up to MOST_TURNS.

    A run is computed when it begins or when it ends. So rows that are read too early are old, and rows that
    others use too early are overwritten. An interrupted run is computed or not, like one that had ended.
    """

    def __init__(self, seed: int, turns: int | None = None) -> None:
        self._turns = turns
        self._rng = np.random.default_rng(seed)
        self._run: Callable[[], None] | None = None
        self._left = 0  # turns
        self._computed = self._interrupted = False
        self.interrupted = self.beside = 0  # runs that were interrupted, and turns beside a run

    @property
    def is_busy(self) -> bool:
        return self._run is not None

    def start(self, run: Callable[[], None]) -> None:
        assert self._run is None
        self._run = run
        self._left = int(self._rng.integers(MOST_TURNS)) if self._turns is None else self._turns
        self._computed = bool(self._rng.random() < 0.5)
        if self._computed:
            run()

    def interrupt(self) -> None:
        self.interrupted += not self._interrupted
        self._interrupted = True

    def take(self) -> EncodedRun | None:
        if self._run is None:
            return None
        if self._left > 0:
            self._left -= 1
            self.beside += 1
            return None
        interrupted, error = self._interrupted, None
        if interrupted:
            error = EngineError("the run was interrupted")
        self._end(computes=not interrupted or self._rng.random() < 0.5)
        return EncodedRun(0.0, error, interrupted)

    def wait(self) -> None:
        if self._run is not None:
            self._end(computes=not self._interrupted)

    def close(self) -> None:
        self.wait()

    def _end(self, computes: bool) -> None:
        run, self._run, self._interrupted = self._run, None, False
        if computes and not self._computed:
            run()
