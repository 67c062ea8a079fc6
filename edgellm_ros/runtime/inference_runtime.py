# SPDX-License-Identifier: Apache-2.0
"""LLMInferenceRuntime: text and trajectories for requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import overload

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.fused.loading.availability import AUTO
from edgellm_ros.kernels.random import MAX_SEED
from edgellm_ros.runtime.decoding.speculative.drafting_config import AUTO as DRAFTING_AUTO
from edgellm_ros.runtime.decoding.speculative.drafting_config import (
    SpecDecodeDraftingConfig,
)
from edgellm_ros.runtime.metrics import (
    ActionMetrics,
    LLMGenerationMetrics,
    LLMPrefillMetrics,
    MultimodalMetrics,
    SchedulingMetrics,
    SpecDecodeGenerationMetrics,
)
from edgellm_ros.runtime.opened_engine import OpenedEngine
from edgellm_ros.runtime.opening import RuntimeOptions
from edgellm_ros.runtime.prompt import tool_calls
from edgellm_ros.runtime.request import LLMGenerationRequest, LLMGenerationResponse
from edgellm_ros.runtime.scheduling.handle import Handle
from edgellm_ros.runtime.scheduling.shares import Share


class LLMInferenceRuntime(OpenedEngine):
    """An engine directory, loaded on a device.

    `handle_request` executes one batch at a time, and other threads wait for their turn; `submit` answers
    many requests in one running batch. Runtimes that share a Device must be called from one thread, without
    `submit`. A policy answers with actions only (docs/policies.md): methods that need a
    language model raise EngineError then.

    - device: "cpu", "cuda", "tensorrt" or a Device
    - threads: of the CPU; 0 = one per core
    - lora_dirs: adapters to load, name -> PEFT directory or `.safetensors` file; None = the folder `lora` of
      the engine directory
    - prefix_cache_bytes: size of the prefix cache; None = same as the batch's state, 0 = off
    - decode_backend: "onnxruntime" or "tensorrt" for decode steps; "" = same as for prefills
    - drafting: speculative decoding: a configuration, or the name of a drafter with its defaults: "eagle",
      "mtp", "dflash", "lookup"; "auto" = the kind of the engine's draft head if it has one, else "off"; None
      or "off" = one token per step, whose numbers repeat to the last bit (docs/speculative_decoding.md)
    - decode: "fused" executes decode steps and the action head's Euler steps in the fused kernels
      (docs/performance.md), "engine" in the engines; "auto" each in the faster one, measured when the engines
      are loaded, if both are available
    - allow_plan_code: load version-compatible TensorRT plans, whose own code runs in this process
      (docs/tensorrt.md); a Device has its own `allow_plan_code`
    - stream: the caller's CUDA stream for all work, in place of one that the runtime makes
      (`edgellm_ros.engine.device.open_device`); a Device has its own
    - tool_call_format: how the model writes tool calls: "hermes", "xml", "llama", "mistral" or "nemotron";
      "auto" = as its chat template writes those of earlier messages, "none" = answers are not searched
    - cuda_graphs: record work that repeats as CUDA graphs: decode steps when the runtime is made, encoders,
      Euler steps and prefills when they repeat (`capture_decoding_cuda_graph`); False = launch each kernel.
      The tokens are the same. Without effect on a CPU
    - without: parts that are not opened, to save memory: of "visual", "audio" (the encoders) and "action"
      (the action head). A request that needs one is refused; prompts are the same. `parts` tells what is
      opened

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
        drafting: SpecDecodeDraftingConfig | str | None = DRAFTING_AUTO,
        decode: str = AUTO,
        allow_plan_code: bool = False,
        tool_call_format: str = tool_calls.AUTO,
        stream: object = None,
        cuda_graphs: bool = True,
        without: Sequence[str] = (),
    ) -> None:
        options = RuntimeOptions(
            device=device,
            threads=threads,
            lora_dirs=lora_dirs,
            prefix_cache_bytes=prefix_cache_bytes,
            decode_backend=decode_backend,
            drafting=drafting,
            decode=decode,
            allow_plan_code=allow_plan_code,
            tool_call_format=tool_call_format,
            stream=stream,
            cuda_graphs=cuda_graphs,
            without=without,
        )
        super().__init__(Path(engine_dir), options)
        self._noise_seed = 0
        self._share = Share()
        if cuda_graphs:
            self.capture_decoding_cuda_graph()

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
        on a CPU, up to rounding on a GPU, with quantised weights, with drafting and after a reused prefix of
        a hybrid model. Rounding can change a token only if two tokens are closer than it: nearly equal logits
        when greedy, else a drawn number at the border of two tokens.
        `output_thinker_embeddings`: store the prompts' hidden states for `base_model_hidden_states`; the
        prompts have at most `max_input_len` tokens.
        ValueError for an invalid request, and then the whole batch is refused; EngineError if an engine fails
        or its outputs are not finite.
        """
        requests = [request] if isinstance(request, LLMGenerationRequest) else list(request)
        requests = list(map(self._completed, requests))
        with self._lock:
            responses = self._answerer.answer(requests, self._noise_seed, output_thinker_embeddings)
        return responses[0] if isinstance(request, LLMGenerationRequest) else responses

    def submit(
        self, request: LLMGenerationRequest, priority: int = 0, deadline: float | None = None
    ) -> Handle:
        """Queue a request, from any thread, to be answered beside others.

        See docs/scheduling.md. The answer is that of `handle_request`. Requests of a higher `priority`, from
        -1000 to 1000, come first; from 100 on they come before requests of other shares too. `deadline`:
        seconds of `time.monotonic`; after it a request that has begun ends with what it has, as if it were
        cancelled, and one that has not begun fails with TimeoutError.
        `on_progress` is called on the scheduler's thread, and must not call `handle_request` or `close`.
        Images, videos and sounds of the request must not change before the answer has ended. ValueError for
        an invalid request, EngineError if the runtime is closed; other errors are raised by the handle.
        """
        request = self._completed(request)
        return self._scheduler.submit(request, priority, deadline, self._noise_seed, self._share)

    def _completed(self, request: LLMGenerationRequest) -> LLMGenerationRequest:
        """Return a request with what the runtime sets where it sets nothing."""
        return request

    def set_action_noise_seed(self, seed: int) -> None:
        """Set the noise seed of requests without one, from 0 to 2**64 - 1."""
        if not 0 <= seed <= MAX_SEED:
            raise ValueError(f"the noise seed must be from 0 to {MAX_SEED}, got {seed}")
        self._noise_seed = seed

    def capture_decoding_cuda_graph(self) -> bool:
        """Record decode steps and rounds of drafting as graphs.

        The constructor calls this, unless `cuda_graphs` is false. The decode steps are those of all batch
        sizes with all adapters. The device launches a graph with one call. Recording takes a part of a second
        and some memory. Steps of an adapter that is added later are recorded when the adapter is first used.
        From then on prefills are recorded too, when they repeat. Prompts of the base model, an image and
        sounds are run in advance, so that later ones repeat them. Returns False if the device does not
        support graphs, or if a step cannot be recorded: the log says which and why, and they run without a
        graph.
        """
        with self._lock:
            return self._answerer.capture_decoding_cuda_graph()

    def measure_rounds(self, on: bool = True) -> None:
        """Measure the parts of rounds of drafting: draft, verification and acceptance.

        Seconds of each part are in `spec_decode_generation_metrics`, from the next batch on. On a CPU they
        are always measured. On a GPU each part becomes a CUDA graph of its own, recorded when it first runs,
        with events between them, so rounds take a little longer. Without drafting nothing changes.
        """
        with self._lock:
            self.pipeline.measure_rounds(on)

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
        """Token ids of the last prefilled prompts, in the order of the hidden states.

        Rows are ordered by adapter, and cancelled requests have none: `batch_index_mapping` tells the request
        of each.
        """
        return self.pipeline.input_token_ids

    @property
    def batch_index_mapping(self) -> list[int]:
        """The request of each row of the last prefilled prompts.

        Row b of `base_model_hidden_states` and base_model_input_token_ids[b] are of the request with index
        batch_index_mapping[b] in the list given to `handle_request`. A request that was cancelled before its
        prefill has no row. Empty if no prompt was prefilled.
        """
        return self.pipeline.batch_index_mapping

    @property
    def base_model_prefill_length(self) -> int:
        """Length S of the hidden states; 0 if they were not requested."""
        return self.pipeline.hidden_states.prefill_length

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
    def fused_rows(self) -> int:
        """Largest batch that the fused kernels decode; 0 = the engine decodes all."""
        return self.pipeline.runner.most_fused_rows

    @property
    def share_tokens(self) -> int:
        """Tokens computed for submitted requests, Euler steps of trajectories included."""
        return self._share.tokens

    @property
    def rows(self) -> int:
        """Rows of the batch: how many submitted requests run at once."""
        return self.config.builder.max_batch_size

    @property
    def scheduling_metrics(self) -> SchedulingMetrics:
        """Counters of submitted requests."""
        return self._metrics.scheduling

    @property
    def multimodal_metrics(self) -> MultimodalMetrics:
        return self._metrics.multimodal

    @property
    def action_metrics(self) -> ActionMetrics:
        return self._metrics.action
