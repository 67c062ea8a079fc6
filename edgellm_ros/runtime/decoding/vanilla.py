# SPDX-License-Identifier: Apache-2.0
"""VanillaDecoding: one token per row and step, from the row's newest token.

  last tokens -> embeddings -> attention inputs -> engine, KV rows -> logits -> tokens -> counts -> commit

A step takes no input from the host, so steps can be queued one after another, and a whole step can be
recorded as a graph and launched with one call.

With a grammar in the batch, a step reads masks that the host computes from the tokens before:

  device   ... -> engine -> logits |   mask -> tokens -> counts -> commit | ... -> engine -> logits |
  host     queue            masks, upload   queue the next logits           deliver, masks, upload

Then only the part up to the logits is recorded, when it first runs. It needs nothing from the host, so the
device computes the next logits while the host reads the token. If the sequence ends with this token, they are
not used, like a step that was queued ahead.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.executor import BoundRun
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.runtime.adapters.lora import LoraAdapter
from edgellm_ros.runtime.batch.batch import Batch
from edgellm_ros.runtime.batch.input_embedder import InputEmbedder
from edgellm_ros.runtime.batch.sampling_rows import SamplingRows
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.batch.step_result import StepResult
from edgellm_ros.runtime.batch.token_states import copy_states
from edgellm_ros.runtime.decoding.recorded_steps import RecordedSteps, Step
from edgellm_ros.runtime.engines.llm_engine_runner import LLMEngineRunner


class VanillaDecoding:
    """Decodes one token per step; `logits` [max batch,1,V]: buffer of all steps."""

    tokens_per_step = 1

    def __init__(
        self,
        device: Device,
        batch: Batch,
        embedder: InputEmbedder,
        runner: LLMEngineRunner,
        sampling: SamplingRows,
        logits: Tensor,
    ) -> None:
        self._batch = batch
        self._embedder = embedder
        self._runner = runner
        self._sampling = sampling
        self._logits = logits
        self._device = device
        self._logprobs = 0
        self._wants_states = False  # whether a sequence wants hidden states
        self._has_grammar = False
        self._computes_ahead = device.max_queued_steps > 0
        self._has_logits = False  # whether the next step's logits have been queued
        self.recorded: RecordedSteps[VanillaStep] = RecordedSteps(device, batch.max_size)
        self.recorded_logits: RecordedSteps[LogitsStep] = RecordedSteps(
            device, batch.max_size, "decode steps up to the logits"
        )

    def begin(self, batch: Batch) -> None:
        """Take note of these sequences."""
        self._sequences = sequences = batch.stepping
        self._logprobs = max(sequence.request.logprobs for sequence in sequences)
        self._wants_states = any(sequence.request.output_hidden_states for sequence in sequences)
        self._has_logits = self._is_selected = False
        self._has_grammar = any(sequence.grammar is not None for sequence in sequences)

    def select(self) -> None:
        """Select the step for the sequences, recorded or not; a second call does nothing.

        Takes the host some time, so whoever does not begin with a step can let the device work beside it.
        """
        if self._is_selected:
            return
        self._is_selected = True
        adapters = [sequence.adapter for sequence in self._sequences]
        if self._has_grammar:
            self.recorded_logits.select(adapters, self._make_logits_step)
            self._step = self._make_step(adapters)
        else:
            self._step = self.recorded.select(adapters, self._make_step)

    def prefilled(self, rows: range) -> None:
        """Do nothing: the tokens are on the device."""

    def queue(self, room: int) -> StepResult:
        """Queue one step, and with a grammar the next one's logits; see `DecodeMethod`."""
        result = self.step()
        if self._has_grammar and self._computes_ahead and room > 1 and not self._ends_now():
            self.recorded_logits.queue()
            self._has_logits = True
        return result

    def step(self) -> StepResult:
        self.select()
        if self._has_grammar:
            if not self._has_logits:
                self.recorded_logits.queue()
            self._has_logits = False
            self._sampling.mask(self._step.logits, self._sequences)
            self._step.sample()
        else:
            self.recorded.queue()
        result = self._sampling.copy_to_host(self._step.logits, self._logprobs)
        if self._wants_states:
            batch = self._step.logits.shape[0]
            states = self._runner.step_hidden_states(batch, 1, self._runner.config.hidden_state_layers)
            result.states = copy_states(self._device, states)
        return result

    def queues_ahead(self, sequences: Sequence[GenerationSequence]) -> bool:
        """Return whether steps may be queued ahead: masks of grammars need earlier tokens.

        Without a grammar, the device need not wait for the host between two steps.
        """
        return not self._has_grammar

    def delivered(self, result: StepResult, served: Sequence[tuple[GenerationSequence, int]]) -> None:
        """Do nothing."""

    def capture(self, adapters: Sequence[LoraAdapter]) -> bool:
        """Record steps as graphs; see `DecodeMethod`."""
        done = self.recorded.capture(adapters, self._make_step)
        self.recorded_logits.record_lazily = self.recorded.record_lazily
        return done

    def clear(self) -> None:
        """Drop all graphs; see `DecodeMethod`."""
        self.recorded.clear()
        self.recorded_logits.clear()

    def drop(self, adapter: LoraAdapter) -> None:
        """Drop the graphs of a removed adapter."""
        self.recorded.drop(adapter)
        self.recorded_logits.drop(adapter)

    def _ends_now(self) -> bool:
        """Return whether the queued step ends a sequence: by token limit or grammar."""
        return any(
            sequence.tokens_left < 2 or (sequence.grammar is not None and sequence.grammar.is_at_end)
            for sequence in self._sequences
        )

    def _make_step(self, adapters: Sequence[LoraAdapter]) -> VanillaStep:
        logits = self._logits.rows(0, len(adapters))
        return VanillaStep(self._batch, self._embedder, self._runner, self._sampling, logits, adapters)

    def _make_logits_step(self, adapters: Sequence[LoraAdapter]) -> LogitsStep:
        return LogitsStep(self._make_step(adapters))


class VanillaStep(Step):
    """One step of the first len(adapters) rows; logits [B,1,V]."""

    def __init__(
        self,
        batch: Batch,
        embedder: InputEmbedder,
        runner: LLMEngineRunner,
        sampling: SamplingRows,
        logits: Tensor,
        adapters: Sequence[LoraAdapter],
    ) -> None:
        self.logits = logits
        self._batch = batch
        self._embedder = embedder
        self._runner = runner
        self._sampling = sampling
        self._adapters = adapters
        self._tokens = sampling.last_tokens(range(len(adapters))).view(len(adapters), 1)

    def run(self) -> None:
        """Queue the step."""
        self.compute_logits()
        self.sample()

    def compute_logits(self) -> None:
        """Queue the first part of the step."""
        embeds = self._embedder.embed_tokens(self._tokens)
        self._runner.execute_vanilla_decoding_step(embeds, self.logits, self._adapters)

    def sample(self) -> None:
        """Queue the second part of the step."""
        self._sampling.sample(self.logits)
        self._batch.commit(self._sampling.count())

    def bind(self) -> list[BoundRun]:
        """Bind the engine to this step's tensors; all rows have one adapter."""
        embeds = self._embedder.token_embeds(len(self._adapters))
        return self._runner.bind_vanilla_decoding_step(embeds, self.logits, self._adapters)


class LogitsStep(Step):
    """The first part of a vanilla step."""

    def __init__(self, step: VanillaStep) -> None:
        self._step = step

    def run(self) -> None:
        """Queue the first part of the step."""
        self._step.compute_logits()

    def bind(self) -> list[BoundRun]:
        """Bind the engine to the step's tensors."""
        return self._step.bind()
