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
from edgellm_ros.diffusion.heads.flow_expert import FlowExpertHead
from edgellm_ros.engine.device import Device, open_device
from edgellm_ros.engine.errors import DeviceLostError, EngineError
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory.binding_names import LM_HEAD
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.engine_directory.files import CHAIN, graph_path
from edgellm_ros.engine_directory.lora_scales import LoraScales
from edgellm_ros.engine_directory.tensor_file import read_tensor, read_vocab_map
from edgellm_ros.kernels import load_kernels, load_tree_kernels
from edgellm_ros.multimodal.audio_runner import AudioRunner
from edgellm_ros.multimodal.vision_runner import VisionRunner
from edgellm_ros.runtime.batch.batch import Batch
from edgellm_ros.runtime.batch.input_embedder import InputEmbedder
from edgellm_ros.runtime.batch.linear_kv_cache import check_cache_type
from edgellm_ros.runtime.batch.row_state import RowState
from edgellm_ros.runtime.batch.sampling_rows import SamplingRows
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.decoding.decode_loop import DecodeLoop
from edgellm_ros.runtime.decoding.method import DecodeMethod
from edgellm_ros.runtime.decoding.speculative.drafting_config import (
    EAGLE,
    SpecDecodeDraftingConfig,
    base_graph,
    fused_size,
)
from edgellm_ros.runtime.decoding.speculative.guarded_drafter import GuardedDrafter
from edgellm_ros.runtime.decoding.speculative.load_drafter import load_drafter
from edgellm_ros.runtime.decoding.speculative.tree_decoding import TreeDecoding
from edgellm_ros.runtime.decoding.vanilla import VanillaDecoding
from edgellm_ros.runtime.engines.llm_engine_runner import LLMEngineRunner
from edgellm_ros.runtime.fused.actions import choose_by_time as choose_actions_by_time
from edgellm_ros.runtime.fused.actions import load_fused_actions
from edgellm_ros.runtime.fused.choice import Verification, choose_by_time
from edgellm_ros.runtime.fused.draft import load_fused_draft
from edgellm_ros.runtime.fused.loading import AUTO, ENGINE, load_fused
from edgellm_ros.runtime.grammar import Grammars
from edgellm_ros.runtime.hidden_states import HiddenStates
from edgellm_ros.runtime.lora import LoraAdapter, find_adapters
from edgellm_ros.runtime.metrics import RuntimeMetrics
from edgellm_ros.runtime.prefill import Prefill
from edgellm_ros.runtime.prefix_reuse import PrefixReuse
from edgellm_ros.runtime.prompt import tool_calls
from edgellm_ros.runtime.prompt.chat_template import ChatTemplate
from edgellm_ros.runtime.prompt.prompt_builder import PromptBuilder
from edgellm_ros.runtime.prompt.tokenizer import Tokenizer
from edgellm_ros.runtime.prompt.tool_calls import ParsedAnswer, ToolCallReader
from edgellm_ros.runtime.request import LLMGenerationRequest
from edgellm_ros.runtime.request_preparer import RequestPreparer

