# SPDX-License-Identifier: Apache-2.0
"""LLMInferenceRuntime: from requests to words and trajectories. `handle_request` is the way of the data, top
to bottom.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import overload

import numpy as np

from edgellm_ros.diffusion.action_runner import ActionRunner
from edgellm_ros.diffusion.action_space import UnicycleActionSpace
from edgellm_ros.diffusion.trajectory_history import check_history, history_speed, history_tokens
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
from edgellm_ros.runtime.llm_engine_runner import LLMEngineRunner
from edgellm_ros.runtime.metrics import (
    ActionMetrics,
    LLMGenerationMetrics,
    LLMPrefillMetrics,
    MultimodalMetrics,
)
from edgellm_ros.runtime.prompt import PromptBuilder
from edgellm_ros.runtime.request import LLMGenerationRequest, LLMGenerationResponse
from edgellm_ros.runtime.rope import get_rope_index
from edgellm_ros.runtime.sequence import GenerationSequence
from edgellm_ros.runtime.text_stream import TextStream
from edgellm_ros.runtime.token_sampler import TokenSampler
from edgellm_ros.runtime.tokenizer import Tokenizer


class LLMInferenceRuntime:
    """An engine directory, loaded on a device. One batch of requests at a time; other threads wait for their
    turn.

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

        self._tokenizer = Tokenizer(root / "tokenizer.json")
        self._prompts = PromptBuilder(self._tokenizer, ChatTemplate(root / "chat_template.jinja"), config)
        horizon = config.action.action_space.horizon if config.action else 0
        self._runner = LLMEngineRunner(
            EngineExecutor.open(root / "llm" / "model.onnx", self._device, threads),
            llm,
            builder,
            self._device,
            kernels,
            horizon,
        )
        dtype = self._runner.embeds_dtype
        self._embedder = InputEmbedder(root / "embedding.safetensors", config, self._device, kernels, dtype)
        self._sampler = TokenSampler(self._device, kernels, builder.max_batch_size, llm.vocab_size)
        self._logits = self._device.empty((builder.max_batch_size, 1, llm.vocab_size), np.float32)
        self._vision: VisionRunner | None = None
        if config.vision is not None:
            executor = EngineExecutor.open(root / "visual" / "model.onnx", self._device, threads)
            self._vision = VisionRunner(executor, config.vision, self._device, builder.max_input_len)
        self._action: ActionRunner | None = None
        if config.action is not None:
            executor = EngineExecutor.open(root / "action" / "model.onnx", self._device, threads)
            table, samples = self._runner.rope_table, builder.max_action_samples
            self._action = ActionRunner(executor, config.action, self._device, kernels, table, samples)
            self._action_space = UnicycleActionSpace(config.action.action_space)

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
        single = isinstance(request, LLMGenerationRequest)
        requests = [request] if single else list(request)
        with self._lock:
            if self._closed:
                raise EngineError("the runtime is closed")
            clock = _StageClock()
            sequences = self._tokenize(requests)  # requests -> prompts with placeholders
            try:
                waiting = self._encode_images(sequences)  # camera frames -> rows of embeddings
                clock.stage("vision_s")
                tokens = self._prefill(waiting)  # prompts and rows -> KV cache, first tokens
                clock.stage("prefill_s")
                self._decode(waiting, tokens)  # tokens -> KV cache, next tokens, text
                clock.stage("decode_s")
                self._sample_actions(waiting)  # noise and KV cache -> trajectories
                clock.stage("action_s")
            except BaseException:
                self._runner.kv_cache.clear()  # what went wrong must not reach the next request
                raise
            responses = [self._respond(sequence, clock.metrics()) for sequence in sequences]
        return responses[0] if single else responses

    def _tokenize(self, requests: list[LLMGenerationRequest]) -> list[GenerationSequence]:
        """Requests -> prompts with placeholders. What is wrong with a request is found here."""
        limit = self.config.builder.max_batch_size
        if not 1 <= len(requests) <= limit:
            raise ValueError(
                f"a batch of {len(requests)} requests; this engine takes 1 to {limit} (max_batch_size)"
            )
        sequences = []
        for index, request in enumerate(requests):
            try:
                sequences.append(self._make_sequence(request))
            except ValueError as error:
                raise ValueError(f"request {index}: {error}" if len(requests) > 1 else str(error)) from None
        row = 0
        for sequence in sequences:
            sequence.image_row = row
            row += sum(height * width for height, width in sequence.image_grids)
        return sequences

    def _make_sequence(self, request: LLMGenerationRequest) -> GenerationSequence:
        config, action, tokens = self.config, self.config.action, self.config.special_tokens
        self._check_supported(request)
        points = check_history(request.history, action.trajectory_history) if action else None
        history = history_tokens(points, action.trajectory_history) if action else []
        grids = [self._vision.token_grid(image) for image in request.images]
        token_ids = self._prompts.build(request, [height * width for height, width in grids], history)
        if len(token_ids) > config.builder.max_input_len:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens; this engine takes at most "
                f"{config.builder.max_input_len} (max_input_len)"
            )
        positions, delta = get_rope_index(
            token_ids, grids, tokens.image_token_id, tokens.vision_start_token_id
        )
        # The last cache row of a sequence is scratch, for when it has ended while others of its batch go on.
        room = config.builder.max_kv_cache_capacity - 1 - len(token_ids)
        return GenerationSequence(
            request=request,
            token_ids=token_ids,
            image_grids=grids,
            positions=positions,
            rope_delta=delta,
            max_tokens=min(request.sampling.max_tokens, room),
            stop_token_ids=config.stop_token_ids,
            future_start_token_id=action.future_start_token_id if action else None,
            points=points,
            noise_seed=self._noise_seed if request.noise_seed is None else request.noise_seed,
            text=TextStream(self._tokenizer, request.sampling.stop),
        )

    def _check_supported(self, request: LLMGenerationRequest) -> None:
        if request.images and self._vision is None:
            raise ValueError("this engine has no vision encoder, the request has images")
        if request.audio:
            raise ValueError("this engine has no audio encoder, the request has audio")
        if request.lora:
            raise ValueError(
                f"unknown LoRA adapter {request.lora!r}; available: {', '.join(self.lora_names()) or 'none'}"
            )
        if request.logprobs > self.config.llm.vocab_size:
            raise ValueError(
                f"logprobs {request.logprobs} exceeds the vocabulary of {self.config.llm.vocab_size} tokens"
            )
        if self._action is None:
            if request.action_samples or request.history is not None:
                raise ValueError("this engine has no action head, the request has action_samples or history")
        elif request.action_samples > self._action.max_samples:
            raise ValueError(
                f"action_samples is {request.action_samples}; this engine takes at most "
                f"{self._action.max_samples} (max_action_samples)"
            )

    def _encode_images(self, sequences: list[GenerationSequence]) -> list[GenerationSequence]:
        """Camera frames -> rows of embeddings, one image at a time. Returns the sequences that were not
        cancelled.
        """
        start = time.perf_counter()
        for sequence in sequences:
            row = sequence.image_row
            for index, (image, (height, width)) in enumerate(
                zip(sequence.request.images, sequence.image_grids, strict=True)
            ):
                if not sequence.go_on("vision", index):
                    break
                self._vision.encode(image, *self._embedder.image_rows(row, height * width))
                row += height * width
                self.multimodal_metrics.total_images += 1
                self.multimodal_metrics.total_image_tokens += height * width
        self.multimodal_metrics.seconds += time.perf_counter() - start
        return [sequence for sequence in sequences if sequence.go_on("prefill", 0)]

    def _prefill(self, sequences: list[GenerationSequence]) -> Tensor | None:
        """Prompts and rows -> KV cache. Returns each sequence's first token [B], None if there is no
        sequence.
        """
        if not sequences:
            return None
        start = time.perf_counter()
        prompts = [sequence.token_ids for sequence in sequences]
        embeds, deepstack = self._embedder.embed_prompts(
            prompts, [sequence.image_row for sequence in sequences]
        )
        positions = np.zeros((len(prompts), 3, embeds.shape[1]), np.int64)
        for row, sequence in enumerate(sequences):
            positions[row, :, : len(sequence.token_ids)] = sequence.positions
        deltas = [sequence.rope_delta for sequence in sequences]
        logits = self._logits.rows(0, len(prompts))
        self._runner.execute_prefill_step(
            embeds, [len(prompt) for prompt in prompts], positions, deltas, deepstack, logits
        )
        self._sampler.begin(sequences)
        tokens = self._sampler.draw(logits, sequences)
        self.prefill_metrics.total_runs += 1
        self.prefill_metrics.computed_tokens += sum(len(prompt) for prompt in prompts)
        self.prefill_metrics.seconds += time.perf_counter() - start
        return tokens

    def _decode(self, sequences: list[GenerationSequence], tokens: Tensor | None) -> None:
        """Tokens -> KV cache -> next tokens, until every sequence has ended.

        All sequences up to the last that still decodes are stepped together; one that has ended before is
        carried along.
        """
        start, steps = time.perf_counter(), 0
        drew = sequences
        while True:
            for sequence in drew:
                sequence.go_on("decode", steps)
            running = [row for row, sequence in enumerate(sequences) if sequence.decoding]
            if not running:
                break
            batch = sequences[: running[-1] + 1]
            drew = [sequences[row] for row in running]
            self._runner.kv_cache.set_active_batch_size(len(batch))
            embeds = self._embedder.embed_tokens(tokens.rows(0, len(batch)))
            advance = np.array([sequence.decoding for sequence in batch], np.int64)
            logits = self._logits.rows(0, len(batch))
            self._runner.execute_vanilla_decoding_step(embeds, advance, logits)
            tokens = self._sampler.draw(logits, batch)
            steps += 1
        self.generation_metrics.total_runs += steps
        self.generation_metrics.generated_tokens += sum(len(sequence.generated) for sequence in sequences)
        self.generation_metrics.seconds += time.perf_counter() - start

    def _sample_actions(self, sequences: list[GenerationSequence]) -> None:
        """Noise and KV cache -> trajectories -> paths, for the sequences that announced them."""
        start = time.perf_counter()
        for row, sequence in enumerate(sequences):
            if not sequence.announced_actions:
                continue
            request, config = sequence.request, self.config.action
            normalised = self._action.execute(
                self._runner.kv_cache.sequence(row),
                samples=request.action_samples,
                steps=request.denoise_steps or config.num_denoise_steps,
                seed=sequence.noise_seed,
                go_on=partial(sequence.go_on, "action"),
            )
            if normalised is not None:
                speed = (
                    history_speed(sequence.points, config.trajectory_history)
                    if request.speed is None
                    else request.speed
                )
                sequence.actions = self._action_space.denormalise(normalised)
                sequence.paths = self._action_space.integrate(sequence.actions, speed)
                self.action_metrics.trajectories += request.action_samples
                self.action_metrics.total_runs += request.denoise_steps or config.num_denoise_steps
        self.action_metrics.seconds += time.perf_counter() - start

    def _respond(self, sequence: GenerationSequence, metrics: dict[str, float]) -> LLMGenerationResponse:
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

    def set_action_noise_seed(self, seed: int) -> None:
        """Noise seed of requests that bring none, from 0 to 2**64 - 1."""
        if not 0 <= seed <= MAX_SEED:
            raise ValueError(f"the noise seed must be from 0 to {MAX_SEED}, got {seed}")
        self._noise_seed = seed

    def capture_decoding_cuda_graph(self) -> bool:
        """Record decode steps of all batch sizes for faster launches. False where the device has no graphs;
        it works as well.
        """
        with self._lock:
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
            self._closed = True
            self._runner = self._embedder = self._sampler = self._logits = self._vision = self._action = None

    def __enter__(self) -> LLMInferenceRuntime:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _StageClock:
    """Seconds per stage; each stage begins where the one before it ended."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._stages: dict[str, float] = {}

    def stage(self, name: str) -> None:
        now = time.perf_counter()
        self._stages[name], self._last = now - self._last, now

    def metrics(self) -> dict[str, float]:
        """Every stage, the whole, and from the request to the first token."""
        first_token = self._stages["vision_s"] + self._stages["prefill_s"]
        return {**self._stages, "first_token_s": first_token, "total_s": self._last - self._start}
