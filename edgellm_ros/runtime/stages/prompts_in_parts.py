# SPDX-License-Identifier: Apache-2.0
"""PromptsInParts: the prompts of admitted sequences, computed part by part."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.batch.step_result import StepResult
from edgellm_ros.runtime.batch.token_states import copy_last_states
from edgellm_ros.runtime.prefix_reuse import prefill_parts

if TYPE_CHECKING:
    from edgellm_ros.runtime.pipeline import Pipeline


class PromptsInParts:
    """Fills the rows of admitted sequences, and samples their first tokens.

    KV rows of a reused prefix are copied from the prefix cache; the engine computes the other ones. Between
    two parts other rows may be decoded, admitted and evicted, if these sequences stay beside each other.

    - most: tokens of a part, unless the runs of the engine have fewer; None = those of a run
    - keep_hidden_states: of the prompts, for `LLMInferenceRuntime.base_model_hidden_states`; in one run

    `done`: whether all parts and the first tokens have been queued; then `deliver` waits for these.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        sequences: Sequence[GenerationSequence],
        most: int | None = None,
        keep_hidden_states: bool = False,
    ) -> None:
        self._pipeline = pipeline
        self._sequences = sequences
        longest = pipeline.config.max_supported_input_length
        self._most = min(most or (longest if keep_hidden_states else pipeline.reuse.run_tokens), longest)
        self._keep_hidden_states = keep_hidden_states
        # the generator does not know this object, so that nothing of a request is left to collect
        self._parts = pipeline.prefills.parts(
            sequences, partial(_rows_of, pipeline, sequences), may_pad=not keep_hidden_states, most=self._most
        )
        self._first_tokens: tuple[StepResult, Tensor] | None = None  # and embeds [B,S,H] of the last part

    @property
    def done(self) -> bool:
        return self._first_tokens is not None

    def advance(self) -> int:
        """Queue the next part, and after the last one the first tokens.

        Returns the number of tokens of the part.
        """
        before = sum(sequence.kv_length for sequence in self._sequences)
        embeds, logits, is_last = next(self._parts)
        if is_last:
            self._first_tokens = self._begin_answers(embeds, logits), embeds
        return sum(sequence.kv_length for sequence in self._sequences) - before

    def deliver(self) -> None:
        """Wait for the first tokens, and give them to the sequences; once.

        Steps may have been queued behind them. EngineError if their logits are not finite.
        """
        assert self._first_tokens is not None
        first_tokens, embeds = self._first_tokens
        first_tokens.deliver(self._sequences, also_held=True)  # by those for whom others step meanwhile
        if self._keep_hidden_states:
            self._pipeline.hidden_states.keep(embeds, self._pipeline.config.hidden_state_layers)
        for sequence in self._sequences:
            sequence.report("decode", 0)

    def _begin_answers(self, embeds: Tensor, logits: Tensor) -> StepResult:
        """Queue the first tokens; embeds [B,S,H] of the last part, logits [B,1,V]."""
        pipeline, sequences = self._pipeline, self._sequences
        rows = _rows_of(pipeline, sequences)
        pipeline.batch.begin_answers(rows)  # while the device computes the prompts
        pipeline.prefilled(sequences)
        pipeline.sampling.mask(logits, sequences)
        pipeline.first_tokens.sample(logits, rows)
        logprobs = max(sequence.request.logprobs for sequence in sequences)
        first_tokens = pipeline.sampling.copy_to_host(logits, logprobs)
        layers = pipeline.config.hidden_state_layers
        if any(sequence.request.output_hidden_states and sequence.decoding for sequence in sequences):
            lengths = [len(tokens) for tokens in prefill_parts(sequences, self._most)[-1]]
            batch, tokens, _ = embeds.shape
            states = pipeline.hidden_states.outputs(batch, tokens, layers)
            first_tokens.states = copy_last_states(pipeline.device, states, lengths)
        for sequence in sequences:  # while the device computes the prompts
            pipeline.trajectories.prepare(sequence)
        return first_tokens


def _rows_of(pipeline: Pipeline, sequences: Sequence[GenerationSequence]) -> range:
    first = pipeline.batch.row_of(sequences[0])
    return range(first, first + len(sequences))
