# SPDX-License-Identifier: Apache-2.0
"""DecodeStep: one decode step of a whole batch on the device, from the tokens drawn last to the next ones.

  tokens -> embeddings -> rotary rows, mask -> engine, KV cache -> logits -> tokens -> lengths, stop test

The host sends nothing to it and needs nothing from it, so that steps can be queued one behind the other, and
a whole step can be recorded as a graph and queued with one call.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edgellm_ros.engine.device import Device, DeviceGraph
from edgellm_ros.engine.errors import DeviceLostError, EngineError
from edgellm_ros.engine.executor import BindingSnapshot
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.runtime.batch.input_embedder import InputEmbedder
from edgellm_ros.runtime.batch.sampling_rows import SampledTokens, TokenSampler
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.engines.llm_engine_runner import LLMEngineRunner
from edgellm_ros.runtime.lora import LoraAdapter

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecordedStep:
    """A step as a graph, and the engine's binding at that time, which the graph works on."""

    graph: DeviceGraph
    snapshot: BindingSnapshot
    bound: Any


class DecodeStep:
    """Queues decode steps of the batch that the KV cache and the sampler hold.

    `logits` [max batch,1,V]: where each step leaves them.
    """

    def __init__(
        self,
        device: Device,
        embedder: InputEmbedder,
        runner: LLMEngineRunner,
        sampler: TokenSampler,
        logits: Tensor,
    ) -> None:
        self._device = device
        self._embedder = embedder
        self._runner = runner
        self._sampler = sampler
        self._all_logits = logits
        self._recording = False
        self._recorded: dict[tuple[LoraAdapter, int], RecordedStep] = {}
        self._explained: set[str] = set()
        self.begin([])

    def begin(self, adapters: Sequence[LoraAdapter]) -> None:
        """The steps that follow are of so many sequences with these adapters.

        They are replayed if all sequences have one adapter and there is a record of such a step with the
        engine bound to what it would be bound to now.
        """
        self._adapters = list(adapters)
        self._logits = self._all_logits.rows(0, len(adapters))
        self._graph: DeviceGraph | None = None
        self._to_record: tuple[LoraAdapter, int] | None = None
        if not self._recording and not self._recorded:
            return
        if any(adapter is not adapters[0] for adapter in adapters):
            self._explain("their adapters differ and run one after another")
            return
        key = adapters[0], len(adapters)
        recorded = self._recorded.get(key)
        if recorded is not None and recorded.snapshot == self._bind()[0]:
            self._graph = recorded.graph
        elif self._recording:
            self._to_record = key

    def queue(self) -> None:
        """Queue one step."""
        if self._graph is not None:
            self._graph.launch(self._device.stream)
            return
        self._run()
        if self._to_record is not None:
            self._record(self._to_record)

    def copy_to_host(self, sequences: Sequence[GenerationSequence]) -> SampledTokens:
        """Begin to copy what the step queued last draws for these sequences to the host."""
        return self._sampler.copy_to_host(self._logits, sequences)

    def capture_vanilla_decoding_cuda_graph(self, adapter: LoraAdapter) -> bool:
        """Record the steps of every batch size with this adapter. Ends any batch in progress.

        From then on a step that has no record yet (of an adapter that was loaded later), or whose bindings
        have changed, is recorded when it has run once. False if the device has no graphs or, with the reason
        in the log, if a step cannot be recorded: then it runs without.
        """
        self._recording = True
        for batch in range(1, self._runner.config.max_supported_batch_size + 1):
            self._runner.kv_cache.reset_for_new_sequences([0] * batch, [0] * batch)
            self.begin([adapter] * batch)
            if self._graph is None:
                self.queue()
            if self._graph is None:
                return False
        return True

    def forget(self, adapter: LoraAdapter) -> None:
        """Drop the records of an adapter that is there no more."""
        self._recorded = {key: step for key, step in self._recorded.items() if key[0] is not adapter}

    def _run(self) -> None:
        embeds = self._embedder.embed_tokens(self._sampler.tokens(len(self._adapters)))
        self._runner.execute_vanilla_decoding_step(embeds, self._logits, self._adapters)
        self._runner.kv_cache.advance(self._sampler.stop_state)
        self._sampler.draw(self._logits)

    def _bind(self) -> tuple[BindingSnapshot, Any]:
        embeds = self._embedder.token_embeds(len(self._adapters))
        return self._runner.bind_vanilla_decoding_step(embeds, self._logits, self._adapters[0])

    def _record(self, key: tuple[LoraAdapter, int]) -> None:
        """Record the step that has just run, or log why not and record no more."""
        self._to_record = None
        try:
            graph = self._device.capture(self._run)
        except DeviceLostError:
            raise
        except EngineError as error:
            self._recording = False
            self._explain(str(error))
            return
        if graph is None:
            self._recording = False
            return
        self._recorded[key] = RecordedStep(graph, *self._bind())
        self._graph = graph

    def _explain(self, reason: str) -> None:
        if reason not in self._explained:
            self._explained.add(reason)
            logger.warning(
                "decode steps of %d sequences run without a graph: %s", len(self._adapters), reason
            )
