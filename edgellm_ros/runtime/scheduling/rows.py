# SPDX-License-Identifier: Apache-2.0
"""Rows: the submitted requests that have a row of the batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from edgellm_ros.engine.errors import DeviceLostError
from edgellm_ros.runtime import prefix_reuse
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.metrics import NO_SECONDS, RuntimeMetrics
from edgellm_ros.runtime.pipeline import Pipeline
from edgellm_ros.runtime.response import response_of
from edgellm_ros.runtime.scheduling.encoder_thread import EncodedRun, EncoderThread
from edgellm_ros.runtime.scheduling.encoding import Encoding
from edgellm_ros.runtime.scheduling.entry import Entry
from edgellm_ros.runtime.scheduling.guard import Guard
from edgellm_ros.runtime.scheduling.keeping import Keeping, NextTurn
from edgellm_ros.runtime.scheduling.turn_clocks import TurnClocks
from edgellm_ros.runtime.stages.prompts_in_parts import PromptsInParts

logger = logging.getLogger(__name__)

PART_TOKENS = prefix_reuse.PART_TOKENS  # of prompts, between two steps
LAG = 2  # turns until their work is done, where the device works while the host goes on


class Rows:
    """Does the work of a turn for `running` requests; not thread-safe.

    If the work of some requests fails, they end with the error, and the others go on.
    """

    def __init__(
        self, pipeline: Pipeline, metrics: RuntimeMetrics, encoder: EncoderThread | None = None
    ) -> None:
        self.running: list[Entry] = []
        self.encoding = Encoding(pipeline.encoders, encoder, metrics.multimodal)
        self._pipeline = pipeline
        self._metrics = metrics
        self._keeping = Keeping(pipeline)
        self._free_slots = set(range(pipeline.batch.max_size))  # of encoder rows
        self._stepping: Sequence[Entry] = ()  # the requests of the steps
        self._ends_with_part = False  # whether a part of a prompt is queued behind the last step
        self._clocks = TurnClocks(pipeline.device.mark, metrics, lag=LAG if self.computes_behind else 0)
        self._guard = Guard(
            pipeline,
            metrics.scheduling,
            self.running,
            self._keeping.turns,
            free=self._free,
            free_turn=self._free_turn,
        )
        self.fail_all = self._guard.fail_all

    @property
    def are_free(self) -> bool:
        """Whether one more request can begin."""
        return bool(self._free_slots or self._keeping.turns)

    def cost_of(self, tokens: int) -> int:
        """Return what tokens of a prompt take of the PART_TOKENS of a turn."""
        is_whole = tokens > 0 and not self._pipeline.device.short_parts
        return PART_TOKENS if is_whole else max(1, tokens)

    @property
    def computes_behind(self) -> bool:
        """Whether work may be queued behind a step: the device does not need the host."""
        return self._pipeline.device.max_queued_steps > 0

    @property
    def wants_turn(self) -> bool:
        """Whether a request beside those that step has failed or ended, or waits to step."""
        return self._guard.has_failed or any(
            entry.first_token is not None or not (entry.sequence.decoding or entry.sequence.wants_part)
            for entry in self.running
        )

    @property
    def is_idle(self) -> bool:
        """Whether no request has a row, and no next turn is to be stored."""
        return not self.running and not self._keeping.turns

    @property
    def next_turn(self) -> NextTurn | None:
        """The next turn of a conversation that may be computed now."""
        return self._keeping.next_turn(self.running, self.encoding.is_busy)

    def begin_turn(self) -> None:
        """Begin to measure a turn; ended requests leave."""
        self._clocks.begin_turn()
        for entry in self.running:  # steps ask those that they decode
            if not entry.sequence.held or not entry.stop.is_set():
                continue
            if entry.is_prompted:
                entry.sequence.report("decode", entry.sequence.steps)
            else:
                entry.sequence.report("prefill", 0)
                entry.sequence.prefix_keys = []  # of a prompt that is not complete nothing is stored
        self.leave_ended(self.running)

    def end_turn(self) -> None:
        """Count the seconds of turns."""
        self._guard.run(self.running, lambda: self._clocks.end_turn(is_last=self.is_idle))

    def begin(self, entry: Entry) -> int:
        """Begin a request: compute the first part of its prompt; return the tokens.

        A row must be free. 0 tokens if the request waits for the encoders.
        """
        return self._guard.run([entry], partial(self._begin, entry))

    def take_encoded(self) -> None:
        """Take what the encoders have computed since the last turn, or why they failed."""
        taken = self.encoding.take()
        if taken is not None:
            entry, ended = taken
            self._guard.run([entry], partial(self._encoded, entry, ended))

    def compute_part(self, entry: Entry) -> int:
        """Compute the next part of a prompt; return its tokens."""
        return self._guard.run([entry], partial(self._compute_part, entry))

    def may_begin_behind(self, entry: Entry) -> bool:
        """Return whether a request may begin behind a step: no other moves or gives way."""
        place, rows = self._pipeline.batch.place_of(entry.sequence), self._pipeline.batch.sequences
        is_last = not self._is_first(entry) and not any(sequence.decoding for sequence in rows[place:])
        return is_last and bool(self._free_slots)

    def work_behind(self, entry: Entry | None) -> int:
        """Compute a part of a prompt behind a step that is queued; return its tokens.

        A request without a row begins. None = nothing is behind this step.
        """
        self._ends_with_part = entry is not None
        if entry is None:
            return 0
        self._clocks.of(*self._stepping).end("decode_s")
        work = self._compute_part if entry in self.running else partial(self._begin, at_end=True)
        return self._guard.run_beside(entry, partial(work, entry))

    def keep_part(self) -> bool:
        """Compute a part of the next turn of a conversation; return whether there is one."""
        turn = self.next_turn
        if turn is not None:
            self._keep_part(turn)
        return turn is not None

    def _keep_part(self, turn: NextTurn) -> None:
        try:
            is_last = self._keeping.compute_part(turn, PART_TOKENS)
        except DeviceLostError as error:
            self._guard.fail_all(error)
            return
        except Exception as error:
            logger.warning("the next turn of a conversation is not stored: %s", error)
            self._free_turn(turn)
            self._guard.drop([], error, turn)
            return
        self._clocks.of().end("keep_s")
        if is_last:
            self._free_turn(turn)

    def sample_part(self, entry: Entry) -> None:
        """Sample a part of the trajectories of an ended answer.

        The request responds after the last part.
        """
        self._guard.run([entry], partial(self._sample_part, entry))

    def decode(
        self,
        going: Sequence[Entry],
        interrupted: Callable[[], bool],
        behind: Callable[[], None] | None = None,
    ) -> None:
        """Decode some of the requests whose prompt is complete; the others are held.

        behind: see `DecodeLoop.run`.
        """
        for entry in [] if going else self.running[:]:
            self._guard.run([entry], partial(self._deliver, entry))
        if going:
            self._guard.run(going, partial(self._decode, going, interrupted, behind))
            self._guard.drop_failed()
            self.leave_ended([entry for entry in going if entry in self.running])

    def displace(self, entry: Entry, now: float) -> None:
        """Take the row of a request, which begins again later."""
        self._guard.run([entry], partial(self._displace, entry, now))

    def leave_ended(self, entries: Sequence[Entry]) -> None:
        """Let requests respond whose answer has ended, if they want no trajectories."""
        for entry in [entry for entry in entries if not entry.sequence.decoding]:
            self._guard.run([entry], partial(self._leave, entry))

    def respond(
        self, entry: Entry, sequence: GenerationSequence, seconds: Mapping[str, float] | None = None
    ) -> None:
        """Respond with the answer of a sequence.

        seconds: of its stages; None = it was not begun.
        """
        seconds = seconds or NO_SECONDS
        entry.finish(response_of(sequence, entry.seconds(seconds), self._pipeline.read_calls(sequence)))
        self._metrics.scheduling.finished += 1

    def _begin(self, entry: Entry, at_end: bool = False) -> int:
        """Begin a request; at_end: in the row after all others."""
        pipeline, sequence = self._pipeline, entry.sequence
        if not self._free_slots:
            turn = self._keeping.turns[-1]
            self._keeping.give_up(turn)
            self._free_turn(turn)
        entry.slot = min(self._free_slots)
        self._free_slots.remove(entry.slot)
        self.running.append(entry)
        entry.stages = self._clocks.new()
        clock = self._clocks.of(entry)
        sequence.first_row = entry.slot * pipeline.config.builder.max_input_len
        if entry.kept is None:
            sequence.adapter = pipeline.preparer.adapter_of(sequence)
        pipeline.reuse.match([sequence])
        clock.end("tokenize_s")
        self.encoding.begin(entry, clock)
        if entry.run is not None:
            sequence.held = True
            return 0
        return self._compute_part(entry) if self._begin_prompt(entry, at_end) else 0

    def _encoded(self, entry: Entry, ended: EncodedRun) -> None:
        """Go on with a request after a run of the encoders.

        After the last run its prompt begins.
        """
        self.encoding.go_on(entry, ended)
        if entry.run is not None:
            return
        self._pipeline.reuse.match([entry.sequence])  # what was stored may have made room for other prompts
        if self.encoding.lacks(entry):
            self.encoding.begin(entry, entry.stages)
        else:
            self._begin_prompt(entry)

    def _begin_prompt(self, entry: Entry, at_end: bool = False) -> bool:
        """Admit a request whose images and sounds are encoded; False if it is cancelled."""
        pipeline, sequence = self._pipeline, entry.sequence
        if not sequence.report("prefill", 0):
            return False
        place = None if at_end else 0 if self._is_first(entry) else pipeline.batch.place_of(sequence)
        pipeline.batch.admit([sequence], at=place)
        entry.prompts = PromptsInParts(pipeline, [sequence], PART_TOKENS)
        return True

    def _is_first(self, entry: Entry) -> bool:
        return all(entry.priority > other.priority for other in self.running if other is not entry)

    def _compute_part(self, entry: Entry) -> int:
        assert entry.prompts is not None
        clock = self._clocks.of(entry)
        tokens = entry.prompts.advance()
        is_last = entry.prompts.done
        if is_last:
            entry.first_token, entry.prompts = entry.prompts.deliver, None
            if not self.computes_behind:
                self._deliver(entry)
        clock.end("prefill_s")
        if is_last:  # those that begin beside it reuse its image and its system prompt
            self._pipeline.store_prefixes([entry.sequence])
            clock.end("keep_s")
        return tokens

    def _decode(
        self, going: Sequence[Entry], interrupted: Callable[[], bool], behind: Callable[[], None] | None
    ) -> None:
        batch = self._pipeline.batch
        for entry in self.running:
            if entry in going and entry.sequence.held:
                batch.resume(entry.sequence)
            elif entry not in going and not entry.sequence.held:
                batch.hold(entry.sequence)
                self._metrics.scheduling.paused += entry.sequence.decoding and not entry.has_one_token
        batch.gather([entry.sequence for entry in going])
        newcomers = [entry for entry in self.running if entry.first_token is not None]
        self._stepping, self._ends_with_part = going, False
        deliver = partial(self._deliver_all, newcomers) if newcomers else None
        self._pipeline.decode(interrupted, deliver, behind)
        if not self._ends_with_part:  # else the stage ended before the part
            self._clocks.of(*going).end("decode_s")

    def _deliver_all(self, newcomers: Sequence[Entry]) -> None:
        for entry in newcomers:
            self._guard.run_beside(entry, partial(self._deliver, entry))

    def _deliver(self, entry: Entry) -> None:
        """Wait for the first token of a request, if it has not been delivered."""
        if entry.first_token is not None:
            deliver, entry.first_token = entry.first_token, None
            deliver()

    def _sample_part(self, entry: Entry) -> None:
        self._pipeline.trajectories.queue_part(entry.sequence)
        self._clocks.of(entry).end("action_s")
        self.leave_ended([entry])

    def _displace(self, entry: Entry, now: float) -> None:
        pipeline, sequence = self._pipeline, entry.sequence
        if entry.is_prompted:
            pipeline.store_prefixes([sequence])
        if sequence in pipeline.batch.sequences:
            pipeline.batch.evict([sequence])
        if entry.kept is None or len(entry.kept.generated) < len(sequence.generated):
            entry.kept = sequence
        entry.sequence = pipeline.preparer.prepare_again(sequence)
        entry.wait(now)
        self._free(entry)
        self._metrics.scheduling.displaced += 1

    def _leave(self, entry: Entry) -> None:
        pipeline, sequence = self._pipeline, entry.sequence
        # without trajectories its seconds have ended: later marks may wait for the work of others
        samples = sequence.wants_part or sequence.sampling_actions is not None
        clock = self._clocks.of(*[entry] * samples)
        # a step writes to the next slot of the rows that it yields nothing for too
        if sequence.wants_part and sequence.used_slots < pipeline.runner.kv_cache.capacity:
            return
        if sequence in pipeline.batch.sequences:
            pipeline.finish([sequence], clock)
        if entry.kept is not None and len(entry.kept.generated) > len(sequence.generated):
            sequence = entry.kept  # cancelled before it was computed again
            sequence.report("prefill", 0)
        seconds = entry.stages.metrics()
        self._free(entry)
        if sequence.request.messages is not None and not sequence.is_cancelled:
            self._free_slots.remove(entry.slot)
            self._keeping.turns.append(NextTurn(sequence, entry.slot, entry.priority))
        self.respond(entry, sequence, seconds)

    def _free_turn(self, turn: NextTurn) -> None:
        self._keeping.turns.remove(turn)
        self._free_slots.add(turn.slot)

    def _free(self, entry: Entry) -> None:
        self.running.remove(entry)
        self.encoding.drop(entry)
        self._free_slots.add(entry.slot)
        entry.prompts = entry.first_token = None
