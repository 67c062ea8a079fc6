# SPDX-License-Identifier: Apache-2.0
"""VanillaDecoding: one token per row and step, from the row's newest token.

  last tokens -> embeddings -> attention inputs -> engine, KV rows -> logits -> tokens -> counts -> commit

A step takes no input from the host, so steps can be queued one after another, and a whole step can be
recorded as a graph and launched with one call.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.executor import BoundRun
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.runtime.batch.batch import Batch
from edgellm_ros.runtime.batch.input_embedder import InputEmbedder
from edgellm_ros.runtime.batch.sampling_rows import SamplingRows
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.batch.step_result import StepResult
from edgellm_ros.runtime.decoding.recorded_steps import RecordedSteps, Step
from edgellm_ros.runtime.engines.llm_engine_runner import LLMEngineRunner
from edgellm_ros.runtime.lora import LoraAdapter


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
        self._logprobs = 0
        self.recorded: RecordedSteps[VanillaStep] = RecordedSteps(device, batch.max_size)

    def begin(self, batch: Batch) -> None:
        """Select the step for these sequences, recorded or not."""
        self._logprobs = max(sequence.request.logprobs for sequence in batch.sequences)
        self._step = self.recorded.select([sequence.adapter for sequence in batch.sequences], self._make_step)

    def prefilled(self, rows: range) -> None:
        """Do nothing: the tokens are on the device."""

    def queue(self, room: int) -> StepResult:
        """Queue one step; see `DecodeMethod`."""
        self.recorded.queue()
        return self._sampling.copy_to_host(self._step.logits, self._logprobs)

    def queues_ahead(self, sequences: Sequence[GenerationSequence]) -> bool:
        """Return True: a step takes less time than the host between two of them."""
        return True

    def delivered(self, result: StepResult, served: Sequence[tuple[GenerationSequence, int]]) -> None:
        """Do nothing."""

    def capture(self, adapters: Sequence[LoraAdapter]) -> bool:
        """Record steps as graphs; see `DecodeMethod`."""
        return self.recorded.capture(adapters, self._make_step)

    def drop(self, adapter: LoraAdapter) -> None:
        """Drop the graphs of a removed adapter."""
        self.recorded.drop(adapter)

    def _make_step(self, adapters: Sequence[LoraAdapter]) -> VanillaStep:
        logits = self._logits.rows(0, len(adapters))
        return VanillaStep(self._batch, self._embedder, self._runner, self._sampling, logits, adapters)


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
        embeds = self._embedder.embed_tokens(self._tokens)
        self._runner.execute_vanilla_decoding_step(embeds, self.logits, self._adapters)
        self._sampling.sample(self.logits)
        self._batch.commit(self._sampling.count())

    def bind(self) -> list[BoundRun]:
        """Bind the engine to this step's tensors; all rows have one adapter."""
        embeds = self._embedder.token_embeds(len(self._adapters))
        return self._runner.bind_vanilla_decoding_step(embeds, self.logits, self._adapters)
