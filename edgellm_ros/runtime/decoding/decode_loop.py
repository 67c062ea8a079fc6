# SPDX-License-Identifier: Apache-2.0
"""DecodeLoop: decode steps of a batch until a sequence ends.

The device feeds its tokens to itself, so the host queues the next step before it waits for the tokens of the
last one (`Device.max_queued_steps`):

  device   step 1 | step 2 | step 3 |
  host     queue 1, 2   deliver 1, queue 3   deliver 2, ...

The host decides when a sequence has ended: it knows stop strings and cancellation. By then one more step may
be queued. That step still runs for the other sequences; for the finished one its tokens are dropped. No step
is queued for which some sequence has no KV slot left.
"""

from __future__ import annotations

from collections import deque

from edgellm_ros.runtime.batch.batch import Batch
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.batch.step_result import StepResult
from edgellm_ros.runtime.decoding.method import DecodeMethod


class DecodeLoop:
    """Runs the steps of a decode method and delivers their tokens. `steps`: how many were delivered."""

    def __init__(self, batch: Batch, method: DecodeMethod, max_queued_steps: int) -> None:
        self._batch = batch
        self._method = method
        self._max_queued_steps = max_queued_steps
        self.steps = 0

    def run_until_one_ends(self) -> list[GenerationSequence]:
        """Decode until at least one sequence has ended and no step is queued; return the ended ones.

        If it raises, steps may still be queued.
        """
        sequences = list(self._batch.sequences)
        if all(sequence.decoding for sequence in sequences):
            self._method.begin(self._batch)
        queued: deque[StepResult] = deque()
        while True:
            # A step takes at least one token of each sequence.
            wanted = min(1 + self._max_queued_steps, *(sequence.tokens_left for sequence in sequences))
            while len(queued) < wanted:
                queued.append(self._method.queue())
            if not queued:
                return [sequence for sequence in sequences if not sequence.decoding]
            served = queued.popleft().deliver(sequences)
            self.steps += 1
            for sequence, count in served:
                sequence.kv_length += count
                sequence.steps += 1
                sequence.report("decode", sequence.steps)
