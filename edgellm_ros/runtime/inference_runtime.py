# SPDX-License-Identifier: Apache-2.0
"""LLMInferenceRuntime: text and trajectories for requests.

`handle_request` shows the data flow.
"""

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
from edgellm_ros.runtime.decoding.speculative.drafting_config import (
    EAGLE,
    SpecDecodeDraftingConfig,
    check_drafting,
    drafting_config,
)
from edgellm_ros.runtime.fused.loading import AUTO, FUSED
from edgellm_ros.runtime.metrics import (
    ActionMetrics,
    LLMGenerationMetrics,
    LLMPrefillMetrics,
    MultimodalMetrics,
    RuntimeMetrics,
    SpecDecodeGenerationMetrics,
    StageClock,
)
from edgellm_ros.runtime.pipeline import Pipeline
from edgellm_ros.runtime.policy_pipeline import PolicyPipeline
from edgellm_ros.runtime.prefix.prefix_file import engine_fingerprint, load_prefix_cache, save_prefix_cache
from edgellm_ros.runtime.prompt import tool_calls
from edgellm_ros.runtime.prompt.tool_calls import ParsedAnswer
from edgellm_ros.runtime.request import LLMGenerationRequest, LLMGenerationResponse


class LLMInferenceRuntime:
    """An engine directory, loaded on a device.

    Executes one batch at a time; other threads wait for their turn. Runtimes that share a Device must be
    called from one thread. A policy answers with actions only (docs/action_heads.md): methods that need a
    language model raise EngineError then.

    - device: "cpu", "cuda", "tensorrt" or a Device
    - threads: of the CPU; 0 = one per core
    - lora_dirs: adapters to load, name -> PEFT directory; None = the folder `lora` of the engine directory
    - prefix_cache_bytes: size of the prefix cache; None = same as the batch's state, 0 = off
    - decode_backend: "onnxruntime" or "tensorrt" for decode steps; "" = same as for prefills
    - drafting: speculative decoding: a configuration, or "eagle", "lookup" with its defaults; None or "off" =
      one token per step
    - decode: "fused" executes decode steps and the action head's Euler steps in the fused kernels
      (docs/performance.md), "engine" in the engines; "auto" each in the faster one, measured when the engines
      are loaded, if both are available
    - allow_plan_code: load version-compatible TensorRT plans, whose own code runs in this process
      (docs/tensorrt.md); a Device has its own `allow_plan_code`
    - tool_call_format: how the model writes tool calls: "hermes", "xml", "llama", "mistral" or "nemotron";
      "auto" = as its chat template writes those of earlier messages, "none" = answers are not searched

    FileNotFoundError or ValueError for a damaged engine directory or adapter, or for drafting that the engine
    does not support; EngineError for an unusable device or engine, or if `decode` is "fused" and the fused
    kernels are not available.
    """

    def __init__(
        self,
        engine_dir: str | Path,
        device: str | Device = "cpu",
        threads: int = 0,
        lora_dirs: Mapping[str, str | Path] | None = None,
        prefix_cache_bytes: int | None = None,
        decode_backend: str = "",
        drafting: SpecDecodeDraftingConfig | str | None = None,
        decode: str = AUTO,
        allow_plan_code: bool = False,
        tool_call_format: str = tool_calls.AUTO,
    ) -> None:
        tool_calls.check_format(tool_call_format)
        root = Path(engine_dir)
        self.config = EngineConfig.load(root)
        on_cpu = (device if isinstance(device, str) else device.memory) == "cpu"
        if isinstance(drafting, str):
            drafting = drafting_config(drafting, self.config, on_cpu)
        if drafting is not None:
            check_drafting(drafting, self.config, on_cpu)
        self._metrics = RuntimeMetrics()
        self._lock = threading.Lock()
        self._noise_seed = 0
        self._loaded: Pipeline | None = None
        self._policy: PolicyPipeline | None = None
        if self.config.policy is not None:
            if drafting is not None or lora_dirs or decode_backend or decode == FUSED:
                raise ValueError("a policy has no language model: no adapters, drafting or decode backend")
            policy = self.config.policy
            self._policy = PolicyPipeline(
                root, self.config, policy, self._metrics, device, threads, allow_plan_code
            )
            return
        self._loaded = Pipeline(
            root,
            self.config,
            self._metrics,
            device,
            threads,
            lora_dirs,
            prefix_cache_bytes,
            decode_backend,
            drafting,
            decode,
            allow_plan_code,
            tool_call_format,
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

        An answer depends neither on the other requests of the batch nor on earlier requests: to the last bit
        on a CPU, up to rounding on a GPU, with drafting and after a reused prefix of a hybrid model.
        `output_thinker_embeddings`: store the prompts' hidden states for `base_model_hidden_states`.
        ValueError, before any work, for an invalid request; EngineError if an engine fails or its outputs are
        not finite.
        """
        requests = [request] if isinstance(request, LLMGenerationRequest) else list(request)
        with self._lock:
            if self._policy is not None:
                answers = self._policy.answer(requests, self._noise_seed)  # actions, no text
                return answers[0] if isinstance(request, LLMGenerationRequest) else answers
            pipeline = self.pipeline
            clock = StageClock(pipeline.device.mark)
            sequences = pipeline.prepare(requests, self._noise_seed)  # requests -> prompts with placeholders
            # prefix cache -> tokens to skip in the prefill; hidden states need whole prompts
            pipeline.match_prefixes(sequences, reuse=not output_thinker_embeddings)
            clock.end("tokenize_s")
            try:
                pipeline.encode_images(sequences)  # camera frames -> rows of embeddings
                clock.end("vision_s")
                pipeline.encode_audio(sequences)  # sound -> rows of embeddings
                clock.end("audio_s")
                active = [sequence for sequence in sequences if sequence.report("prefill", 0)]
                active.sort(key=lambda sequence: sequence.adapter.name)  # one run for each adapter
                if active:
                    # prompts and rows -> KV cache, first tokens
                    pipeline.prefill(active, keep_hidden_states=output_thinker_embeddings)
                    clock.end("prefill_s")
                while pipeline.batch.sequences:
                    ended = pipeline.decode()  # tokens -> KV cache, next tokens, text; until a sequence ends
                    clock.end("decode_s")
                    pipeline.sample_actions(ended)  # noise and KV cache -> trajectories
                    clock.end("action_s")
                    pipeline.store_prefixes(ended)  # KV cache -> prefix cache
                    pipeline.batch.evict(ended)
                    clock.end("keep_s")
                if not output_thinker_embeddings:  # a further prefill would overwrite the hidden states
                    pipeline.store_answers(active)  # answers as the next turns read them -> prefix cache
                    clock.end("keep_s")
                seconds = clock.metrics()
            except BaseException as error:
                pipeline.recover_after(error)
                raise
            self._metrics.add_seconds(seconds)
            responses = [response_of(each, seconds, pipeline.read_calls(each)) for each in sequences]
        return responses[0] if isinstance(request, LLMGenerationRequest) else responses

    def set_action_noise_seed(self, seed: int) -> None:
        """Set the noise seed of requests without one, from 0 to 2**64 - 1."""
        if not 0 <= seed <= MAX_SEED:
            raise ValueError(f"the noise seed must be from 0 to {MAX_SEED}, got {seed}")
        self._noise_seed = seed

    def capture_decoding_cuda_graph(self) -> bool:
        """Record decode steps and rounds of drafting as graphs.

        The decode steps are those of all batch sizes with all adapters. The device launches a graph with one
        call. Recording takes seconds and some memory. Steps of an adapter that is added later are recorded
        when the adapter is first used. From then on a prefill of one sequence is recorded too, after two in a
        row of one length. Returns False if the device does not support graphs, or if a step cannot be
        recorded (the log says why).
        """
        with self._lock:
            return self.pipeline.capture_decoding_cuda_graph()

    @property
    def embedding_table(self) -> Tensor:
        """The embedding of every token [V,H], on the device; read-only."""
        return self.pipeline.embedder.table

    def base_model_hidden_states(self, layer: int) -> Tensor | None:
        """Return the hidden states of the last batch's prompts [B,S,H], on the device.

        Layer 0 is the input of the language model, encoder rows included; other layers need an engine that
        was exported with them (`hidden_state_layers`). Row b belongs to base_model_input_token_ids[b] and is
        valid up to the length of that prompt. None if the engine does not output this layer, or if the last
        `handle_request` was called without `output_thinker_embeddings`. The runtime owns the memory and
        overwrites it when the next request begins: copy the tensor before.
        """
        return self.pipeline.hidden_states.layer(layer)

    @property
    def base_model_input_token_ids(self) -> list[list[int]]:
        """Token ids of the last prefilled prompts, in the order of the hidden states."""
        return self.pipeline.input_token_ids

    @property
    def base_model_prefill_length(self) -> int:
        """Length S of the hidden states; 0 if they were not requested."""
        return self.pipeline.hidden_states.prefill_length

    def gen_and_save_system_prompt_kv_cache(self, system_prompt: str, lora: str = "") -> int:
        """Prefill the prefix that all prompts of this system prompt share.

        Returns the number of tokens of the prefix. The prefix cache evicts the prefix when it needs room and
        the prefix is the least recently used. ValueError if the system prompt is empty or too long for the
        engine or for the prefix cache, or for an unknown adapter.
        """
        with self._lock:
            pipeline = self.pipeline
            clock = StageClock(pipeline.device.mark)
            sequence = pipeline.prepare_system_prompt(system_prompt, lora)
            pipeline.match_prefixes([sequence])
            clock.end("tokenize_s")
            try:
                pipeline.prefill([sequence])
                clock.end("prefill_s")
                pipeline.store_prefixes([sequence])
                pipeline.batch.evict([sequence])
                clock.end("keep_s")
                seconds = clock.metrics()
            except BaseException as error:
                pipeline.recover_after(error)
                raise
            self._metrics.add_seconds(seconds)
            tokens = len(sequence.token_ids)
            stored = pipeline.reuse.stored_length(sequence)
            if stored < tokens:
                size = pipeline.prefixes.capacity_bytes
                raise ValueError(f"the prefix cache of {size} bytes has room for {stored} of {tokens} tokens")
            return tokens

    def save_prefix_cache(self, path: str | Path) -> None:
        """Save the prefix cache to a file. OSError if the file cannot be written."""
        with self._lock:
            pipeline = self.pipeline
            pipeline.drop_removed_adapters()
            reuse, engine = pipeline.reuse, engine_fingerprint(self.config, self.has_draft_model)
            save_prefix_cache(path, reuse.pages, pipeline.device, engine, reuse.states)

    def load_prefix_cache(self, path: str | Path) -> int:
        """Load a saved prefix cache in place of the current one.

        Returns the number of loaded pages; the least recently used pages of the file are left out if the
        cache has no room for them. FileNotFoundError, or ValueError for a file that is damaged or belongs to
        another engine: then the cache stays unchanged. EngineError if the device fails: then the cache is
        empty.
        """
        with self._lock:
            pipeline = self.pipeline
            reuse, engine = pipeline.reuse, engine_fingerprint(self.config, self.has_draft_model)
            return load_prefix_cache(path, reuse.pages, pipeline.device, engine, reuse.states)

    def clear_prefix_cache(self) -> None:
        """Drop all that the prefix cache has stored."""
        with self._lock:
            self.pipeline.reuse.clear()

    def set_lm_head_weights(self, name: str, weights: np.ndarray) -> None:
        """Replace the LM head `lm_head.weight` [H,V], from the next request on.

        EngineError if the engine was not exported with `lm_head_input`, or for another name or shape.
        """
        with self._lock:
            self.pipeline.runner.set_lm_head_weights(name, weights)

    def add_lora(self, name: str, directory: str | Path) -> None:
        """Load a LoRA adapter that PEFT saved, under a new name.

        Requests may name the adapter once this call returns. ValueError or FileNotFoundError if the adapter
        cannot be loaded: then nothing has changed.
        """
        self.pipeline.loras.add(name, directory)

    def remove_lora(self, *names: str) -> None:
        """Remove adapters, all or none.

        The running batch keeps its adapters; the prefixes of the removed adapters are dropped when the next
        batch begins. ValueError for the active adapter and for unknown names: then no adapter is removed.
        """
        self.pipeline.remove_loras(names)

    @property
    def prefill_metrics(self) -> LLMPrefillMetrics:
        return self._metrics.prefill

    @property
    def generation_metrics(self) -> LLMGenerationMetrics:
        return self._metrics.generation

    @property
    def spec_decode_generation_metrics(self) -> SpecDecodeGenerationMetrics:
        return self._metrics.spec_decode

    @property
    def speculative_decoding_strategy_name(self) -> str:
        """Drafter of speculative decoding, "eagle" or "lookup"; "" without one."""
        return self._metrics.spec_decode.strategy

    @property
    def has_draft_model(self) -> bool:
        """Whether a draft head is loaded."""
        return self.speculative_decoding_strategy_name == EAGLE

    @property
    def fused_rows(self) -> int:
        """Largest batch that the fused kernels decode; 0 = the engine decodes all."""
        return self.pipeline.runner.most_fused_rows

    @property
    def multimodal_metrics(self) -> MultimodalMetrics:
        return self._metrics.multimodal

    @property
    def action_metrics(self) -> ActionMetrics:
        return self._metrics.action

    def lora_names(self) -> list[str]:
        """Return the names of the loaded adapters, sorted; a policy has none."""
        return [] if self._policy is not None else self.pipeline.loras.names()

    def switch_lora_weights(self, name: str) -> None:
        """Set the active adapter: used by requests that name none.

        "" or "base" is the base model. Nothing is copied; the running batch keeps its adapters. ValueError
        for an unknown name: then the active adapter stays the same.
        """
        self.pipeline.loras.switch(name)

    @property
    def active_lora(self) -> str:
        """Name of the adapter for requests that name none.

        "" is the base model, and for a policy.
        """
        return "" if self._policy is not None else self.pipeline.loras.active

    def close(self) -> None:
        """Free engines and buffers after the running batch.

        Later calls raise EngineError.
        """
        with self._lock:
            self._loaded = self._policy = None

    @property
    def closed(self) -> bool:
        return self._loaded is None and self._policy is None

    @property
    def pipeline(self) -> Pipeline:
        """The stages with their engines and buffers; not a stable interface.

        For tests and benchmarks. EngineError if the runtime is closed, or the engine is a policy.
        """
        if self._policy is not None:
            raise EngineError(f"the engine is a policy ({self.config.model_type}): it has no language model")
        pipeline = self._loaded  # read once: another thread may close the runtime
        if pipeline is None:
            raise EngineError("the runtime is closed")
        return pipeline

    def __enter__(self) -> LLMInferenceRuntime:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def response_of(
    sequence: GenerationSequence, metrics: dict[str, float], answer: ParsedAnswer
) -> LLMGenerationResponse:
    """Make the response of a finished sequence; `answer`: its tool calls."""
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
        grammar_complete=sequence.grammar_complete,
        tool_calls=answer.tool_calls,
        content=answer.content,
        tool_call_errors=answer.errors,
    )
