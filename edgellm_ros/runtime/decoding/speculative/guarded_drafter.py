# SPDX-License-Identifier: Apache-2.0
"""GuardedDrafter: a drafter whose failure ends drafting, and not the request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.errors import DeviceLostError, EngineError
from edgellm_ros.engine.executor import BoundRun
from edgellm_ros.engine.packed_arrays import Fields
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels import DraftTree
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.decoding.speculative.drafter import Drafter
from edgellm_ros.runtime.engines.prompt_inputs import PromptRun

logger = logging.getLogger(__name__)


class DraftingError(EngineError):
    """There is no draft."""


class GuardedDrafter:
    """Passes calls on until one fails with an EngineError.

    The error is logged, and from then on the drafter does nothing. A lost device is raised: the base model
    cannot go on either. Errors while a graph is recorded are raised too: rounds then run without a graph.
    """

    def __init__(self, drafter: Drafter, device: Device) -> None:
        self.drafter = drafter
        self._device = device
        self.name, self.kv_cache = drafter.name, drafter.kv_cache
        self.failed = False

    def open(self, row: int, sequence: GenerationSequence) -> None:
        """Begin a sequence; see `RowState`."""
        self.drafter.open(row, sequence)

    def move(self, source: int, target: int) -> None:
        """Copy a row; see `RowState`."""
        self.drafter.move(source, target)

    def close(self, row: int) -> None:
        """End a row; see `RowState`."""
        self.drafter.close(row)

    def clear_row(self, row: int) -> None:
        """Zero buffers that may contain NaN; see `Drafter`."""
        self.drafter.clear_row(row)

    def commit(self, counts: Tensor) -> None:
        """Do nothing; see `Drafter`."""

    def prompt_fields(self, batch: int, tokens: int) -> Fields:
        """Return the arrays of prompts; see `Drafter`."""
        return self.drafter.prompt_fields(batch, tokens)

    def write_prompts(
        self,
        arrays: Mapping[str, np.ndarray],
        sequences: Sequence[GenerationSequence],
        rows: range,
        part: Sequence[range],
    ) -> None:
        """Write the arrays of prompts; see `Drafter`."""
        self.drafter.write_prompts(arrays, sequences, rows, part)

    def prefilled(self, run: PromptRun, embeds: Tensor, inputs: Mapping[str, Tensor]) -> list[BoundRun]:
        """Take note of prompts; see `Drafter`."""
        runs: list[BoundRun] = []
        self._try(lambda: runs.extend(self.drafter.prefilled(run, embeds, inputs)))
        return runs

    def resume(self, batch: int) -> None:
        """Prepare a round; see `Drafter`. DraftingError after a failure."""
        self._try(lambda: self.drafter.resume(batch))
        self._check()

    def propose(self, tree: DraftTree) -> None:
        """Write a tree; see `Drafter`. DraftingError after a failure."""
        self._try(lambda: self.drafter.propose(tree))
        self._check()

    def drafted(self, batch: int, size: int) -> None:
        """Take note of a round; see `Drafter`."""
        self.drafter.drafted(batch, size)

    def bind(self, batch: int) -> list[BoundRun]:
        """Bind the engines of a round; see `Drafter`."""
        return self.drafter.bind(batch)

    def bind_acceptance(self, batch: int, nodes: int) -> list[BoundRun]:
        """Bind the engines of an acceptance; see `Drafter`."""
        return self.drafter.bind_acceptance(batch, nodes)

    def started(self, rows: range, tokens: Tensor, counts: Tensor) -> None:
        """Take note of first tokens; see `Drafter`."""
        self._try(lambda: self.drafter.started(rows, tokens, counts))

    def accepted(self, tokens: Tensor, path: Tensor, counts: Tensor) -> None:
        """Take note of committed tokens; see `Drafter`."""
        self._try(lambda: self.drafter.accepted(tokens, path, counts))

    def _check(self) -> None:
        if self.failed:
            raise DraftingError(f"drafting ({self.name}) has failed")

    def _try(self, call: Callable[[], None]) -> None:
        if self.failed:
            return
        try:
            call()
        except DeviceLostError:
            raise
        except EngineError as error:
            if self._device.capturing:
                raise
            self.failed = True
            logger.warning("drafting (%s) has failed, decoding goes on without it: %s", self.name, error)
