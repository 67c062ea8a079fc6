# SPDX-License-Identifier: Apache-2.0
"""DecodeLoop: decode steps of a batch until every sequence has ended.

The device feeds its tokens to itself, so the host queues the next step before it reads what the last one drew
(`Device.max_queued_steps`):

  device   step 1 | step 2 | step 3 |
  host     queue 1, 2   read 1, queue 3   read 2, ...

A sequence has ended when the host says so: it knows stop strings and cancellation. By then one more step of
it may be queued. That one is done too, because it is also the others' step, and what it does for the sequence
that has ended counts for nothing: its row lies behind those that count, its token goes to nobody. So that it
always has a row, no step is queued that some sequence has no room for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from edgellm_ros.engine.device import Device
from edgellm_ros.runtime.batch.linear_kv_cache import LinearKVCache
from edgellm_ros.runtime.batch.sampling_rows import SampledTokens, TokenSampler
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.decoding.vanilla import DecodeStep


class DecodeLoop:
    """Runs steps and hands out their tokens; a sequence that has ended leaves the batch."""

    def __init__(self, device: Device, cache: LinearKVCache, sampler: TokenSampler, step: DecodeStep) -> None:
        self._device = device
        self._cache = cache
        self._sampler = sampler
        self._step = step

    def run(self, sequences: Sequence[GenerationSequence]) -> tuple[list[GenerationSequence], int]:
        """Decode sequences that have their first token, until all have ended.

        Returns them in the order in which the KV cache then has them, and the number of steps. If it raises,
        steps may still be queued.
        """
        batch, steps = list(sequences), 0
        for sequence in batch:
            sequence.report("decode", steps)
        active = self._evict_ended(batch, len(batch))
        while active:
            steps = self._run_until_one_ends(batch[:active], steps)
            active = self._evict_ended(batch, active)
        return batch, steps

    def _run_until_one_ends(self, sequences: Sequence[GenerationSequence], steps: int) -> int:
        """Go on counting `steps` until a sequence has ended and the device has nothing more to do."""
        self._step.begin([sequence.adapter for sequence in sequences])
        queued: deque[SampledTokens] = deque()
        while True:
            wanted = min(1 + self._device.max_queued_steps, *(sequence.steps_left for sequence in sequences))
            while len(queued) < wanted:
                self._step.queue()
                queued.append(self._step.copy_to_host(sequences))
            if not queued:
                return steps
            served = [sequence.decoding for sequence in sequences]
            self._sampler.deliver(queued.popleft(), sequences)
            self._cache.count_step(served)
            steps += 1
            for sequence, was_served in zip(sequences, served, strict=True):
                if was_served:
                    sequence.report("decode", steps)

    def _evict_ended(self, batch: list[GenerationSequence], active: int) -> int:
        """Put those of the first `active` sequences that have ended behind the others; returns their number.

        The KV cache and the sampler do the same.
        """
        for index in reversed(range(active)):
            if not batch[index].decoding:
                active -= 1
                self._cache.evict(index)
                self._sampler.evict(index, active)
                batch.insert(active, batch.pop(index))
        return active
