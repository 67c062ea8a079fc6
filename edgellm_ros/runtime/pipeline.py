# SPDX-License-Identifier: Apache-2.0
"""Pipeline: the engines of a directory and what happens between them, stage by stage.

`LLMInferenceRuntime.handle_request` says in which order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from edgellm_ros.diffusion.action_runner import ActionRunner
from edgellm_ros.engine.device import Device, open_device
from edgellm_ros.engine.errors import DeviceLostError, EngineError
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.engine_directory.tensor_file import read_tensor, read_vocab_map
from edgellm_ros.kernels import load_kernels
from edgellm_ros.multimodal.audio_runner import AudioRunner
from edgellm_ros.multimodal.vision_runner import VisionRunner
from edgellm_ros.runtime.batch.input_embedder import MIN_PREFILL, InputEmbedder
from edgellm_ros.runtime.batch.sampling_rows import TokenSampler
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.decoding.decode_loop import DecodeLoop
from edgellm_ros.runtime.decoding.vanilla import DecodeStep
from edgellm_ros.runtime.engines.llm_engine_runner import LM_HEAD, LLMEngineRunner
from edgellm_ros.runtime.engines.llm_engine_runner_config import LLMEngineRunnerConfig
from edgellm_ros.runtime.hidden_states import HiddenStates
from edgellm_ros.runtime.lora import LoraAdapter, find_adapters
from edgellm_ros.runtime.metrics import RuntimeMetrics
from edgellm_ros.runtime.prefix.prefix_cache import PrefixCache
from edgellm_ros.runtime.prefix.prefix_key import prefix_keys
from edgellm_ros.runtime.prompt.chat_template import ChatTemplate
from edgellm_ros.runtime.prompt.prompt_builder import PromptBuilder
from edgellm_ros.runtime.prompt.tokenizer import Tokenizer
from edgellm_ros.runtime.request import LLMGenerationRequest
from edgellm_ros.runtime.request_preparer import RequestPreparer


class Pipeline:
    """Everything that a batch passes through. Not to be used by two threads at once.

    Parameters and errors are those of `LLMInferenceRuntime`.
    """

    def __init__(
        self,
        root: Path,
        config: EngineConfig,
        metrics: RuntimeMetrics,
        device: str | Device,
        threads: int,
        lora_dirs: Mapping[str, str | Path] | None,
        prefix_cache_bytes: int | None,
    ) -> None:
        llm, builder = config.llm, config.builder
        self.device = open_device(device) if isinstance(device, str) else device
        kernels = load_kernels(self.device)
        self._metrics = metrics

        def engine(part: str) -> EngineExecutor:
            return EngineExecutor.open(root / part / "model.onnx", self.device, threads)

        horizon = config.action.action_space.horizon if config.action else 0
        runner_config = LLMEngineRunnerConfig.from_engine(config)
        self.runner = LLMEngineRunner(engine("llm"), runner_config, self.device, kernels, horizon)
        self.loras = self.runner.loras
        if lora_dirs is None:
            lora_dirs = find_adapters(root) if builder.max_lora_rank else {}
        for name, directory in lora_dirs.items():
            self.loras.add(name, directory)
        dtype = self.runner.embeds_dtype
        self.embedder = InputEmbedder(root / "embedding.safetensors", config, self.device, kernels, dtype)
        self.runner.share_embedding(self.embedder.table)
        vocab_map = read_vocab_map(root, llm) if llm.reduced_vocab_size else None
        batch, stops = builder.max_batch_size, config.stop_token_ids
        self.sampler = TokenSampler(self.device, kernels, batch, llm.vocab_size, stops, vocab_map)
        self.logits = self.device.empty((batch, 1, llm.output_vocab_size), np.float32)
        parts = self.embedder, self.runner, self.sampler
        self._decode_step = DecodeStep(self.device, *parts, self.logits)
        self._decode_loop = DecodeLoop(self.device, self.runner.kv_cache, self.sampler, self._decode_step)
        if builder.lm_head_input:
            shape = (llm.hidden_size, llm.output_vocab_size)
            matrix = read_tensor(root / "lm_head.safetensors", LM_HEAD, shape)
            self.runner.set_lm_head_weights(LM_HEAD, matrix)
        sizes = (batch, builder.max_input_len, llm.hidden_size)
        self.hidden_states = HiddenStates(self.device, builder.hidden_state_layers, *sizes, dtype)
        self.input_token_ids: list[list[int]] = []
        shape = (runner_config.num_attention_layers, runner_config.num_kv_heads, runner_config.head_dim)
        cache = self.runner.kv_cache
        prefix_bytes = cache.nbytes if prefix_cache_bytes is None else prefix_cache_bytes
        self.prefixes = PrefixCache(self.device, kernels, *shape, cache.dtype, prefix_bytes)
        self._removed: deque[LoraAdapter] = deque()
        self._special_tokens = config.special_tokens
        self._image_token = config.special_tokens.image_token_id
        self._audio_token = config.special_tokens.audio_token_id
        self.vision: VisionRunner | None = None
        if config.vision is not None:
            self.vision = VisionRunner(engine("visual"), config.vision, self.device, builder.max_input_len)
        self.audio: AudioRunner | None = None
        if config.audio is not None:
            self.audio = AudioRunner(engine("audio"), config.audio, self.device, builder.max_input_len)
        self.action: ActionRunner | None = None
        if config.action is not None:
            table, samples = self.runner.rope_table, builder.max_action_samples
            self.action = ActionRunner(engine("action"), config.action, self.device, kernels, table, samples)
        tokenizer = Tokenizer(root / "tokenizer.json")
        prompts = PromptBuilder(tokenizer, ChatTemplate(root / "chat_template.jinja"), config)
        self.preparer = RequestPreparer(
            config, tokenizer, prompts, self.loras, self.vision, self.audio, self.action
        )

    def admit(self, requests: Sequence[LLMGenerationRequest], noise_seed: int) -> list[GenerationSequence]:
        """Requests -> prompts with placeholders. ValueError for what cannot be served."""
        self.drop_removed_adapters()
        self.hidden_states.clear()
        self.input_token_ids = []
        return self.preparer.admit(requests, noise_seed)

    def admit_system_prompt(self, system_prompt: str, lora: str) -> GenerationSequence:
        """What all prompts of a system prompt begin with, as a sequence. ValueError."""
        self.drop_removed_adapters()
        self.hidden_states.clear()
        self.input_token_ids = []
        return self.preparer.admit_system_prompt(system_prompt, lora)

    def match_prefixes(self, sequences: list[GenerationSequence], reuse: bool = True) -> None:
        """Earlier prompts -> how much of each prompt need not be computed again."""
        if not self.prefixes.capacity_bytes:
            return
        for sequence in sequences:
            ids, images, sounds = sequence.token_ids, sequence.image_tokens, sequence.audio_tokens
            keys = prefix_keys(ids, sequence.request, images, sounds, self._special_tokens)
            sequence.prefix_keys = keys
            if reuse:
                sequence.prefix = self.prefixes.match(sequence.adapter.key, keys)
        # Each is padded to the longest rest, for which its cache must have room behind what it reuses.
        new_tokens = max(len(sequence.token_ids) - sequence.prefix.length for sequence in sequences)
        room = self.runner.kv_cache.capacity - max(MIN_PREFILL, new_tokens)
        for sequence in sequences:
            sequence.reused_tokens = min(sequence.prefix.length, room)

    def store_prefixes(self, sequences: list[GenerationSequence]) -> None:
        """KV cache -> prompts for later requests. `sequences`: as they stand in the KV cache."""
        for row, sequence in enumerate(sequences):
            if sequence.prefix_keys:
                rows = self.runner.kv_cache.sequence(row)
                self.prefixes.insert(sequence.adapter.key, sequence.prefix_keys, rows)

    def remove_loras(self, names: Sequence[str]) -> None:
        """See `LLMInferenceRuntime.remove_lora`. From any thread: the prefixes may be in use until the next
        batch.
        """
        self._removed.extend(self.loras.remove(*names))

    def drop_removed_adapters(self) -> None:
        """Forget what there is of adapters that were removed: prompts, recorded steps."""
        while self._removed:
            adapter = self._removed.popleft()
            self.prefixes.remove(adapter.key)
            self._decode_step.forget(adapter)

    def recover_after(self, error: BaseException) -> None:
        """What went wrong must not reach the next request.

        An engine's numbers that are not finite may come from the rows of an earlier prompt: so these go too.
        Work that is still queued must be done before its memory is used again.
        """
        with suppress(EngineError):  # what is raised already, or follows from it
            self.device.synchronize()
        with suppress(DeviceLostError):  # nothing on it is used again
            self.runner.kv_cache.clear()
        if isinstance(error, EngineError):
            self.prefixes.clear()

    def encode_images(self, sequences: list[GenerationSequence]) -> None:
        """Camera frames -> rows of embeddings, one image at a time, until a sequence is cancelled."""
        if self.vision is None:
            return
        for sequence in sequences:
            row, first_new = sequence.image_row, sequence.image_row + sequence.reused(self._image_token)
            for index, (height, width) in enumerate(sequence.image_grids):
                if not sequence.report("vision", index):
                    break
                start, row = row, row + height * width
                if row > first_new:
                    image_rows, deepstack_rows = self.embedder.image_rows(start, height * width)
                    self.vision.encode(sequence.request.images[index], image_rows, deepstack_rows)
                    self._metrics.multimodal.total_images += 1
                    self._metrics.multimodal.total_image_tokens += height * width

    def encode_audio(self, sequences: list[GenerationSequence]) -> None:
        """Sound -> rows of embeddings, one sound at a time, until a sequence is cancelled."""
        if self.audio is None:
            return
        for sequence in sequences:
            row, first_new = sequence.audio_row, sequence.audio_row + sequence.reused(self._audio_token)
            for index, tokens in enumerate(sequence.audio_tokens):
                if not sequence.report("audio", index):
                    break
                start, row = row, row + tokens
                if row > first_new:
                    self.audio.encode(sequence.request.audio[index], self.embedder.audio_rows(start, tokens))
                    self._metrics.multimodal.total_sounds += 1
                    self._metrics.multimodal.total_audio_tokens += tokens

    def prefill(self, sequences: list[GenerationSequence]) -> Tensor:
        """Prompts and rows -> KV cache -> first tokens. Returns what the language model read, [B,S,H].

        What is reused of a prompt is copied to the KV cache; the rest is computed.
        """
        for row, sequence in enumerate(sequences):
            rows = self.runner.kv_cache.sequence(row)
            self.prefixes.load(sequence.prefix, rows, sequence.reused_tokens)
        prompts = [sequence.token_ids[sequence.reused_tokens :] for sequence in sequences]
        first_rows = [
            (
                sequence.image_row + sequence.reused(self._image_token),
                sequence.audio_row + sequence.reused(self._audio_token),
            )
            for sequence in sequences
        ]
        embeds, deepstack = self.embedder.embed_prompts(prompts, first_rows)
        positions = np.zeros((len(prompts), 3, embeds.shape[1]), np.int64)
        for row, sequence in enumerate(sequences):
            positions[row, :, : len(prompts[row])] = sequence.positions[:, sequence.reused_tokens :]
        lengths = [len(prompt) for prompt in prompts]
        reused = [sequence.reused_tokens for sequence in sequences]
        deltas = [sequence.rope_delta for sequence in sequences]
        logits = self.logits.rows(0, len(prompts))
        hidden_states = self.hidden_states.outputs(*embeds.shape[:2])
        adapters = [sequence.adapter for sequence in sequences]
        self.runner.execute_prefill_step(
            embeds, lengths, positions, deltas, deepstack, logits, hidden_states, adapters, reused
        )
        self.input_token_ids = [sequence.token_ids for sequence in sequences]
        self._metrics.prefill.total_runs += 1
        self._metrics.prefill.computed_tokens += sum(lengths)
        self._metrics.prefill.reused_tokens += sum(reused)
        self.sampler.begin(sequences)
        self.sampler.draw(logits)
        self.sampler.deliver(self.sampler.copy_to_host(logits, sequences), sequences)
        return embeds

    def decode(self, sequences: list[GenerationSequence]) -> list[GenerationSequence]:
        """Tokens -> KV cache -> next tokens, until every sequence has ended.

        Returns the sequences in the order in which the KV cache then has them.
        """
        batch, steps = self._decode_loop.run(sequences)
        self._metrics.generation.total_runs += steps
        self._metrics.generation.generated_tokens += sum(len(sequence.generated) for sequence in sequences)
        return batch

    def sample_actions(self, sequences: list[GenerationSequence]) -> None:
        """Noise and KV cache -> trajectories -> paths, for the sequences that announced them."""
        if self.action is None:
            return
        space = self.action.action_space
        for row, sequence in enumerate(sequences):
            if not sequence.wants_actions_now:
                continue
            samples = sequence.request.action_samples
            steps = sequence.request.denoise_steps or self.action.default_steps
            cache = self.runner.kv_cache.sequence(row)
            report = partial(sequence.report, "action")
            normalised = self.action.execute(cache, samples, steps, sequence.noise_seed, report)
            if normalised is not None:
                sequence.actions = space.denormalise(normalised)
                sequence.paths = space.integrate(sequence.actions, sequence.speed)
                self._metrics.action.trajectories += samples
                self._metrics.action.total_runs += steps

    def capture_decoding_cuda_graph(self) -> bool:
        """See `LLMInferenceRuntime`."""
        return all(map(self._decode_step.capture_vanilla_decoding_cuda_graph, self.loras.loaded()))