TOKENS_BEFORE_ANSWER = 8  # that may open the reasoning


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
        drafting: SpecDecodeDraftingConfig | None = None,
        decode: str = AUTO,
        allow_plan_code: bool = False,
        tool_call_format: str = tool_calls.AUTO,
    ) -> None:
        # 1. the device and the engines
        self.config = config
        self.device = open_device(device, allow_plan_code) if isinstance(device, str) else device
        self._metrics = metrics
        check_cache_type(self.device, config.kv_cache_type)

        only_chains = drafting is not None and drafting.is_chain
        forms = (CHAIN,) if only_chains else ()

        def engine(
            graph: str, backend: str = "", shared: Mapping[str, Tensor] | None = None
        ) -> EngineExecutor:
            path = root / graph_path(graph)
            return EngineExecutor.open(path, self.device, threads, backend, forms, shared)

        builder = config.builder
        horizon = config.expert.action_space.horizon if config.expert else 0
        llm = base_graph(drafting, config)
        fused = load_fused(root, config, self.device, decode, decode_backend, drafting)
        kernels = load_kernels(self.device, early=fused is not None)
        decode_engine = engine(llm, decode_backend) if decode_backend else None
        self.runner = LLMEngineRunner(
            engine(llm, shared=fused.shared if fused else None),
            config,
            self.device,
            kernels,
            horizon,
            decode_engine,
            max_tree_size=drafting.tree_size if drafting else 0,
            only_chains=only_chains,
            fused_size=fused_size(drafting, config),
            fused=fused,
            lora_scales=LoraScales.read(root),
        )
        self.vision = self.audio = self.action = None
        if config.vision is not None:
            self.vision = VisionRunner(
                engine("visual"), config.vision, self.device, kernels, builder.max_input_len
            )
        if config.audio is not None:
            self.audio = AudioRunner(engine("audio"), config.audio, self.device, builder.max_input_len)
        if config.expert is not None:
            actions = load_fused_actions(root, config, self.device, decode)
            self.action = ActionRunner(
                engine("action", shared=actions.shared if actions else None),
                FlowExpertHead(
                    config.expert, builder.max_kv_cache_capacity, self.device, kernels, self.runner.rope_table
                ),
                self.device,
                kernels,
                builder.max_action_samples,
                actions,
            )

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
        vocab_map = read_vocab_map(root, config.llm) if config.reduced_vocab_size else None
        self.sampling = SamplingRows(
            self.device,
            kernels,
            max_batch_size=builder.max_batch_size,
            vocab_size=config.vocab_size,
            stop_token_ids=config.stop_token_ids,
            vocab_map=vocab_map,
        )
        recurrent = self.runner.recurrent
        states: list[RowState] = [cache, self.sampling]
        if recurrent is not None:
            states.append(recurrent)
        self.drafter: GuardedDrafter | None = None
        if drafting is not None:
            head = None
            if drafting.strategy == EAGLE and decode != ENGINE and not decode_backend:
                head = load_fused_draft(root, config, drafting, self.device)
            tree_kernels = load_tree_kernels(self.device, early=fused is not None and head is not None)
            drafter = load_drafter(
                root,
                config,
                drafting,
                self.device,
                kernels,
                tree_kernels,
                partial(engine, shared=head.shared if head else None),
                self.runner,
                self.embedder,
                self.sampling,
                head.executor if head else None,
                head.most_rows if head else 0,
                head.chain if head else None,
                head.prompts if head else None,
            )
            self.drafter = GuardedDrafter(drafter, self.device)
            metrics.spec_decode.strategy = drafter.name
            states.append(self.drafter)
        self.batch = Batch(states, builder.max_batch_size)
        self.logits = self.device.empty((builder.max_batch_size, 1, config.output_vocab_size), np.float32)
        self.vanilla = VanillaDecoding(
            self.device, self.batch, self.embedder, self.runner, self.sampling, self.logits
        )
        method: DecodeMethod = self.vanilla
        if drafting is not None and self.drafter is not None:
            method = TreeDecoding(
                self.device,
                tree_kernels,
                drafting,
                self.batch,
                self.embedder,
                self.runner,
                self.sampling,
                self.drafter,
                self.vanilla,
                metrics.spec_decode,
            )
        self.use_decode_method(method)
        if fused is not None and decode == AUTO:
            verification = None
            if drafting is not None:
                verification = Verification(tree_kernels, drafting.tree_size)
            choose_by_time(self.device, self.runner, self.embedder, self.logits, verification)
        if self.action is not None and self.action.uses_fused and decode == AUTO and config.expert:
            row = cache.sequence(0)
            choose_actions_by_time(self.device, self.action, row, config.expert.kv_caches)
            self.device.fill_zero(row.length)
            cache.clear_row(0)

        # 4. state that outlives a batch: prefixes, hidden states
        head_cache = self.drafter.kv_cache if self.drafter is not None else None
        self.reuse = PrefixReuse(
            self.device, kernels, config, cache, recurrent, self.vision, prefix_cache_bytes, head_cache
        )
        self.prefixes = self.reuse.pages
        self.hidden_states = HiddenStates(
            self.device,
            builder.hidden_state_layers,
            batch=builder.max_batch_size,
            tokens=builder.max_input_len,
            hidden_size=config.hidden_size,
            dtype=dtype,
        )
        self._prefill = Prefill(
            config,
            self.embedder,
            self.runner,
            self.reuse,
            self.hidden_states,
            self.logits,
            self.drafter,
        )
        self.input_token_ids: list[list[int]] = []

        # 5. requests to token ids
        tokenizer = Tokenizer(root / "tokenizer.json")
        template = ChatTemplate(root / "chat_template.jinja")
        prompts = PromptBuilder(tokenizer, template, config)
        self.preparer = RequestPreparer(
            config,
            tokenizer,
            prompts,
            self.loras,
            self.vision,
            self.audio,
            self.action,
            Grammars(tokenizer, config.vocab_size, config.stop_token_ids, vocab_map),
        )
        self._calls = ToolCallReader(tokenizer, template, tool_call_format)

    def use_decode_method(self, method: DecodeMethod) -> None:
        """Set the decode method for the next batches; the batch must be empty."""
        self.method = method
        self.sampling.resize(method.tokens_per_step)
        queued, capacity = self.device.max_queued_steps, self.runner.kv_cache.capacity
        self._decode_loop = DecodeLoop(self.batch, method, queued, capacity)

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
        self.reuse.match(sequences, reuse)

    def store_prefixes(self, sequences: list[GenerationSequence]) -> None:
        """Store prompts of the batch in the prefix cache."""
        for sequence in sequences:
            self.reuse.store(sequence, self.batch.row_of(sequence))

    def store_answers(self, sequences: list[GenerationSequence]) -> None:
        """Store conversations as their next turns begin.

        The answer is stored as the chat template writes it. The rows are computed by a prefill, so that they
        have the bits of a prompt's rows (prefix_cache.py). What was encoded for the answers is not encoded
        again: the encoder rows of the batch are still there. Conversations whose prompt the prefix cache had
        no room for are left out. The batch must be empty.
        """
        turns: list[GenerationSequence] = []
        for sequence in sequences:
            if sequence.is_cancelled or not self.reuse.has_pages(sequence):
                continue
            turn = self.preparer.prepare_next_turn(sequence)
            if turn is not None:
                turns.append(turn)
        self.match_prefixes(turns)
        turns = [turn for turn in turns if self.reuse.stored_length(turn) < len(turn.token_ids)]
        if turns:
            self.encode_images(turns)
            self.encode_audio(turns)
            self._prefill.compute(turns, self.batch.admit(turns))
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
            self.reuse.remove(adapter.key)
            self.method.drop(adapter)
            self.runner.drop(adapter)

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
            if self.drafter is not None:
                self.drafter.clear()
            self.device.synchronize()
        if isinstance(error, EngineError):
            self.reuse.clear()

    def encode_images(self, sequences: list[GenerationSequence]) -> None:
        """Encode images, one at a time, then videos; cancelled sequences are skipped.

        Rows of a reused prefix are not needed, and those that have been computed are kept.
        """
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
                if row > first_new and start not in sequence.encoded_rows:
                    sequence.encoded_rows.add(start)
                    image_rows, deepstack_rows = self.embedder.image_rows(start, height * width)
                    self.vision.encode(images[index], image_rows, deepstack_rows)
                    self._metrics.multimodal.total_images += 1
                    self._metrics.multimodal.total_image_tokens += height * width
            self._encode_videos(sequence, self.vision)

    def _encode_videos(self, sequence: GenerationSequence, vision: VisionRunner) -> None:
        """Encode the videos of a sequence, one group of frames at a time."""
        row = sequence.video_row
        first_new = row + sequence.reused(self.config.video_token_id)
        step = len(sequence.image_grids)
        for video, layout in zip(sequence.request.prompt_videos, sequence.videos, strict=True):
            tokens = layout.grid.group_tokens
            for group in range(layout.grid.groups):
                if not sequence.report("vision", step):
                    return
                start, row, step = row, row + tokens, step + 1
                if row > first_new and start not in sequence.encoded_rows:
                    sequence.encoded_rows.add(start)
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
                if row > first_new and start not in sequence.encoded_rows:
                    sequence.encoded_rows.add(start)
                    self.audio.encode(sounds[index], self.embedder.audio_rows(start, tokens))
                    self._metrics.multimodal.total_sounds += 1
                    self._metrics.multimodal.total_audio_tokens += tokens

    def prefill(self, sequences: list[GenerationSequence], keep_hidden_states: bool = False) -> None:
        """Admit sequences to the batch, fill their KV rows, sample their first tokens.

        KV rows of a reused prefix are copied from the prefix cache; the engine computes the other ones.
        """
        rows = self.batch.admit(sequences)
        embeds, logits = self._prefill.compute(sequences, rows)
        self.input_token_ids = [sequence.token_ids for sequence in sequences]
        reused = sum(sequence.reused_tokens for sequence in sequences)
        self._metrics.prefill.total_runs += 1
        self._metrics.prefill.computed_tokens += sum(map(len, self.input_token_ids)) - reused
        self._metrics.prefill.reused_tokens += reused
        self.sampling.mask(logits, sequences)
        self.sampling.sample(logits, rows)
        self.sampling.commit_rows(rows, self.sampling.count(rows))
        self.method.prefilled(rows)
        logprobs = max(sequence.request.logprobs for sequence in sequences)
        first_tokens = self.sampling.copy_to_host(logits, logprobs)
        if self.action is not None:  # while the device computes the prompts
            for sequence in sequences:
                if sequence.request.action_samples:
                    self.action.prepare(sequence.request.action_samples, sequence.noise_seed)
        first_tokens.deliver(sequences)
        if keep_hidden_states:
            self.hidden_states.keep(embeds)
        for sequence in sequences:
            sequence.report("decode", 0)

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
            condition = sequence.request.previous_chunk
            normalised = self.action.execute(cache, samples, steps, sequence.noise_seed, report, condition)
            if normalised is not None:
                sequence.actions = space.denormalise(normalised)
                if condition is not None:
                    kept = condition.unchanged
                    sequence.actions[:, : len(kept)] = space.clip(kept)
                sequence.paths = space.integrate(sequence.actions, sequence.speed)
                self._metrics.action.trajectories += samples
                self._metrics.action.total_runs += steps

    def read_calls(self, sequence: GenerationSequence) -> ParsedAnswer:
        """Read the tool calls of a finished answer, if its request has tools."""
        request, text = sequence.request, sequence.text.text
        if not request.tools:
            return ParsedAnswer(text)
        tokens = [token for token in sequence.generated if token not in sequence.stop_token_ids]
        before = sequence.token_ids[-TOKENS_BEFORE_ANSWER:]
        return self._calls.read(tokens, text, request.sampling.stop, before, request.tools)

    def capture_decoding_cuda_graph(self) -> bool:
        """Record decode steps, and from now on prefills; see `LLMInferenceRuntime`."""
        self.runner.records_prefills = self.method.capture(self.loras.loaded())
        return self.runner.records_prefills
