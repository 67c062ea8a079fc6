# SPDX-License-Identifier: Apache-2.0
"""Opens the engines of a directory, and makes what the stages of a batch use.

open_engines    graphs -> Engines: the language model, encoders, action head, fused kernels
load_inputs     weights that are inputs of the engines: embeddings, adapters, the LM head
make_decoding   -> Decoding: the state of each row of the batch, and the decode method
make_stores     -> Stores: what outlives a batch: prefixes, the prefill
make_requests   -> Requests: from requests to token ids, from tokens to tool calls
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from edgellm_ros.diffusion.action_runner import ActionRunner
from edgellm_ros.diffusion.heads.flow_expert import FlowExpertHead
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory.adapters.lora_scales import LoraScales
from edgellm_ros.engine_directory.binding_names import LM_HEAD
from edgellm_ros.engine_directory.chat_template import ChatTemplate
from edgellm_ros.engine_directory.draft_config import EAGLE, MTP
from edgellm_ros.engine_directory.parts import ACTION, AUDIO, VISUAL
from edgellm_ros.engine_directory.tensor_file import read_tensor, read_vocab_map
from edgellm_ros.fused.loading.actions import choose_by_time as choose_actions_by_time
from edgellm_ros.fused.loading.actions import load_fused_actions
from edgellm_ros.fused.loading.availability import AUTO, ENGINE
from edgellm_ros.fused.loading.decoder import load_fused
from edgellm_ros.fused.loading.draft import load_fused_draft
from edgellm_ros.fused.loading.fused_decoding import FusedDecoding
from edgellm_ros.fused.loading.vision import choose_by_time as choose_vision_by_time
from edgellm_ros.fused.loading.vision import load_fused_vision
from edgellm_ros.kernels import Kernels, TreeKernels, load_kernels, load_tree_kernels
from edgellm_ros.multimodal.audio.runner import AudioRunner
from edgellm_ros.multimodal.vision_runner import VisionRunner
from edgellm_ros.runtime.adapters.lora import find_adapters
from edgellm_ros.runtime.batch.batch import Batch
from edgellm_ros.runtime.batch.input_embedder import InputEmbedder
from edgellm_ros.runtime.batch.linear_kv_cache import check_cache_type
from edgellm_ros.runtime.batch.row_state import RowState
from edgellm_ros.runtime.batch.sampling_rows import SamplingRows
from edgellm_ros.runtime.decoding.fused_choice import Verification, choose_by_time
from edgellm_ros.runtime.decoding.method import DecodeMethod
from edgellm_ros.runtime.decoding.speculative.drafting_config import (
    SpecDecodeDraftingConfig,
    base_graph,
    fused_size,
    state_layers,
)
from edgellm_ros.runtime.decoding.speculative.guarded_drafter import GuardedDrafter
from edgellm_ros.runtime.decoding.speculative.load_drafter import load_drafter
from edgellm_ros.runtime.decoding.speculative.tree_decoding import TreeDecoding
from edgellm_ros.runtime.decoding.vanilla import VanillaDecoding
from edgellm_ros.runtime.engines.llm_engine_runner import LLMEngineRunner
from edgellm_ros.runtime.grammar.grammar import Grammars
from edgellm_ros.runtime.metrics import SpecDecodeGenerationMetrics
from edgellm_ros.runtime.opening import Opening
from edgellm_ros.runtime.prefill import Prefill
from edgellm_ros.runtime.prefix_reuse import PrefixReuse
from edgellm_ros.runtime.prompt.buckets import pads_prompts
from edgellm_ros.runtime.prompt.prompt_builder import PromptBuilder
from edgellm_ros.runtime.prompt.tool_calls import ToolCallReader
from edgellm_ros.runtime.request_preparer import RequestPreparer
from edgellm_ros.runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False, kw_only=True)
class Engines:
    """The engines of a directory, and the kernels between them."""

    kernels: Kernels
    fused: FusedDecoding | None
    runner: LLMEngineRunner
    vision: VisionRunner | None
    audio: AudioRunner | None
    action: ActionRunner | None


@dataclass(frozen=True, eq=False, kw_only=True)
class Decoding:
    """The batch, the state of its rows, and the methods that decode it."""

    sampling: SamplingRows
    drafter: GuardedDrafter | None
    batch: Batch
    logits: Tensor  # float32 [max batch, 1, V], of all decode steps
    vanilla: VanillaDecoding
    method: DecodeMethod
    verification: Verification | None  # what `choose_by_time` measures of drafting


@dataclass(frozen=True, eq=False, kw_only=True)
class Stores:
    """What outlives a batch, and the prefill, which reads and fills it."""

    reuse: PrefixReuse
    prefill: Prefill


@dataclass(frozen=True, eq=False, kw_only=True)
class Requests:
    """From requests to token ids, and from tokens to tool calls."""

    preparer: RequestPreparer
    calls: ToolCallReader


def open_engines(opening: Opening) -> Engines:
    """Open the engines, and load the fused kernels where device and engine have them."""
    config, device, options, drafting = opening.config, opening.device, opening.options, opening.drafting
    check_cache_type(device, config.kv_cache_type)
    backend = options.decode_backend
    fused = load_fused(opening.root, config, device, options.decode, backend, drafting)
    kernels = load_kernels(device, early=fused is not None)
    llm = base_graph(drafting, config)
    runner = LLMEngineRunner(
        opening.engine(llm, shared=fused.shared if fused else None),
        config,
        device,
        kernels,
        positions_beyond=config.expert.action_space.horizon if config.expert else 0,
        decode_executor=opening.engine(llm, backend) if backend else None,
        max_tree_size=drafting.tree_size if drafting else 0,
        only_chains=drafting is not None and drafting.is_chain,
        fused_size=fused_size(drafting, config),
        state_layers=state_layers(drafting, config),
        fused=fused,
        lora_scales=LoraScales.read(opening.root),
    )
    vision = audio = action = None
    most_tokens = config.builder.max_input_len
    if config.vision is not None and not opening.parts.missing(VISUAL):
        fused_tower = load_fused_vision(opening.root, config, device, options.decode)
        tower = opening.engine(VISUAL, shared=fused_tower.shared)
        vision = VisionRunner(tower, config.vision, device, kernels, most_tokens, fused_tower.executor)
    if config.audio is not None and not opening.parts.missing(AUDIO):
        audio = AudioRunner(opening.engine(AUDIO), config.audio, device, most_tokens, pads_prompts(device))
    if not opening.parts.missing(ACTION):
        action = _open_action_head(opening, kernels, runner)
    if not options.cuda_graphs:
        for part in (vision, audio, action):
            if part is not None:
                part.stop_recording()
    return Engines(kernels=kernels, fused=fused, runner=runner, vision=vision, audio=audio, action=action)


def _open_action_head(opening: Opening, kernels: Kernels, runner: LLMEngineRunner) -> ActionRunner | None:
    config, device = opening.config, opening.device
    if config.expert is None:
        return None
    fused = load_fused_actions(opening.root, config, device, opening.options.decode)
    capacity = config.builder.max_kv_cache_capacity
    return ActionRunner(
        opening.engine(ACTION, shared=fused.shared if fused else None),
        FlowExpertHead(config.expert, capacity, device, kernels, runner.rope_table),
        device,
        kernels,
        config.builder.max_action_samples,
        fused,
    )


def load_inputs(opening: Opening, engines: Engines) -> InputEmbedder:
    """Load the weights that are inputs: embeddings, adapters, the LM head."""
    config, root, runner = opening.config, opening.root, engines.runner
    embedder = InputEmbedder(
        root / "embedding.safetensors",
        config,
        opening.device,
        engines.kernels,
        runner.embeds_dtype,
        encodes=engines.vision is not None or engines.audio is not None,
    )
    runner.share_embedding(embedder.table)
    lora_dirs = opening.options.lora_dirs
    if lora_dirs is None:
        lora_dirs = find_adapters(root) if config.builder.max_lora_rank else {}
    for name, directory in lora_dirs.items():
        runner.loras.add(name, directory)
    if config.builder.lm_head_input:
        shape = (config.hidden_size, config.output_vocab_size)
        runner.set_lm_head_weights(LM_HEAD, read_tensor(root / "lm_head.safetensors", LM_HEAD, shape))
    return embedder


def make_decoding(
    opening: Opening,
    engines: Engines,
    embedder: InputEmbedder,
    vocab_map: np.ndarray | None,
    metrics: SpecDecodeGenerationMetrics,
) -> Decoding:
    """Make the batch with the state of its rows, and the decode method."""
    config, device, runner, drafting = opening.config, opening.device, engines.runner, opening.drafting
    most_rows = config.builder.max_batch_size
    sampling = SamplingRows(
        device,
        engines.kernels,
        max_batch_size=most_rows,
        vocab_size=config.vocab_size,
        stop_token_ids=config.stop_token_ids,
        vocab_map=vocab_map,
    )
    states: list[RowState] = [runner.kv_cache]
    if runner.recurrent is not None:
        states.append(runner.recurrent)
    drafter = tree_kernels = None
    if drafting is not None:
        drafter, tree_kernels = _make_drafter(opening, engines, drafting, embedder, sampling)
        metrics.strategy = drafter.name
        states.append(drafter)
    batch = Batch(states, most_rows, of_answers=[sampling])
    logits = device.empty((most_rows, 1, config.output_vocab_size), np.float32)
    vanilla = VanillaDecoding(device, batch, embedder, runner, sampling, logits)
    method: DecodeMethod = vanilla
    verification = None
    if drafting is not None and drafter is not None and tree_kernels is not None:
        verification = Verification(tree_kernels, drafting.tree_size)
        method = TreeDecoding(
            device=device,
            kernels=tree_kernels,
            config=drafting,
            batch=batch,
            embedder=embedder,
            runner=runner,
            sampling=sampling,
            drafter=drafter,
            vanilla=vanilla,
            metrics=metrics,
        )
    return Decoding(
        sampling=sampling,
        drafter=drafter,
        batch=batch,
        logits=logits,
        vanilla=vanilla,
        method=method,
        verification=verification,
    )


def _make_drafter(
    opening: Opening,
    engines: Engines,
    drafting: SpecDecodeDraftingConfig,
    embedder: InputEmbedder,
    sampling: SamplingRows,
) -> tuple[GuardedDrafter, TreeKernels]:
    options, device, fused = opening.options, opening.device, None
    if drafting.strategy in (EAGLE, MTP) and options.decode != ENGINE and not options.decode_backend:
        fused = load_fused_draft(opening.root, opening.config, drafting, device)
    tree_kernels = load_tree_kernels(device, early=engines.fused is not None and fused is not None)
    drafter = load_drafter(
        root=opening.root,
        config=opening.config,
        drafting=drafting,
        device=device,
        kernels=engines.kernels,
        tree_kernels=tree_kernels,
        open_engine=partial(opening.engine, shared=fused.shared if fused else None),
        runner=engines.runner,
        embedder=embedder,
        sampling=sampling,
        fused=fused,
    )
    return GuardedDrafter(drafter, device), tree_kernels


def choose_by_times(opening: Opening, engines: Engines, embedder: InputEmbedder, decoding: Decoding) -> None:
    """Choose between engines and fused kernels by their times, for `decode` "auto".

    The measured steps write to the first row of the KV cache, which is cleared.
    """
    config, device, runner, action = opening.config, opening.device, engines.runner, engines.action
    if opening.options.decode != AUTO:
        return
    if engines.fused is not None:
        graphs = opening.options.cuda_graphs
        choose_by_time(device, runner, embedder, decoding.logits, decoding.verification, graphs)
    if engines.vision is not None and engines.vision.uses_fused:
        choose_vision_by_time(device, engines.vision, partial(embedder.image_rows, 0))
    if action is not None and action.uses_fused and config.expert is not None:
        row = runner.kv_cache.sequence(0)
        choose_actions_by_time(device, action, row, config.expert.kv_caches)
        device.fill_zero(row.length)
        runner.kv_cache.clear_row(0)


def make_stores(opening: Opening, engines: Engines, embedder: InputEmbedder, decoding: Decoding) -> Stores:
    """Make the prefix cache and the prefill."""
    config, runner = opening.config, engines.runner
    reuse = PrefixReuse(
        device=opening.device,
        kernels=engines.kernels,
        config=config,
        cache=runner.kv_cache,
        recurrent=runner.recurrent,
        vision=engines.vision,
        capacity_bytes=opening.options.prefix_cache_bytes,
        head_cache=decoding.drafter.kv_cache if decoding.drafter is not None else None,
        joins_first_prompts=runner.joins_first_prompts,
    )
    prefill = Prefill(
        device=opening.device,
        config=config,
        embedder=embedder,
        runner=runner,
        reuse=reuse,
        logits=decoding.logits,
        drafter=decoding.drafter,
        pads=pads_prompts(opening.device),
    )
    return Stores(reuse=reuse, prefill=prefill)


def make_requests(opening: Opening, engines: Engines, vocab_map: np.ndarray | None) -> Requests:
    """Make the request preparer and the reader of tool calls."""
    config = opening.config
    tokenizer = Tokenizer(opening.root / "tokenizer.json")
    template = ChatTemplate(opening.root / "chat_template.jinja")
    preparer = RequestPreparer(
        parts=opening.parts,
        tokenizer=tokenizer,
        prompts=PromptBuilder(tokenizer, template, config),
        loras=engines.runner.loras,
        lm_heads=engines.runner.lm_heads,
        vision=engines.vision,
        audio=engines.audio,
        action=engines.action,
        grammars=Grammars(tokenizer, config.vocab_size, config.stop_token_ids, vocab_map),
    )
    calls = ToolCallReader(tokenizer, template, opening.options.tool_call_format)
    return Requests(preparer=preparer, calls=calls)


def read_vocabulary(opening: Opening) -> np.ndarray | None:
    """Read the token ids of a reduced vocabulary, int64 [V]; None = all tokens."""
    config = opening.config
    return read_vocab_map(opening.root, config.llm) if config.reduced_vocab_size else None
