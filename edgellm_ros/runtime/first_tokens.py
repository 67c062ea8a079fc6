# SPDX-License-Identifier: Apache-2.0
"""FirstTokens: samples and commits the tokens after prompts, as one graph."""

from __future__ import annotations

from functools import partial

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.executor import BoundRun
from edgellm_ros.engine.recorded_work import RecordedWork
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.runtime.batch.sampling_rows import SamplingRows
from edgellm_ros.runtime.decoding.method import DecodeMethod


class FirstTokens:
    """`recorded`: graphs by rows, once it is active."""

    def __init__(self, device: Device, sampling: SamplingRows) -> None:
        self._sampling = sampling
        self.recorded = RecordedWork(device, "first tokens")

    def use(self, method: DecodeMethod) -> None:
        """Give tokens to this decode method from now on; no step may be queued."""
        self._method = method
        self.recorded.drop(lambda key: True)  # buffers of the sampler have another size

    def sample(self, logits: Tensor, rows: range) -> None:
        """Queue the sampling from logits [B,1,V] of admitted rows; always the same memory."""
        self.recorded.run((rows,), partial(self._queue, logits, rows))

    def _queue(self, logits: Tensor, rows: range) -> list[BoundRun]:
        """Queue the tokens; return no runs of engines."""
        self._sampling.sample(logits, rows)
        self._sampling.commit_rows(rows, self._sampling.count(rows))
        self._method.prefilled(rows)
        return []
