# SPDX-License-Identifier: Apache-2.0
"""Pipeline: the stages of a batch, and the engines and buffers that they use.

`LLMInferenceRuntime.handle_request` calls the stages in order.
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
from edgellm_ros.engine_directory.binding_names import LM_HEAD
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.engine_directory.tensor_file import read_tensor, read_vocab_map
from edgellm_ros.kernels import load_kernels
from edgellm_ros.multimodal.audio_runner import AudioRunner
from edgellm_ros.multimodal.vision_runner import VisionRunner
from edgellm_ros.runtime.batch.batch import Batch
from edgellm_ros.runtime.batch.input_embedder import MIN_PREFILL, InputEmbedder
from edgellm_ros.runtime.batch.row_state import RowState
from edgellm_ros.runtime.batch.sampling_rows import SamplingRows
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.decoding.decode_loop import DecodeLoop
from edgellm_ros.runtime.decoding.method import DecodeMethod
from edgellm_ros.runtime.decoding.vanilla import VanillaDecoding
from edgellm_ros.runtime.engines.llm_engine_runner import LLMEngineRunner
from edgellm_ros.runtime.hidden_states import HiddenStates
from edgellm_ros.runtime.lora import LoraAdapter, find_adapters
from edgellm_ros.runtime.metrics import RuntimeMetrics
from edgellm_ros.runtime.prefix.prefix_cache import Prefix, PrefixCache
from edgellm_ros.runtime.prefix.prefix_key import FrameGroup, prefix_keys
from edgellm_ros.runtime.prefix.state_snapshots import StateSnapshots
from edgellm_ros.runtime.prompt.chat_template import ChatTemplate
from edgellm_ros.runtime.prompt.prompt_builder import PromptBuilder
from edgellm_ros.runtime.prompt.tokenizer import Tokenizer
from edgellm_ros.runtime.request import LLMGenerationRequest
from edgellm_ros.runtime.request_preparer import RequestPreparer


class Pipeline:
    """The stages that a batch passes through; not thread-safe.

    Parameters and errors are the same as for `LLMInferenceRuntime`.
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
        decode_backend: str,
    ) -> None:
        # 1. the device and the engines
        self.config = config
        self.device = open_device(device) if isinstance(device, str) else device
        kernels = load_kernels(self.device)
        self._metrics = metrics

        def engine(part: str, backend: str = "") -> EngineExecutor:
            return EngineExecutor.open(root / part / "model.onnx", self.device, threads, backend)

        builder = config.builder
        horizon = config.action.action_space.horizon if config.action else 0
        decode_engine = engine("llm", decode_backend) if decode_backend else None
        self.runner = LLMEngineRunner(engine("llm"), config, self.device, kernels, horizon, decode_engine)
        self.vision = self.audio = self.action = None
        if config.vision is not None:
            self.vision = VisionRunner(
                engine("visual"), config.vision, self.device, kernels, builder.max_input_len
            )
        if config.audio is not None:
            self.audio = AudioRunner(engine("audio"), config.audio, self.device, builder.max_input_len)
        if config.action is not None:
            table, samples = self.runner.rope_table, builder.max_action_samples
            self.action = ActionRunner(engine("action"), config.action, self.device, kernels, table, samples)

        # 2. weights that are inputs: embeddings, adapters, the LM head
        dtype = self.runner.embeds_dtype
        self.embedder = InputEmbedder(root / "embedding.safetensors", config, self.device, kernels, dtype)
        self.runner.share_embedding(self.embedder.table)
        self.loras = self.runner.loras
        if lora_dirs is None:
            lora_dirs = find_adapters(root) if builder.max_lora_rank else {}
        for name, directory in lora_dirs.items():
            self.loras.add(name, directory)
        self._removed: deque[LoraAdapter] = deque()
        if builder.lm_head_input:
            shape = (config.hidden_size, config.output_vocab_size)
            matrix = read_tensor(root / "lm_head.safetensors", LM_HEAD, shape)
            self.runner.set_lm_head_weights(LM_HEAD, matrix)

        # 3. the batch: all state per row, and the decode method
        cache = self.runner.kv_cache
        self.sampling = SamplingRows(
            self.device,
            kernels,
            max_batch_size=builder.max_batch_size,
            vocab_size=config.vocab_size,
            stop_token_ids=config.stop_token_ids,
            vocab_map=read_vocab_map(root, config.llm) if config.reduced_vocab_size else None,
        )
        recurrent = self.runner.recurrent
        states: list[RowState] = [cache, self.sampling]
        if recurrent is not None:
            states.append(recurrent)
        self.batch = Batch(states, builder.max_batch_size)
        self.logits = self.device.empty((builder.max_batch_size, 1, config.output_vocab_size), np.float32)
        vanilla = VanillaDecoding(
            self.device, self.batch, self.embedder, self.runner, self.sampling, self.logits
        )
        self.use_decode_method(vanilla)

        # 4. state that outlives a batch: prefixes, hidden states
        state_bytes = recurrent.nbytes if recurrent is not None else 0
        if prefix_cache_bytes is None:
            prefix_cache_bytes = cache.nbytes + state_bytes
        # The prefix cache is divided between KV rows and states as the batch's memory is.
        snapshot_bytes = prefix_cache_bytes * state_bytes // (cache.nbytes + state_bytes)
        self.snapshots: StateSnapshots | None = None
        if recurrent is not None:
            self.snapshots = StateSnapshots(self.device, recurrent, snapshot_bytes)
        self.prefixes = PrefixCache(
            self.device,
            kernels,
            layers=config.num_attention_layers,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=cache.dtype,
            capacity_bytes=prefix_cache_bytes - snapshot_bytes,
        )
        self.hidden_states = HiddenStates(
            self.device,
            builder.hidden_state_layers,
            batch=builder.max_batch_size,
            tokens=builder.max_input_len,
            hidden_size=config.hidden_size,
            dtype=dtype,
        )
        self.input_token_ids: list[list[int]] = []

        # 5. requests to token ids
        tokenizer = Tokenizer(root / "tokenizer.json")
        prompts = PromptBuilder(tokenizer, ChatTemplate(root / "chat_template.jinja"), config)
        self.preparer = RequestPreparer(
            config, tokenizer, prompts, self.loras, self.vision, self.audio, self.action
        )

    def use_decode_method(self, method: DecodeMethod) -> None:
        """Set the decode method for the next batches; the batch must be empty."""
        self.method = method
        self.sampling.resize(method.tokens_per_step)
        self._decode_loop = DecodeLoop(self.batch, method, self.device.max_queued_steps)

    def prepare(self, requests: Sequence[LLMGenerationRequest], noise_seed: int) -> list[GenerationSequence]:
        """Prepare requests: prompts with placeholders. ValueError for an invalid request."""
        self._clear_last_batch()
        return self.preparer.prepare(requests, noise_seed)

    def prepare_system_prompt(self, system_prompt: str, lora: str) -> GenerationSequence:
        """Prepare the shared prefix of all prompts of a system prompt. ValueError."""
        self._clear_last_batch()
        return self.preparer.prepare_system_prompt(system_prompt, lora)

    def _clear_last_batch(self) -> None:
        self.drop_removed_adapters()
        self.hidden_states.clear()
        self.input_token_ids = []

    def match_prefixes(self, sequences: list[GenerationSequence], reuse: bool = True) -> None:
        """Find the longest stored prefix of each prompt; the prefill skips its tokens."""
        if not self.prefixes.capacity_bytes or not sequences:
            return
        for sequence in sequences:
            keys = prefix_keys(
                sequence.token_ids,
                sequence.request,
                sequence.image_tokens,
                sequence.audio_tokens,
                self.config.special_tokens,
                self._frame_groups(sequence),
                self._video_token_id,
            )
            sequence.prefix_keys = keys
            if reuse:
                sequence.prefix = self.prefixes.match(sequence.adapter.key, keys)
                if self.snapshots is not None:
                    sequence.prefix = self.snapshots.match(sequence.adapter.key, keys, sequence.prefix)
        # Prompts are padded to the longest remainder: each row must have slots for it after the reused ones.
        room = self._room_for_prefixes(sequences)
        while self.snapshots is not None and any(each.prefix.length > room for each in sequences):
            for sequence in sequences:  # a state cannot be cut to the room, so it is computed again
                sequence.prefix = sequence.prefix if sequence.prefix.length <= room else Prefix()
            room = self._room_for_prefixes(sequences)
        for sequence in sequences:
            sequence.kv_length = sequence.reused_tokens = min(sequence.prefix.length, room)

    @property
    def _video_token_id(self) -> int | None:
        return self.config.video.token_id if self.config.video is not None else None

    def _frame_groups(self, sequence: GenerationSequence) -> list[FrameGroup]:
        """Return the groups of frames of a prompt's videos."""
        if self.vision is None or self.vision.videos is None:
            return []
        return [
            FrameGroup(
                self.vision.videos.group(video, index),
                layout.grid.rows,
                layout.grid.columns,
                index * layout.blocks[0].step,
            )
            for video, layout in zip(sequence.request.prompt_videos, sequence.videos, strict=True)
            for index in range(layout.grid.groups)
        ]

    def _room_for_prefixes(self, sequences: list[GenerationSequence]) -> int:
        new_tokens = max(len(sequence.token_ids) - sequence.prefix.length for sequence in sequences)
        return self.runner.kv_cache.capacity - max(MIN_PREFILL, new_tokens)

    def store_prefixes(self, sequences: list[GenerationSequence]) -> None:
        """Store prompts of the batch in the prefix cache."""
        for sequence in sequences:
            if sequence.prefix_keys:
                rows = self.runner.kv_cache.sequence(self.batch.row_of(sequence))
                self.prefixes.insert(sequence.adapter.key, sequence.prefix_keys, rows)

    def store_answers(self, sequences: list[GenerationSequence]) -> None:
        """Store conversations as their next turns begin: the answer as the chat template writes it.

        The rows are computed by a prefill, so that they have the bits of a prompt's rows (prefix_cache.py).
        Conversations whose prompt the prefix cache had no room for are left out. The batch must be empty.
        """
        turns: list[GenerationSequence] = []
        for sequence in sequences:
            adapter, keys = sequence.adapter.key, sequence.prefix_keys
            if sequence.is_cancelled or not keys or self.prefixes.stored_length(adapter, keys) < len(keys):
                continue
            turn = self.preparer.prepare_next_turn(sequence, turns[-1].end_row if turns else 0)
            if turn is not None:
                turns.append(turn)
        self.match_prefixes(turns)
        turns = [turn for turn in turns if turn.prefix.length < len(turn.token_ids) - 1]
        if turns:
            self.encode_images(turns)
            self.encode_audio(turns)
            self._compute_rows(turns, self.batch.admit(turns))
            self.store_prefixes(turns)
            self.batch.evict(turns)

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
            self.prefixes.remove(adapter.key)
            if self.snapshots is not None:
                self.snapshots.remove(adapter.key)
            self.method.drop(adapter)

    def recover_after(self, error: BaseException) -> None:
        """Reset all state of the batch after a failure.

        Values that are not finite may come from KV rows of an earlier prompt, so an EngineError also clears
        the prefix cache. Queued work must be complete before its memory is used again.
        """
        with suppress(EngineError):  # `error` itself, or a consequence
            self.device.synchronize()
        with suppress(DeviceLostError):  # the device is not used again
            self.batch.clear()
            self.runner.kv_cache.clear()
            if self.runner.recurrent is not None:
                self.runner.recurrent.clear()
            self.device.synchronize()
        if isinstance(error, EngineError):
            self.clear_prefixes()

    def clear_prefixes(self) -> None:
        """Drop all stored prefixes."""
        self.prefixes.clear()
        if self.snapshots is not None:
            self.snapshots.clear()

    def stored_length(self, sequence: GenerationSequence) -> int:
        """Return how many of a prompt's tokens a later prompt can reuse."""
        key, keys = sequence.adapter.key, sequence.prefix_keys
        if self.snapshots is not None and not self.snapshots.has(key, keys):
            return 0
        return self.prefixes.stored_length(key, keys)

    def encode_images(self, sequences: list[GenerationSequence]) -> None:
        """Encode images, one at a time, then videos; cancelled sequences are skipped."""
        if self.vision is None:
            return
        for sequence in sequences:
            reused = sequence.reused(self.config.image_token_id)
            row, first_new = sequence.image_row, sequence.image_row + reused
            images = sequence.request.prompt_images
            for index, (height, width) in enumerate(sequence.image_grids):
                if not sequence.report("vision", index):
                    break
                start, row = row, row + height * width
                if row > first_new:
                    image_rows, deepstack_rows = self.embedder.image_rows(start, height * width)
                    self.vision.encode(images[index], image_rows, deepstack_rows)
                    self._metrics.multimodal.total_images += 1
                    self._metrics.multimodal.total_image_tokens += height * width
            self._encode_videos(sequence, self.vision)

    def _encode_videos(self, sequence: GenerationSequence, vision: VisionRunner) -> None:
        """Encode the videos of a sequence, one group of frames at a time."""
        row = sequence.video_row
        first_new = row + sequence.reused(self._video_token_id)
        step = len(sequence.image_grids)
        for video, layout in zip(sequence.request.prompt_videos, sequence.videos, strict=True):
            tokens = layout.grid.group_tokens
            for group in range(layout.grid.groups):
                if not sequence.report("vision", step):
                    return
                start, row, step = row, row + tokens, step + 1
                if row > first_new:
                    image_rows, deepstack_rows = self.embedder.image_rows(start, tokens)
                    vision.encode_group(video, group, image_rows, deepstack_rows)
                    self._metrics.multimodal.total_frame_groups += 1
                    self._metrics.multimodal.total_image_tokens += tokens

    def encode_audio(self, sequences: list[GenerationSequence]) -> None:
        """Encode sounds, one at a time; cancelled sequences are skipped."""
        if self.audio is None:
            return
        for sequence in sequences:
            reused = sequence.reused(self.config.audio_token_id)
            row, first_new = sequence.audio_row, sequence.audio_row + reused
            sounds = sequence.request.prompt_audio
            for index, tokens in enumerate(sequence.audio_tokens):
                if not sequence.report("audio", index):
                    break
                start, row = row, row + tokens
                if row > first_new:
                    self.audio.encode(sounds[index], self.embedder.audio_rows(start, tokens))
                    self._metrics.multimodal.total_sounds += 1
                    self._metrics.multimodal.total_audio_tokens += tokens

    def prefill(self, sequences: list[GenerationSequence], keep_hidden_states: bool = False) -> None:
        """Admit sequences to the batch, fill their KV rows, sample their first tokens.

        KV rows of a reused prefix are copied from the prefix cache; the engine computes the other ones.
        """
        rows = self.batch.admit(sequences)
        embeds, logits = self._compute_rows(sequences, rows)
        self.input_token_ids = [sequence.token_ids for sequence in sequences]
        reused = sum(sequence.reused_tokens for sequence in sequences)
        self._metrics.prefill.total_runs += 1
        self._metrics.prefill.computed_tokens += sum(map(len, self.input_token_ids)) - reused
        self._metrics.prefill.reused_tokens += reused
        self.sampling.sample(logits, rows)
        self.sampling.commit_rows(rows, self.sampling.count(rows))
        logprobs = max(sequence.request.logprobs for sequence in sequences)
        self.sampling.copy_to_host(logits, logprobs).deliver(sequences)
        if keep_hidden_states:
            self.hidden_states.keep(embeds)
        for sequence in sequences:
            sequence.report("decode", 0)

    def _compute_rows(self, sequences: list[GenerationSequence], rows: range) -> tuple[Tensor, Tensor]:
        """Fill the KV rows of admitted sequences; return inputs_embeds [B,S,H] and logits [B,1,V]."""
        cache = self.runner.kv_cache
        for row, sequence in zip(rows, sequences, strict=True):
            self.prefixes.load(sequence.prefix, cache.sequence(row), sequence.reused_tokens)
            if self.snapshots is not None and sequence.reused_tokens:
                key, keys = sequence.adapter.key, sequence.prefix_keys
                self.snapshots.load(key, keys, sequence.reused_tokens, row)
        prompts = [sequence.token_ids[sequence.reused_tokens :] for sequence in sequences]
        first_rows = [
            (
                sequence.image_row + sequence.reused(self.config.image_token_id),
                sequence.video_row + sequence.reused(self._video_token_id),
                sequence.audio_row + sequence.reused(self.config.audio_token_id),
            )
            for sequence in sequences
        ]
        embeds, deepstack = self.embedder.embed_prompts(prompts, first_rows)
        positions = np.zeros((len(prompts), 3, embeds.shape[1]), np.int64)
        for index, sequence in enumerate(sequences):
            positions[index, :, : len(prompts[index])] = sequence.positions[:, sequence.reused_tokens :]
        logits = self.logits.rows(0, len(prompts))
        self.runner.execute_prefill_step(
            embeds,
            [len(prompt) for prompt in prompts],
            positions,
            deepstack,
            logits,
            self.hidden_states.outputs(*embeds.shape[:2]),
            [sequence.adapter for sequence in sequences],
            rows,
        )
        if self.snapshots is not None:  # decode steps change the state
            for row, sequence in zip(rows, sequences, strict=True):
                self.snapshots.insert(sequence.adapter.key, sequence.prefix_keys, row)
        for sequence in sequences:
            sequence.kv_length = len(sequence.token_ids)
        return embeds, logits

    def decode(self) -> list[GenerationSequence]:
        """Decode until at least one sequence has ended; return the ended sequences."""
        steps = self._decode_loop.steps
        ended = self._decode_loop.run_until_one_ends()
        self._metrics.generation.total_runs += self._decode_loop.steps - steps
        self._metrics.generation.generated_tokens += sum(len(sequence.generated) for sequence in ended)
        return ended

    def sample_actions(self, sequences: list[GenerationSequence]) -> None:
        """Sample trajectories and paths of the sequences that triggered the action head."""
        if self.action is None:
            return
        space = self.action.action_space
        for sequence in sequences:
            if not sequence.wants_actions_now:
                continue
            samples = sequence.request.action_samples
            steps = sequence.request.denoise_steps or self.action.default_steps
            cache = self.runner.kv_cache.sequence(self.batch.row_of(sequence))
            report = partial(sequence.report, "action")
            normalised = self.action.execute(cache, samples, steps, sequence.noise_seed, report)
            if normalised is not None:
                sequence.actions = space.denormalise(normalised)
                sequence.paths = space.integrate(sequence.actions, sequence.speed)
                self._metrics.action.trajectories += samples
                self._metrics.action.total_runs += steps

    def capture_decoding_cuda_graph(self) -> bool:
        """Record decode steps; see `LLMInferenceRuntime`."""
        return self.method.capture(self.loras.loaded())
