# SPDX-License-Identifier: Apache-2.0
"""LLMInferenceRuntime: requests to words and trajectories. `handle_request` is the way of the data."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import overload

import numpy as np

from edgellm_ros.diffusion.action_runner import ActionRunner
from edgellm_ros.engine.device import open_device
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels import load_kernels
from edgellm_ros.kernels.random import MAX_SEED
from edgellm_ros.multimodal.vision_runner import VisionRunner
from edgellm_ros.runtime.chat_template import ChatTemplate
from edgellm_ros.runtime.config import EngineConfig
from edgellm_ros.runtime.input_embedder import InputEmbedder
from edgellm_ros.runtime.intake import RequestIntake
from edgellm_ros.runtime.llm_engine_runner import LLMEngineRunner
from edgellm_ros.runtime.metrics import (
    ActionMetrics,
    LLMGenerationMetrics,
    LLMPrefillMetrics,
    MultimodalMetrics,
    StageClock,
)
from edgellm_ros.runtime.prompt import PromptBuilder
from edgellm_ros.runtime.request import LLMGenerationRequest, LLMGenerationResponse
from edgellm_ros.runtime.sequence import GenerationSequence
from edgellm_ros.runtime.token_sampler import TokenSampler
from edgellm_ros.runtime.tokenizer import Tokenizer


class LLMInferenceRuntime:
    """An engine directory, loaded on a device. One batch at a time; other threads wait for their turn.

    `device`: "cpu", "cuda" or "tensorrt"; `threads` of the CPU, 0 = one per core. FileNotFoundError or
    ValueError for a damaged engine directory, EngineError for a device or engine that cannot be used.
    """

    def __init__(self, engine_dir: str | Path, device: str = "cpu", threads: int = 0) -> None:
        root = Path(engine_dir)
        self.config = config = EngineConfig.load(root)
        llm, builder = config.llm, config.builder
        self._device = open_device(device)
        kernels = load_kernels(self._device)
        self._lock = threading.Lock()
        self._closed = False
        self._noise_seed = 0
        self.prefill_metrics = LLMPrefillMetrics()
        self.generation_metrics = LLMGenerationMetrics()
        self.multimodal_metrics = MultimodalMetrics()
        self.action_metrics = ActionMetrics()

        def engine(part: str) -> EngineExecutor:
            return EngineExecutor.open(root / part / "model.onnx", self._device, threads)

        horizon = config.action.action_space.horizon if config.action else 0
        self._runner = LLMEngineRunner(engine("llm"), llm, builder, self._device, kernels, horizon)
        dtype = self._runner.embeds_dtype
        self._embedder = InputEmbedder(root / "embedding.safetensors", config, self._device, kernels, dtype)
        self._sampler = TokenSampler(self._device, kernels, builder.max_batch_size, llm.vocab_size)
        self._logits = self._device.empty((builder.max_batch_size, 1, llm.vocab_size), np.float32)
        self._vision: VisionRunner | None = None
        if config.vision is not None:
            self._vision = VisionRunner(engine("visual"), config.vision, self._device, builder.max_input_len)
        self._action: ActionRunner | None = None
        if config.action is not None:
            table, samples = self._runner.rope_table, builder.max_action_samples
            self._action = ActionRunner(
                engine("action"), config.action, self._device, kernels, table, samples
            )
        tokenizer = Tokenizer(root / "tokenizer.json")
        prompts = PromptBuilder(tokenizer, ChatTemplate(root / "chat_template.jinja"), config)
        self._intake = RequestIntake(config, tokenizer, prompts, self._vision, self._action)

    @overload
    def handle_request(self, request: LLMGenerationRequest) -> LLMGenerationResponse: ...

    @overload
    def handle_request(self, request: Sequence[LLMGenerationRequest]) -> list[LLMGenerationResponse]: ...

    def handle_request(
        self, request: LLMGenerationRequest | Sequence[LLMGenerationRequest]
    ) -> LLMGenerationResponse | list[LLMGenerationResponse]:
        """Answer one request, or a batch of different requests.

        An answer does not depend on what else is in the batch. ValueError, before any work, for a request
        that cannot be served; EngineError if an engine fails or makes numbers that are not finite.
        """
        requests = [request] if isinstance(request, LLMGenerationRequest) else list(request)
        with self._lock:
            self._check_open()
            clock = StageClock()
            sequences = self._intake.admit(
                requests, self._noise_seed
            )  # requests -> prompts with placeholders
            clock.end("tokenize_s")
            try:
                self._encode_images(sequences)  # camera frames -> rows of embeddings
                self.multimodal_metrics.seconds += clock.end("vision_s")
                waiting = [sequence for sequence in sequences if sequence.go_on("prefill", 0)]
                if waiting:
                    tokens = self._prefill(waiting)  # prompts and rows -> KV cache, first tokens
                    self.prefill_metrics.seconds += clock.end("prefill_s")
                    self._decode(waiting, tokens)  # tokens -> KV cache, next tokens, text
                    self.generation_metrics.seconds += clock.end("decode_s")
                    self._sample_actions(waiting)  # noise and KV cache -> trajectories
                    self.action_metrics.seconds += clock.end("action_s")
            except BaseException:
                self._runner.kv_cache.clear()  # what went wrong must not reach the next request
                raise
            metrics = clock.metrics()
        responses = [_response(sequence, metrics) for sequence in sequences]
        return responses[0] if isinstance(request, LLMGenerationRequest) else responses

    def _encode_images(self, sequences: list[GenerationSequence]) -> None:
        """Camera frames -> rows of embeddings, one image at a time, until a sequence is cancelled."""
        if self._vision is None:
            return
        for sequence in sequences:
            row = sequence.image_row
            for index, (height, width) in enumerate(sequence.image_grids):
                if not sequence.go_on("vision", index):
                    break
                image_rows, deepstack_rows = self._embedder.image_rows(row, height * width)
                self._vision.encode(sequence.request.images[index], image_rows, deepstack_rows)
                row += height * width
                self.multimodal_metrics.total_images += 1
                self.multimodal_metrics.total_image_tokens += height * width

    def _prefill(self, sequences: list[GenerationSequence]) -> Tensor:
        """Prompts and rows -> KV cache. Returns each sequence's first token [B]."""
        prompts = [sequence.token_ids for sequence in sequences]
        embeds, deepstack = self._embedder.embed_prompts(
            prompts, [sequence.image_row for sequence in sequences]
        )
        positions = np.zeros((len(prompts), 3, embeds.shape[1]), np.int64)
        for row, sequence in enumerate(sequences):
            positions[row, :, : len(sequence.token_ids)] = sequence.positions
        lengths = [len(prompt) for prompt in prompts]
        deltas = [sequence.rope_delta for sequence in sequences]
        logits = self._logits.rows(0, len(prompts))
        self._runner.execute_prefill_step(embeds, lengths, positions, deltas, deepstack, logits)
        self.prefill_metrics.total_runs += 1
        self.prefill_metrics.computed_tokens += sum(lengths)
        self._sampler.begin(sequences)
        return self._sampler.draw(logits, sequences)

    def _decode(self, sequences: list[GenerationSequence], tokens: Tensor) -> None:
        """Tokens -> KV cache -> next tokens, until every sequence has ended.

        All sequences up to the last that still decodes are stepped together; one that has ended before is
        carried along.
        """
        drew, steps = sequences, 0
        while True:
            for sequence in drew:
                sequence.go_on("decode", steps)
            running = [row for row, sequence in enumerate(sequences) if sequence.decoding]
            if not running:
                break
            drew = [sequences[row] for row in running]
            batch = sequences[: running[-1] + 1]
            self._runner.kv_cache.set_active_batch_size(len(batch))
            embeds = self._embedder.embed_tokens(tokens.rows(0, len(batch)))
            advance = np.array([sequence.decoding for sequence in batch], np.int64)
            logits = self._logits.rows(0, len(batch))
            self._runner.execute_vanilla_decoding_step(embeds, advance, logits)
            tokens = self._sampler.draw(logits, batch)
            steps += 1
        self.generation_metrics.total_runs += steps
        self.generation_metrics.generated_tokens += sum(len(sequence.generated) for sequence in sequences)

    def _sample_actions(self, sequences: list[GenerationSequence]) -> None:
        """Noise and KV cache -> trajectories -> paths, for the sequences that announced them."""
        if self._action is None:
            return
        space = self._action.action_space
        for row, sequence in enumerate(sequences):
            if not sequence.announced_actions:
                continue
            samples = sequence.request.action_samples
            steps = sequence.request.denoise_steps or self._action.default_steps
            cache = self._runner.kv_cache.sequence(row)
            go_on = partial(sequence.go_on, "action")
            normalised = self._action.execute(cache, samples, steps, sequence.noise_seed, go_on)
            if normalised is not None:
                sequence.actions = space.denormalise(normalised)
                sequence.paths = space.integrate(sequence.actions, sequence.speed)
                self.action_metrics.trajectories += samples
                self.action_metrics.total_runs += steps

    def set_action_noise_seed(self, seed: int) -> None:
        """Noise seed of requests that bring none, from 0 to 2**64 - 1."""
        if not 0 <= seed <= MAX_SEED:
            raise ValueError(f"the noise seed must be from 0 to {MAX_SEED}, got {seed}")
        self._noise_seed = seed

    def capture_decoding_cuda_graph(self) -> bool:
        """Record decode steps of all batch sizes, to launch them faster. False where there are no graphs."""
        with self._lock:
            self._check_open()
            return all(
                self._runner.capture_vanilla_decoding_cuda_graph(
                    self._embedder.token_embeds(batch), self._logits.rows(0, batch)
                )
                for batch in range(1, self.config.builder.max_batch_size + 1)
            )

    def lora_names(self) -> list[str]:
        """Adapters that requests may name."""
        return []

    def close(self) -> None:
        """Free engines and buffers, after the batch in progress. A closed runtime raises EngineError."""
        with self._lock:
            if not self._closed:
                self._closed = True
                del self._runner, self._embedder, self._sampler, self._logits
                del self._vision, self._action, self._intake

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the runtime is closed")

    def __enter__(self) -> LLMInferenceRuntime:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _response(sequence: GenerationSequence, metrics: dict[str, float]) -> LLMGenerationResponse:
    return LLMGenerationResponse(
        text=sequence.text.text,
        token_ids=sequence.generated,
        finish_reason=sequence.finish_reason,
        prompt_tokens=len(sequence.token_ids),
        logprobs=sequence.logprobs if sequence.request.logprobs else None,
        actions=sequence.actions,
        paths=sequence.paths,
        noise_seed=sequence.noise_seed,
        metrics=metrics,
    )
