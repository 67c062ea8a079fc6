# SPDX-License-Identifier: Apache-2.0
"""LLMInferenceRuntime: requests to words and trajectories. `handle_request` is the way of the data."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import overload

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.kernels.random import MAX_SEED
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.metrics import (
    ActionMetrics,
    LLMGenerationMetrics,
    LLMPrefillMetrics,
    MultimodalMetrics,
    RuntimeMetrics,
    StageClock,
)
from edgellm_ros.runtime.pipeline import Pipeline
from edgellm_ros.runtime.prefix.prefix_file import engine_fingerprint, load_prefix_cache, save_prefix_cache
from edgellm_ros.runtime.request import LLMGenerationRequest, LLMGenerationResponse


class LLMInferenceRuntime:
    """An engine directory, loaded on a device. One batch at a time; other threads wait for their turn.
    Runtimes that share a Device are for one thread.

    `device`: "cpu", "cuda", "tensorrt" or a Device; `threads` of the CPU, 0 = one per core; `lora_dirs`:
    adapters to load, name -> PEFT directory, None = those in the engine directory's folder `lora`;
    `prefix_cache_bytes`: memory for beginnings of prompts that are used again, None = as much as the KV cache
    has, 0 = none.
    FileNotFoundError or ValueError for a damaged engine directory or adapter, EngineError for a device or
    engine that cannot be used.
    """

    def __init__(
        self,
        engine_dir: str | Path,
        device: str | Device = "cpu",
        threads: int = 0,
        lora_dirs: Mapping[str, str | Path] | None = None,
        prefix_cache_bytes: int | None = None,
        decode_backend: str = "",
    ) -> None:
        root = Path(engine_dir)
        self.config = EngineConfig.load(root)
        self._metrics = RuntimeMetrics()
        self._lock = threading.Lock()
        self._noise_seed = 0
        self._loaded: Pipeline | None = Pipeline(
            root,
            self.config,
            self._metrics,
            device,
            threads,
            lora_dirs,
            prefix_cache_bytes,
            decode_backend,
        )

    @overload
    def handle_request(
        self, request: LLMGenerationRequest, output_thinker_embeddings: bool = False
    ) -> LLMGenerationResponse: ...

    @overload
    def handle_request(
        self, request: Sequence[LLMGenerationRequest], output_thinker_embeddings: bool = False
    ) -> list[LLMGenerationResponse]: ...

    def handle_request(
        self,
        request: LLMGenerationRequest | Sequence[LLMGenerationRequest],
        output_thinker_embeddings: bool = False,
    ) -> LLMGenerationResponse | list[LLMGenerationResponse]:
        """Answer one request, or a batch of different requests.

        An answer depends neither on what else is in the batch nor on what was asked before: on a CPU to the
        last bit, on a GPU up to rounding.
        `output_thinker_embeddings`: keep the prompts' hidden states for `base_model_hidden_states`.
        ValueError, before any work, for a request that cannot be served; EngineError if an engine fails or
        makes numbers that are not finite.
        """
        requests = [request] if isinstance(request, LLMGenerationRequest) else list(request)
        with self._lock:
            pipeline, metrics = self.pipeline, self._metrics
            clock = StageClock(pipeline.device.synchronize)
            sequences = pipeline.prepare(requests, self._noise_seed)  # requests -> prompts with placeholders
            # prefix cache -> tokens not to compute again; hidden states are of whole prompts
            pipeline.match_prefixes(sequences, reuse=not output_thinker_embeddings)
            clock.end("tokenize_s")
            try:
                pipeline.encode_images(sequences)  # camera frames -> rows of embeddings
                metrics.multimodal.seconds += clock.end("vision_s")
                pipeline.encode_audio(sequences)  # sound -> rows of embeddings
                metrics.multimodal.seconds += clock.end("audio_s")
                going_on = [sequence for sequence in sequences if sequence.report("prefill", 0)]
                going_on.sort(key=lambda sequence: sequence.adapter.name)  # one run for each adapter
                if going_on:
                    # prompts and rows -> KV cache, first tokens
                    pipeline.prefill(going_on, keep_hidden_states=output_thinker_embeddings)
                    metrics.prefill.seconds += clock.end("prefill_s")
                while pipeline.batch.sequences:
                    ended = pipeline.decode()  # tokens -> KV cache, next tokens, text; until one has ended
                    metrics.generation.seconds += clock.end("decode_s")
                    pipeline.sample_actions(ended)  # noise and KV cache -> trajectories
                    metrics.action.seconds += clock.end("action_s")
                    pipeline.store_prefixes(ended)  # KV cache -> prefix cache
                    pipeline.batch.evict(ended)
                    clock.end("keep_s")
            except BaseException as error:
                pipeline.recover_after(error)
                raise
        seconds = clock.metrics()
        responses = [response_of(sequence, seconds) for sequence in sequences]
        return responses[0] if isinstance(request, LLMGenerationRequest) else responses

    def set_action_noise_seed(self, seed: int) -> None:
        """Noise seed of requests that bring none, from 0 to 2**64 - 1."""
        if not 0 <= seed <= MAX_SEED:
            raise ValueError(f"the noise seed must be from 0 to {MAX_SEED}, got {seed}")
        self._noise_seed = seed

    def capture_decoding_cuda_graph(self) -> bool:
        """Record decode steps of all batch sizes with all adapters, to launch each with one call.

        Takes seconds and some memory. An adapter that comes later is recorded when it is first used. False
        where there are no graphs or, with the reason in the log, a step cannot be recorded.
        """
        with self._lock:
            return self.pipeline.capture_decoding_cuda_graph()

    @property
    def embedding_table(self) -> Tensor:
        """The embedding of every token [V,H], on the device. Not to be written to."""
        return self.pipeline.embedder.table

    def base_model_hidden_states(self, layer: int) -> Tensor | None:
        """What the last batch's prompts became in the language model, [B,S,H], on the device.

        Layer 0 is its input, with the encoders' rows in place; others are there if the engine was exported
        with them (`hidden_state_layers`). Row b belongs to base_model_input_token_ids[b] and is valid up to
        that prompt's length. None if the engine has no such layer, or if the last `handle_request` was not
        asked for hidden states. The runtime owns the memory and overwrites it when the next request begins:
        until then, copy what you keep.
        """
        return self.pipeline.hidden_states.layer(layer)

    @property
    def base_model_input_token_ids(self) -> list[list[int]]:
        """Token ids of each prompt of the last batch that was computed, in the order of the hidden states."""
        return self.pipeline.input_token_ids

    @property
    def base_model_prefill_length(self) -> int:
        """S of the hidden states: the longest prompt of the last batch; 0 if they were not asked for."""
        return self.pipeline.hidden_states.prefill_length

    def gen_and_save_system_prompt_kv_cache(self, system_prompt: str, lora: str = "") -> int:
        """Compute what all prompts of this system prompt begin with, for requests to come.

        Returns its number of tokens. It stays in the prefix cache until other prompts need the room and it
        was used least recently. ValueError if it is empty, too long for the engine or for the prefix cache,
        or for an unknown adapter.
        """
        with self._lock:
            pipeline = self.pipeline
            clock = StageClock(pipeline.device.synchronize)
            sequence = pipeline.prepare_system_prompt(system_prompt, lora)
            pipeline.match_prefixes([sequence])
            clock.end("tokenize_s")
            try:
                pipeline.prefill([sequence])
                self._metrics.prefill.seconds += clock.end("prefill_s")
                pipeline.store_prefixes([sequence])
                pipeline.batch.evict([sequence])
                clock.end("keep_s")
            except BaseException as error:
                pipeline.recover_after(error)
                raise
            tokens = len(sequence.token_ids)
            kept = pipeline.prefixes.kept(sequence.adapter.key, sequence.prefix_keys)
            if kept < tokens:
                size = pipeline.prefixes.capacity_bytes
                raise ValueError(f"the prefix cache of {size} bytes has room for {kept} of {tokens} tokens")
            return tokens

    def save_prefix_cache(self, path: str | Path) -> None:
        """Write all beginnings of prompts that are kept to a file. OSError where that is not possible."""
        with self._lock:
            pipeline = self.pipeline
            pipeline.drop_removed_adapters()
            save_prefix_cache(path, pipeline.prefixes, pipeline.device, engine_fingerprint(self.config))

    def load_prefix_cache(self, path: str | Path) -> int:
        """Go on with the beginnings of prompts from a file; returns how many of its pages found room.

        FileNotFoundError, or ValueError for a file that is damaged or was saved with another engine: then
        everything stays as it was. EngineError if the device fails: then nothing is kept.
        """
        with self._lock:
            pipeline = self.pipeline
            return load_prefix_cache(
                path, pipeline.prefixes, pipeline.device, engine_fingerprint(self.config)
            )

    def clear_prefix_cache(self) -> None:
        """Forget all beginnings of prompts."""
        with self._lock:
            self.pipeline.prefixes.clear()

    def set_lm_head_weights(self, name: str, weights: np.ndarray) -> None:
        """Exchange the matrix that makes logits of hidden states: `lm_head.weight` [H,V], for all requests
        from the next on.

        EngineError if the engine was not exported with `lm_head_input`, or for another shape.
        """
        with self._lock:
            self.pipeline.runner.set_lm_head_weights(name, weights)

    def add_lora(self, name: str, directory: str | Path) -> None:
        """Load a LoRA adapter as PEFT saves it, under a new name; requests may name it from then on.

        ValueError or FileNotFoundError that says what is wrong with it; then everything is as before.
        """
        self.pipeline.loras.add(name, directory)

    def remove_lora(self, *names: str) -> None:
        """Forget adapters and, when the next batch begins, their prompts; a batch that runs with one ends
        with it.

        ValueError for the active one and for unknown ones: then none is removed.
        """
        self.pipeline.remove_loras(names)

    @property
    def prefill_metrics(self) -> LLMPrefillMetrics:
        return self._metrics.prefill

    @property
    def generation_metrics(self) -> LLMGenerationMetrics:
        return self._metrics.generation

    @property
    def multimodal_metrics(self) -> MultimodalMetrics:
        return self._metrics.multimodal

    @property
    def action_metrics(self) -> ActionMetrics:
        return self._metrics.action

    def lora_names(self) -> list[str]:
        """Adapters that requests may name, sorted."""
        return self.pipeline.loras.names()

    def switch_lora_weights(self, name: str) -> None:
        """Make an adapter the active one, which requests use that name none; "" or "base" is the base model.

        Nothing is copied; the batch in progress is not touched. ValueError for an unknown one: then the old
        one stays active.
        """
        self.pipeline.loras.switch(name)

    @property
    def active_lora(self) -> str:
        """The adapter of requests that name none; "" is the base model."""
        return self.pipeline.loras.active

    def close(self) -> None:
        """Free engines and buffers, after the batch in progress. A closed runtime raises EngineError."""
        with self._lock:
            self._loaded = None

    @property
    def closed(self) -> bool:
        return self._loaded is None

    @property
    def pipeline(self) -> Pipeline:
        """Return the stages and what they own, for tests and benchmarks: its layout may change.

        EngineError if the runtime is closed.
        """
        pipeline = self._loaded  # read once: another thread may close the runtime
        if pipeline is None:
            raise EngineError("the runtime is closed")
        return pipeline

    def __enter__(self) -> LLMInferenceRuntime:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def response_of(sequence: GenerationSequence, metrics: dict[str, float]) -> LLMGenerationResponse:
    """Return what a finished sequence has to say."""
    return LLMGenerationResponse(
        text=sequence.text.text,
        token_ids=sequence.generated,
        finish_reason=sequence.finish_reason,
        prompt_tokens=len(sequence.token_ids),
        logprobs=sequence.logprobs if sequence.request.logprobs else None,
        actions=sequence.actions,
        paths=sequence.paths,
        noise_seed=sequence.noise_seed,
        lora=sequence.adapter.name,
        metrics=metrics,
        reused_tokens=sequence.reused_tokens,
    )
