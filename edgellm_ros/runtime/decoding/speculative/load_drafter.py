# SPDX-License-Identifier: Apache-2.0
"""Loads the drafter of an engine directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from edgellm_ros.engine.device import Device, on_device
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.engine_directory.draft_config import DFLASH
from edgellm_ros.engine_directory.files import CONTEXT, D2T_FILE, DRAFT, DRAFT_EMBEDDING_FILE
from edgellm_ros.engine_directory.tensor_file import map_tensor, read_tensor
from edgellm_ros.fused.loading.fused_decoding import FusedDecoding
from edgellm_ros.kernels import Kernels, TreeKernels
from edgellm_ros.runtime.batch.input_embedder import InputEmbedder
from edgellm_ros.runtime.batch.sampling_rows import SamplingRows
from edgellm_ros.runtime.decoding.speculative.block_drafter import BlockDrafter
from edgellm_ros.runtime.decoding.speculative.drafter import Drafter
from edgellm_ros.runtime.decoding.speculative.drafting_config import LOOKUP, SpecDecodeDraftingConfig
from edgellm_ros.runtime.decoding.speculative.head_drafter import HeadDrafter
from edgellm_ros.runtime.decoding.speculative.prompt_lookup import PromptLookup
from edgellm_ros.runtime.engines.block_engine_runner import BlockEngineRunner
from edgellm_ros.runtime.engines.draft_engine_runner import DraftEngineRunner
from edgellm_ros.runtime.engines.llm_engine_runner import LLMEngineRunner

MOST_WAITING = 64  # tokens of vanilla steps on which a draft head runs at once


def load_drafter(
    *,
    root: Path,
    config: EngineConfig,
    drafting: SpecDecodeDraftingConfig,
    device: Device,
    kernels: Kernels,
    tree_kernels: TreeKernels,
    open_engine: Callable[[str], EngineExecutor],
    runner: LLMEngineRunner,
    embedder: InputEmbedder,
    sampling: SamplingRows,
    fused: FusedDecoding | None = None,
) -> Drafter:
    """Load the drafter that `drafting` names, which `check_drafting` has checked.

    - open_engine: opens a graph of the engine directory
    - fused: the fused kernels of a draft head, see `DraftEngineRunner`

    ValueError for a damaged file.
    """
    if drafting.strategy == LOOKUP:
        placeholders = (config.image_token_id, config.video_token_id, config.audio_token_id)
        return PromptLookup(device, tree_kernels, runner.kv_cache, placeholders)
    draft = config.draft
    assert draft is not None  # `check_drafting`
    token_of_logit = _token_of_logit(root, config.vocab_size, draft.vocab_size, device)
    # Rows that wait: those of a longer run might have no slots behind the committed ones.
    most_waiting = min(MOST_WAITING, draft.max_draft_tree_size, config.max_supported_input_length)
    if drafting.strategy == DFLASH:
        drafted = drafting.drafting_step
        engines = BlockEngineRunner(
            open_engine(DRAFT), open_engine(CONTEXT), config, device=device, kernels=kernels, drafted=drafted
        )
        return BlockDrafter(
            device,
            kernels,
            tree_kernels,
            draft,
            drafted=drafted,
            base=runner,
            engines=engines,
            embedder=embedder,
            sampling=sampling,
            most_waiting=most_waiting,
            token_of_logit=token_of_logit,
        )
    head = DraftEngineRunner(
        open_engine(DRAFT),
        config,
        draft,
        device,
        kernels,
        tree_kernels,
        top_k=drafting.drafting_top_k,
        tokens_per_round=drafting.tokens_per_round,
        fused=fused,
    )
    return HeadDrafter(
        draft.kind,
        device,
        kernels,
        tree_kernels,
        drafting,
        base=runner,
        head=head,
        embedder=embedder,
        sampling=sampling,
        max_prompt=config.max_supported_input_length,
        most_waiting=most_waiting,
        embedding=None if draft.shares_embedding else _embedding(root, config, head, device),
        token_of_logit=token_of_logit,
    )


def _embedding(root: Path, config: EngineConfig, head: DraftEngineRunner, device: Device) -> Tensor:
    """Read a head's own table of embeddings."""
    shape = config.vocab_size, head.hidden_size
    table = map_tensor(root / DRAFT_EMBEDDING_FILE, "embedding", shape)
    return device.adopt(table.astype(head.dtype, copy=False))


def _token_of_logit(root: Path, vocabulary: int, logits: int, device: Device) -> Tensor | None:
    """Read the tokens of a head's logits; None if logit i is that of token i."""
    if not (root / D2T_FILE).is_file():
        return None
    ids = read_tensor(root / D2T_FILE, "token_of_draft_logit", (logits,)).astype(np.int64)
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise ValueError(f"{root / D2T_FILE}: token ids must be below {vocabulary}")
    return on_device(device, ids)
