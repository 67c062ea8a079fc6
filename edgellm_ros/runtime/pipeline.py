# SPDX-License-Identifier: Apache-2.0
"""Pipeline: the stages of a batch, and the engines and buffers that they use.

`answer` calls the stages in their order.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from edgellm_ros.engine.errors import DeviceLostError, EngineError
from edgellm_ros.runtime.adapters.lora import LoraAdapter
from edgellm_ros.runtime.answer_in_advance import answer_in_advance
from edgellm_ros.runtime.assemble import (
    choose_by_times,
    load_inputs,
    make_decoding,
    make_requests,
    make_stores,
    open_engines,
    read_vocabulary,
)
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.decoding.decode_loop import DecodeLoop
from edgellm_ros.runtime.decoding.method import DecodeMethod
from edgellm_ros.runtime.decoding.speculative.tree_decoding import TreeDecoding
from edgellm_ros.runtime.encoders import Encoders
from edgellm_ros.runtime.first_tokens import FirstTokens
from edgellm_ros.runtime.metrics import Clock, RuntimeMetrics, StageClock
from edgellm_ros.runtime.opening import Opening
from edgellm_ros.runtime.prompt.tool_call_formats import ParsedAnswer
from edgellm_ros.runtime.request import LLMGenerationRequest, LLMGenerationResponse
from edgellm_ros.runtime.response import response_of
from edgellm_ros.runtime.stages.prompts_in_parts import PromptsInParts
from edgellm_ros.runtime.stages.recovery import recover_after
from edgellm_ros.runtime.trajectories import Trajectories

logger = logging.getLogger(__name__)

TOKENS_BEFORE_ANSWER = 8  # the last ones of a prompt, which may open the reasoning


class Pipeline:
    """The stages that a batch passes through; not thread-safe.

    Raises the errors of `LLMInferenceRuntime`.
    """

    def __init__(self, opening: Opening, metrics: RuntimeMetrics) -> None:
        self.config = opening.config
        self.device = opening.device
        self._metrics = metrics
        self._is_warm = False
        engines = open_engines(opening)
        self.runner = engines.runner
        self.vision, self.audio, self.action = engines.vision, engines.audio, engines.action
        self.loras, self.lm_heads = self.runner.loras, self.runner.lm_heads
        self._removed: deque[LoraAdapter] = deque()
        self.embedder = load_inputs(opening, engines)
        self.trajectories = Trajectories(self, metrics.action)
        self.encoders = Encoders(self.config, self.vision, self.audio, self.embedder, metrics.multimodal)
        vocab_map = read_vocabulary(opening)
        decoding = make_decoding(opening, engines, self.embedder, vocab_map, metrics.spec_decode)
        self.sampling = decoding.sampling
        self.first_tokens = FirstTokens(self.device, self.sampling)
        self.drafter = decoding.drafter
        self.batch = decoding.batch
        self.logits = decoding.logits
        self.vanilla = decoding.vanilla
        self.use_decode_method(decoding.method)
        choose_by_times(opening, engines, self.embedder, decoding)
        stores = make_stores(opening, engines, self.embedder, decoding)
        self.reuse = stores.reuse
        self.prefixes = self.reuse.pages
        self.hidden_states = engines.runner.prompt_states
        self.prefills = stores.prefill
        self.input_token_ids: list[list[int]] = []
        self.batch_index_mapping: list[int] = []
        requests = make_requests(opening, engines, vocab_map)
        self.preparer = requests.preparer
        self._calls = requests.calls

    def answer(
        self,
        requests: Sequence[LLMGenerationRequest],
        noise_seed: int,
        output_thinker_embeddings: bool = False,
    ) -> list[LLMGenerationResponse]:
        """Answer a batch of requests: the stages in their order.

        Arguments and errors are those of `LLMInferenceRuntime.handle_request`.
        """
        clock = StageClock(self.device.mark)
        if self._encode_ahead(requests):
            clock.end("vision_s")
        try:
            sequences = self.prepare(requests, noise_seed)  # requests -> prompts with placeholders
            if output_thinker_embeddings:
                self.hidden_states.check([len(sequence.token_ids) for sequence in sequences])
        except BaseException:  # the device may still read images of the caller
            self.encoders.forget_ahead()
            with suppress(EngineError):
                self.device.synchronize()
            raise
        return self._answer(sequences, clock, output_thinker_embeddings)

    def prepare_one(self, request: LLMGenerationRequest, noise_seed: int) -> GenerationSequence:
        """Prepare a request that joins a later batch, from any thread. ValueError."""
        return self.reuse.with_keys(self.preparer.prepare([request], noise_seed)[0])

    def answer_one(self, sequence: GenerationSequence) -> LLMGenerationResponse:
        """Answer a request of `prepare_one` alone."""
        self.clear_last_batch()
        return self._answer([sequence], StageClock(self.device.mark))[0]

    def _answer(
        self,
        sequences: list[GenerationSequence],
        clock: StageClock,
        output_thinker_embeddings: bool = False,
    ) -> list[LLMGenerationResponse]:
        """Answer prepared requests."""
        # prefix cache -> tokens to skip in the prefill; hidden states need whole prompts
        self.reuse.match(sequences, reuse=not output_thinker_embeddings)
        clock.end("tokenize_s")
        try:
            self.encode_images(sequences)  # camera frames -> rows of embeddings
            clock.end("vision_s")
            self.encode_audio(sequences)  # sound -> rows of embeddings
            clock.end("audio_s")
            active = [sequence for sequence in sequences if sequence.report("prefill", 0)]
            # one run for each adapter with its LM head
            active.sort(key=lambda sequence: (sequence.adapter.name, sequence.adapter.lm_head))
            if active:
                # prompts and rows -> KV cache, first tokens
                self.prefill(active, keep_hidden_states=output_thinker_embeddings)
                clock.end("prefill_s")
            while self.batch.sequences:
                ended = self.decode()  # tokens -> KV cache, next tokens, text; until a sequence ends
                clock.end("decode_s")
                self.finish(ended, clock)
            # answers as the next turns read them -> prefix cache; a prefill would overwrite hidden states
            if not output_thinker_embeddings and self.store_answers(active):
                clock.end("keep_s")
            seconds = clock.metrics()
        except BaseException as error:
            recover_after(self, error)
            raise
        self._metrics.add_seconds(seconds)
        return [response_of(each, seconds, self.read_calls(each)) for each in sequences]

    @property
    def records_prefills(self) -> bool:
        """Whether prefills are recorded as graphs, if they repeat."""
        return self.prefills.recorded.active

    @records_prefills.setter
    def records_prefills(self, records: bool) -> None:
        self.prefills.recorded.active = self.first_tokens.recorded.active = records

    def use_decode_method(self, method: DecodeMethod) -> None:
        """Set the decode method for the next batches; the batch must be empty."""
        self.method = method
        self.sampling.resize(method.tokens_per_step)
        method.clear()
        self.first_tokens.use(method)
        queued, capacity = self.device.max_queued_steps, self.runner.kv_cache.capacity
        self._decode_loop = DecodeLoop(self.batch, method, queued, capacity)

    def prepare(self, requests: Sequence[LLMGenerationRequest], noise_seed: int) -> list[GenerationSequence]:
        """Prepare requests: prompts with placeholders. ValueError for an invalid request."""
        self.clear_last_batch()
        return self.preparer.prepare(requests, noise_seed)

    def prepare_system_prompt(self, system_prompt: str, lora: str) -> GenerationSequence:
        """Prepare the shared prefix of all prompts of a system prompt. ValueError."""
        self.clear_last_batch()
        return self.preparer.prepare_system_prompt(system_prompt, lora)

    def clear_last_batch(self) -> None:
        """Drop what the last batch has left for its caller, and removed adapters."""
        self.drop_removed_adapters()
        self.hidden_states.clear()
        self.input_token_ids, self.batch_index_mapping = [], []

    def store_prefixes(self, sequences: list[GenerationSequence]) -> None:
        """Store prompts of the batch in the prefix cache."""
        for sequence in sequences:
            self.reuse.store(sequence, self.batch.row_of(sequence))

    def store_answers(self, sequences: list[GenerationSequence]) -> bool:
        """Store conversations as their next turns begin; return whether there was work.

        The batch must be empty.
        """
        turns = self.next_turns(sequences)
        if turns:
            self.prefills.compute(turns, self.batch.admit(turns))
            self.store_prefixes(turns)
            self.batch.evict(turns)
        return bool(turns)

    def next_turns(self, sequences: list[GenerationSequence]) -> list[GenerationSequence]:
        """Make sequences of what the next turns of conversations begin with, encoded.

        The answer is written as the chat template writes it. The rows are computed by a prefill, so that they
        have the bits of a prompt's rows (prefix_cache.py). What was encoded for the answers is not encoded
        again: their encoder rows must still be there. Conversations whose prompt the prefix cache had no room
        for are left out, and those whose next turn is stored already.
        """
        turns: list[GenerationSequence] = []
        for sequence in sequences:
            talks = sequence.request.messages is not None and not sequence.is_cancelled
            if not talks or not self.reuse.has_pages(sequence):
                continue
            turn = self.preparer.prepare_next_turn(sequence)
            if turn is not None:
                turns.append(turn)
        self.reuse.match(turns)
        turns = [turn for turn in turns if self.reuse.stored_length(turn) < len(turn.token_ids)]
        if turns:
            self.encode_images(turns)
            self.encode_audio(turns)
        return turns

    def remove_loras(self, names: Sequence[str]) -> None:
        """Remove adapters, from any thread; see `LLMInferenceRuntime.remove_lora`.

        The running batch may still use prefixes and recorded steps of the adapters. They are dropped when the
        next batch begins.
        """
        self._removed.extend(self.loras.remove(*names))

    def drop_removed_adapters(self) -> None:
        """Drop the prefixes and recorded steps of adapters that were removed."""
        while self._removed:
            adapter = self._removed.popleft()
            self.reuse.remove(adapter.key)
            self._drop_steps([adapter, *self.runner.lm_heads.drop(adapter)])

    def remove_lm_head(self, name: str) -> None:
        """Remove an LM head; no batch may run."""
        self._drop_steps(self.runner.lm_heads.remove(name))

    def _drop_steps(self, adapters: Sequence[LoraAdapter]) -> None:
        """Drop the recorded steps of these adapters."""
        for adapter in adapters:
            self.method.drop(adapter)
            self.prefills.drop(adapter)
            self.runner.drop(adapter)

    def _encode_ahead(self, requests: Sequence[LLMGenerationRequest]) -> bool:
        """Encode images while the host makes prompts; False on a CPU or without any."""
        if not requests or not self.device.max_queued_steps:
            return False
        try:
            return self.encoders.encode_ahead(requests[0], caches=self.prefixes.capacity_bytes > 0)
        except BaseException as error:
            recover_after(self, error)
            raise

    def encode_images(self, sequences: list[GenerationSequence]) -> None:
        """Encode images and videos: camera frames -> rows of embeddings."""
        self.encoders.encode_images(sequences)

    def encode_audio(self, sequences: list[GenerationSequence]) -> None:
        """Encode sounds -> rows of embeddings."""
        self.encoders.encode_audio(sequences)

    def prefill(self, sequences: list[GenerationSequence], keep_hidden_states: bool = False) -> None:
        """Admit sequences to the batch, fill their KV rows, sample their first tokens."""
        self.batch.admit(sequences)
        prompts = PromptsInParts(self, sequences, keep_hidden_states=keep_hidden_states)
        while not prompts.done:
            prompts.advance()
        prompts.deliver()

    def prefilled(self, sequences: Sequence[GenerationSequence]) -> None:
        """Count prompts that have been computed."""
        self.input_token_ids = [sequence.token_ids for sequence in sequences]
        self.batch_index_mapping = [sequence.request_index for sequence in sequences]
        reused = sum(sequence.reused_tokens for sequence in sequences)
        self._metrics.prefill.total_runs += 1
        self._metrics.prefill.computed_tokens += sum(map(len, self.input_token_ids)) - reused
        self._metrics.prefill.reused_tokens += reused

    def finish(self, ended: Sequence[GenerationSequence], clock: Clock) -> None:
        """Sample trajectories of ended sequences, store their prompts, free their rows."""
        for sequence in ended:
            while sequence.wants_part:
                self.trajectories.queue_part(sequence)  # noise and KV cache -> trajectories
            clock.end("action_s")
            self.store_prefixes([sequence])  # KV cache -> prefix cache; the device still works
            clock.end("keep_s")
            self.trajectories.deliver(sequence)
            if sequence.actions is not None:
                clock.end("action_s")
        self.batch.evict(ended)
        clock.end("keep_s")

    def decode(
        self,
        interrupted: Callable[[], bool] = lambda: False,
        first_tokens: Callable[[], None] | None = None,
        behind: Callable[[], None] | None = None,
    ) -> list[GenerationSequence]:
        """Decode until a sequence has ended, or after a step `interrupted` returns True.

        first_tokens, behind: see `DecodeLoop.run`. Returns the ended sequences.
        """
        steps = self._decode_loop.steps
        ended = self._decode_loop.run(interrupted, first_tokens, behind)
        self._metrics.generation.total_runs += self._decode_loop.steps - steps
        self._metrics.generation.generated_tokens += sum(len(sequence.generated) for sequence in ended)
        return ended

    def read_calls(self, sequence: GenerationSequence) -> ParsedAnswer:
        """Read the tool calls of a finished answer, if its request has tools."""
        request, text = sequence.request, sequence.text.text
        if not request.tools:
            return ParsedAnswer(text)
        tokens = [token for token in sequence.generated if token not in sequence.stop_token_ids]
        before = sequence.token_ids[-TOKENS_BEFORE_ANSWER:]
        return self._calls.read(tokens, text, request.sampling.stop, before, request.tools)

    def measure_rounds(self, on: bool) -> None:
        """Measure the parts of rounds from the next batch on; see `LLMInferenceRuntime`."""
        if isinstance(self.method, TreeDecoding):
            self.method.measures_rounds = on or self.device.max_queued_steps == 0

    def capture_decoding_cuda_graph(self) -> bool:
        """Record decode steps, and from now on prefills; see `LLMInferenceRuntime`."""
        try:
            self.records_prefills = self.method.capture(self.loras.loaded())
            self.encoders.warm_up(self.device)
            self.prefills.warm_up(self.device)
            if not self._is_warm:
                self._is_warm = True
                answer_in_advance(self, self._metrics)
        except DeviceLostError:
            raise
        except EngineError as error:
            recover_after(self, error)
            logger.warning("decoding goes on with the graphs recorded so far: a step failed: %s", error)
            return False
        return self.records_prefills
