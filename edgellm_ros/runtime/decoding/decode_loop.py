# SPDX-License-Identifier: Apache-2.0
"""DecodeLoop: decode steps until a sequence ends, or others want a turn.

Sampled tokens stay on the device as the input of the next step, so the host queues a step before it waits
for the tokens of the previous one (`Device.max_queued_steps`):

  device   step 1 | step 2 | step 3 |
  host     queue 1, 2   deliver 1, queue 3   deliver 2, ...

The host decides when a sequence has ended, because only the host checks stop strings and cancellation. By
then one more step may be queued. The step still runs for the other sequences; the tokens of the finished
sequence are dropped.

A step may yield several tokens. How many is not known when the next step is queued, so a step gets the room
that remains if every queued step yields its most tokens. The host queues no step without room. A decode
method may want a step delivered before the next one is queued (`queues_ahead`).

The first token of a newcomer need not be delivered before the first step either:

  device   prompt, first token | step 1 | step 2 |
  host     queue prompt, 1, 2   deliver the first token, then 1, queue 3   ...

Parts of other prompts are queued behind steps, one for each:

  device   step 1 | part | step 2 | part |
  host     queue 1, part   deliver 1, queue 2, part   deliver 2, ...
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from edgellm_ros.runtime.batch.batch import Batch
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.batch.step_result import StepResult
from edgellm_ros.runtime.decoding.method import DecodeMethod


class DecodeLoop:
    """Runs the steps of a decode method; `steps`: number of delivered steps."""

    def __init__(self, batch: Batch, method: DecodeMethod, max_queued_steps: int, capacity: int) -> None:
        self._batch = batch
        self._method = method
        self._max_queued_steps = max_queued_steps
        self._capacity = capacity
        self.steps = 0

    def run(
        self,
        interrupted: Callable[[], bool] = lambda: False,
        first_tokens: Callable[[], None] | None = None,
        behind: Callable[[], None] | None = None,
    ) -> list[GenerationSequence]:
        """Decode until a sequence has ended; return the ended sequences.

        Returns earlier, but not before one step, when `interrupted` returns True. No step is queued when this
        method returns. After an exception, steps may still be queued.

        - first_tokens: delivers one token of each newcomer, which has been queued; None = there is none
        - behind: queues other work after each step, such as a part of a prompt, which changes no row of these
          sequences. If the method does not queue ahead, this method returns after one step instead
        """
        sequences = self._batch.stepping
        going = [sequence for sequence in sequences if not sequence.held]
        if all(sequence.decoding for sequence in going):
            self._method.begin(self._batch)
        queued: deque[StepResult] = deque()
        on_the_way = 0  # most tokens of the queued steps
        first = self.steps
        while True:
            ahead = self._method.queues_ahead(going)
            wanted = self._wanted(going, ahead, is_first=first_tokens is not None)
            if behind is not None:
                wanted = min(wanted, 1)
            if self.steps > first and (interrupted() or (behind is not None and not ahead)):
                wanted = 0
            while len(queued) < wanted:
                room = self._room(sequences) - on_the_way
                if queued and room < 1:
                    break
                step = self._method.queue(room)
                on_the_way += step.most_tokens
                queued.append(step)
            if first_tokens is not None:
                first_tokens()
                first_tokens = None
                continue
            if not queued:
                return [sequence for sequence in going if not sequence.decoding]
            if behind is not None and ahead:
                behind()
            result = queued.popleft()
            on_the_way -= result.most_tokens
            served = result.deliver(sequences)
            self.steps += 1
            for sequence, count in served:
                sequence.kv_length += count
                sequence.steps += 1
                sequence.report("decode", sequence.steps)
            self._method.delivered(result, served)

    def _wanted(self, sequences: list[GenerationSequence], ahead: bool, is_first: bool) -> int:
        """Return how many steps to have queued.

        A step yields at least one token per sequence. ahead: whether steps may be queued ahead; is_first:
        whether first tokens are on the way.
        """
        most = min(sequence.tokens_left for sequence in sequences) - is_first
        return min(1 + self._max_queued_steps if ahead else 1 - is_first, most)

    def _room(self, sequences: list[GenerationSequence]) -> int:
        """Return how many more KV rows every row has slots and positions for."""
        return self._capacity - max(sequence.used_slots for sequence in sequences)
