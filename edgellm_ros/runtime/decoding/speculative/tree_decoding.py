# SPDX-License-Identifier: Apache-2.0
"""TreeDecoding: a round of drafting yields 1 to D tokens per row and step.

  propose   drafter                 -> a tree of M nodes; the root is the newest token
  verify    base model, M rows      -> logits of every node, as if its path were the text
  sample    each request's sampler  -> tokens along a path, until a token has no node
  commit    KV rows of the path move to the next free slots; tokens, lengths and drafter follow

Each token is sampled from the logits, at the position and with the random number that a vanilla step would
have. So the answer is the same for every tree, and a bad draft costs time only.

A round takes no input from the host, so rounds can be queued one after another (the first ones of an answer
are not), and a round of the largest tree can be recorded as a graph and launched with one call
(tree_round.py). With a grammar in the batch, the host computes a mask for each node of its trees before the
path is sampled, so rounds are queued one at a time. Where the parts of rounds are measured
(`measures_rounds`), each part is a graph of its own, with marks between them.

Vanilla steps take the place of rounds where the KV cache has no room for a tree, where all requests turn
drafting off, where drafting is slower (step_sizes.py), and for good after the drafter has failed. A row whose
request turns drafting off takes one token of a round (`SamplingState.path_limit`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from edgellm_ros.engine.device import Device, Mark
from edgellm_ros.kernels import TreeKernels
from edgellm_ros.runtime.adapters.lora import LoraAdapter
from edgellm_ros.runtime.batch.batch import Batch
from edgellm_ros.runtime.batch.input_embedder import InputEmbedder
from edgellm_ros.runtime.batch.sampling_rows import SamplingRows
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.batch.step_result import StepResult
from edgellm_ros.runtime.decoding.recorded_steps import RecordedSteps
from edgellm_ros.runtime.decoding.speculative.drafting_config import SpecDecodeDraftingConfig
from edgellm_ros.runtime.decoding.speculative.guarded_drafter import DraftingError, GuardedDrafter
from edgellm_ros.runtime.decoding.speculative.step_sizes import StepSizes
from edgellm_ros.runtime.decoding.speculative.tree_round import (
    AcceptancePart,
    DraftPart,
    TreeRound,
    TreeRounds,
    VerificationPart,
)
from edgellm_ros.runtime.decoding.vanilla import VanillaDecoding
from edgellm_ros.runtime.engines.llm_engine_runner import LLMEngineRunner
from edgellm_ros.runtime.metrics import SpecDecodeGenerationMetrics

# First rounds of an answer, which are not queued ahead: a short answer ends in one of them, and the round
# queued after it would be wasted, which costs as much time as the host takes between about four rounds.
STEPS_ALONE = 4


def tree_sizes(largest: int) -> list[int]:
    """Return falling sizes of trees: the largest, then halves of it, down to 2."""
    sizes = [largest]
    while sizes[-1] > 3:
        sizes.append(sizes[-1] // 2)
    return sizes


class TreeDecoding:
    """Decodes with a drafter; `vanilla` does the steps without one.

    measures_rounds: whether the seconds of the parts of rounds are measured; may change between batches.
    """

    def __init__(
        self,
        device: Device,
        kernels: TreeKernels,
        config: SpecDecodeDraftingConfig,
        batch: Batch,
        embedder: InputEmbedder,
        runner: LLMEngineRunner,
        sampling: SamplingRows,
        drafter: GuardedDrafter,
        vanilla: VanillaDecoding,
        metrics: SpecDecodeGenerationMetrics,
    ) -> None:
        self.tokens_per_step = config.tokens_per_round
        self._step_sizes: StepSizes | None = None  # of these sequences; None = rounds of the largest size
        self._has_grammar = False  # whether one of these sequences has a grammar
        self._wanted = True  # whether these sequences may have rounds
        self._drafts = True  # whether the last step was a round, or the first one may be
        self._sampling = sampling
        self._drafter = drafter
        self._vanilla = vanilla
        self._metrics = metrics
        self._sizes = tree_sizes(config.tree_size)
        # where steps are queued ahead, a graph is recorded for the largest size only
        sizes = self._sizes[::-1] if config.is_chain and device.max_queued_steps == 0 else self._sizes[:1]
        # batches without and with a grammar, whose rounds and steps take longer
        self._step_sizes_by_grammar = [
            StepSizes(sizes, self.tokens_per_step - 1) if config.falls_back else None for _ in range(2)
        ]
        parts = batch, embedder, runner, sampling, drafter
        self._device = device
        self.measures_rounds = device.max_queued_steps == 0  # a clock read beside work that is done at once
        self._marks: deque[list[Mark]] = deque()  # of each queued round: before and after its parts
        self._rounds = TreeRounds(
            device, kernels, config.tree_size, self.tokens_per_step, *parts, only_chains=config.is_chain
        )
        self.recorded: RecordedSteps[TreeRound] = RecordedSteps(device, batch.max_size, "rounds of drafting")
        self.recorded_drafts: RecordedSteps[DraftPart] = RecordedSteps(device, batch.max_size, "drafts")
        self.recorded_verifications: RecordedSteps[VerificationPart] = RecordedSteps(
            device, batch.max_size, "verifications"
        )
        self.recorded_acceptances: RecordedSteps[AcceptancePart] = RecordedSteps(
            device, batch.max_size, "acceptances"
        )
        self._recorded_parts: list[RecordedSteps] = [
            self.recorded_drafts,
            self.recorded_verifications,
            self.recorded_acceptances,
        ]
        self._root = device.zeros((batch.max_size, 1), np.int64)  # the path of a vanilla step

    def prefilled(self, rows: range) -> None:
        """Give the first tokens of admitted rows to the drafter."""
        tokens, counts = self._sampling.tokens(len(rows), 1), self._sampling.counts(len(rows))
        self._drafter.started(rows, tokens, counts)

    def begin(self, batch: Batch) -> None:
        """Prepare for steps of these sequences."""
        self._sequences = sequences = batch.stepping
        self._adapters = [sequence.adapter for sequence in sequences]
        self._logprobs = max(sequence.request.logprobs for sequence in sequences)
        self._wants_states = any(sequence.request.output_hidden_states for sequence in sequences)
        self._has_grammar = any(sequence.grammar is not None for sequence in sequences)
        self._wanted = not all(sequence.request.disable_spec_decode for sequence in sequences)
        self._drafts = self._wanted and not self._drafter.failed
        self._vanilla.begin(batch)
        self._marks.clear()
        self._in_parts = self._has_grammar or self.measures_rounds
        if self._drafts and self._in_parts:
            self.recorded_drafts.select(self._adapters, self._make_draft)
            self.recorded_verifications.select(self._adapters, self._make_verification)
            if not self._has_grammar:
                self.recorded_acceptances.select(self._adapters, self._make_acceptance)
            self._largest = self._make_round(self._adapters)
        elif self._drafts:
            self._largest = self.recorded.select(self._adapters, self._make_round)
        self._step_sizes = self._step_sizes_by_grammar[self._has_grammar]
        if self._step_sizes is not None:
            self._step_sizes.begin(len(sequences))

    def queue(self, room: int) -> StepResult:
        """Queue a round of drafting, or a vanilla step; see `DecodeMethod`."""
        may_draft = self._wanted and not self._drafter.failed
        most = next((size for size in self._sizes if size <= room), 1) if may_draft else 1
        size = self._chosen_size(most)
        if size > 1:
            try:
                self._drafts = True
                return self._round(size)
            except DraftingError:
                pass
        self._drafts = False
        return self._vanilla_step()

    def queues_ahead(self, sequences: Sequence[GenerationSequence]) -> bool:
        """Return whether the sequences had more than a few steps or the last was vanilla.

        False with a grammar, whose masks need the tokens before.
        """
        if self._has_grammar or not (self._wanted and self._drafts):
            return self._vanilla.queues_ahead(sequences)
        return all(sequence.steps >= STEPS_ALONE for sequence in sequences)

    def delivered(self, result: StepResult, served: Sequence[tuple[GenerationSequence, int]]) -> None:
        """Count and measure a delivered step."""
        drafted = result.most_tokens > 1
        if drafted:
            counts = [count for sequence, count in served if not sequence.request.disable_spec_decode]
            self._metrics.total_runs += 1
            self._metrics.verified_trees += len(counts)
            self._add_seconds(self._marks.popleft())
            self._metrics.generated_tokens += sum(counts)
        else:
            self._metrics.vanilla_runs += 1
        if self._step_sizes is not None:
            self._step_sizes.delivered([count for sequence, count in served if sequence.decoding])

    def capture(self, adapters: Sequence[LoraAdapter]) -> bool:
        """Record vanilla steps and rounds with the largest tree as graphs.

        See `DecodeMethod`.
        """
        steps = self._vanilla.capture(adapters)
        if self._drafter.failed:
            return steps
        rounds = self.recorded.capture(adapters, self._make_round)
        for recorded in self._recorded_parts:
            recorded.record_lazily = self.recorded.record_lazily
        return rounds and steps

    def clear(self) -> None:
        """Drop all graphs; see `DecodeMethod`."""
        self._vanilla.clear()
        for recorded in (self.recorded, *self._recorded_parts):
            recorded.clear()

    def drop(self, adapter: LoraAdapter) -> None:
        """Drop the graphs of a removed adapter."""
        self._vanilla.drop(adapter)
        for recorded in (self.recorded, *self._recorded_parts):
            recorded.drop(adapter)

    def _make_round(self, adapters: Sequence[LoraAdapter]) -> TreeRound:
        return TreeRound(self._rounds, adapters, self._sizes[0])

    def _make_draft(self, adapters: Sequence[LoraAdapter]) -> DraftPart:
        return DraftPart(self._make_round(adapters))

    def _make_verification(self, adapters: Sequence[LoraAdapter]) -> VerificationPart:
        return VerificationPart(self._make_round(adapters))

    def _make_acceptance(self, adapters: Sequence[LoraAdapter]) -> AcceptancePart:
        return AcceptancePart(self._make_round(adapters))

    def _round(self, size: int) -> StepResult:
        """Queue a round with trees of this size. DraftingError if there is no draft."""
        self._drafter.resume(len(self._adapters))
        is_largest = size == self._sizes[0]
        step = self._largest if is_largest else TreeRound(self._rounds, self._adapters, size)
        marks: list[Mark] = []
        if self._in_parts:
            marks = self._round_in_parts(step, is_largest)
        elif is_largest:
            self.recorded.queue()
        else:
            step.run()
        self._marks.append(marks)
        self._drafter.drafted(len(self._adapters), size)
        self._vanilla.select()  # while the device computes the round
        return step.copy_to_host(self._logprobs, self._wants_states)

    def _round_in_parts(self, step: TreeRound, is_largest: bool) -> list[Mark]:
        """Queue a round part by part; return the marks around its parts.

        With a grammar, each node has a mask before the path is sampled. No marks if a part was recorded:
        that takes time.
        """
        graphs = sum(map(len, self._recorded_parts))
        marks: list[Mark] = []
        self._mark(marks)
        if is_largest:
            self.recorded_drafts.queue()
        else:
            step.draft()
        tree = step.copy_tree() if self._has_grammar else None
        self._mark(marks)
        if is_largest:
            self.recorded_verifications.queue()
        else:
            step.verify()
        self._mark(marks)
        if tree is not None:
            step.mask(self._sequences, tree)
        if is_largest and tree is None:
            self.recorded_acceptances.queue()
        else:
            step.accept()
        self._mark(marks)
        return marks if graphs == sum(map(len, self._recorded_parts)) else []

    def _mark(self, marks: list[Mark]) -> None:
        if self.measures_rounds:
            marks.append(self._device.mark())

    def _add_seconds(self, marks: list[Mark]) -> None:
        """Add the seconds of a delivered round's parts; without marks it was not measured."""
        if not marks:
            return
        draft, verify, accept = (end.seconds_since(start) for start, end in pairwise(marks))
        self._metrics.timed_runs += 1
        self._metrics.draft_seconds += draft
        self._metrics.verify_seconds += verify
        self._metrics.accept_seconds += accept

    def _vanilla_step(self) -> StepResult:
        result = self._vanilla.step()
        batch = len(self._adapters)
        tokens, counts = self._sampling.tokens(batch, 1), self._sampling.counts(batch)
        self._drafter.accepted(tokens, self._root.rows(0, batch), counts)
        return result

    def _chosen_size(self, most: int) -> int:
        """Return the nodes of the next step's trees, at most `most`; 1 = a vanilla step."""
        return most if self._step_sizes is None else self._step_sizes.next_size(most)
