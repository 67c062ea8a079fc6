# SPDX-License-Identifier: Apache-2.0
"""Reads a checkpoint: model, action expert, draft head, adapters."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgellm_ros.builder.action.expert_config import Expert, expert_architecture
from edgellm_ros.builder.calibration.rounding import RoundedLayout, decoder_layers
from edgellm_ros.builder.checkpoint.checkpoint_config import (
    ConfigSection,
    MixtureOfExpertsError,
)
from edgellm_ros.builder.config.vocabulary import (
    generation_defaults,
    read_generation_config,
    read_vocab_map,
)
from edgellm_ros.builder.draft.dflash import describe_block_drafter, is_block_drafter, read_block_drafter
from edgellm_ros.builder.draft.head import DraftHead, read_head
from edgellm_ros.builder.draft.mtp import describe_mtp_head, read_mtp_head
from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.builder.families import Family, find_family
from edgellm_ros.builder.families.model import Model
from edgellm_ros.builder.graph.graph import DTYPES
from edgellm_ros.builder.graph.lm_head import BLOCK_COLUMNS, LMHead
from edgellm_ros.builder.lowering.options import LLMOptions
from edgellm_ros.builder.quantization.gguf import stored_blocks
from edgellm_ros.builder.quantization.layouts import find_layout
from edgellm_ros.builder.quantization.matrix import INT8, QuantizedMatrix
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory.adapters.adapter_folder import find_adapters
from edgellm_ros.engine_directory.builder_config import BuilderConfig
from edgellm_ros.engine_directory.config import FORMAT_VERSION, EngineConfig
from edgellm_ros.engine_directory.draft_config import MTP, DraftConfig

logger = logging.getLogger(__name__)

EXPERT_FOLDER = "action_expert"
DRAFT_FOLDER = "draft"  # of a checkpoint: its draft head
SMALLEST_INT4_GROUP = 32  # that the fused kernels multiply


@dataclass(frozen=True, eq=False, kw_only=True)
class Sources:
    """A checkpoint with a language model, read for an export with these options."""

    checkpoint: Path
    section: ConfigSection  # config.json
    options: ExportOptions
    limits: BuilderConfig
    family: Family
    weights: Weights
    model: Model
    expert: Expert | None
    draft: DraftHead | None
    vocab_map: np.ndarray | None  # int64, the only tokens whose logits are computed; None = all
    adapters: dict[str, Path]  # name -> folder in the checkpoint

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer, and the one that starts a trajectory."""
        stops = self.model.stop_token_ids
        if self.expert is None:
            return stops
        return tuple(dict.fromkeys((*stops, self.expert.architecture.future_start_token_id)))

    @property
    def parameters(self) -> int:
        """Values of the tensors, those of action expert and draft head included."""
        draft = self.draft.weights if self.draft is not None and self.draft.kind != MTP else None
        expert = None if self.expert is None else self.expert.weights
        every = (self.weights, expert, draft)
        return sum(each.parameters for each in every if each is not None)

    def lm_head(self) -> LMHead:
        """Return the LM head of the graphs."""
        model = self.model
        return LMHead(
            self.weights,
            model.lm_head,
            vocab_size=model.llm.vocab_size,
            hidden_size=model.llm.hidden_size,
            is_embedding=model.lm_head == model.embedding,
            vocab_map=self.vocab_map,
            as_input=self.options.lm_head_input,
            blocks=self._head_blocks(),
        )

    def _head_blocks(self) -> QuantizedMatrix | None:
        """Return the LM head of a quantised model in blocks.

        None if the graphs have it as it is. Graphs in fp32 are for CPUs, where 8 bits are slower without
        `cpu_int8`, which has its own blocks.
        """
        model, options = self.model, self.options
        plain = options.precision == "fp32" or options.lm_head_input or self.vocab_map is not None
        if plain or model.llm.vocab_size % BLOCK_COLUMNS or not self.weights.is_quantized:
            return None
        if options.quantize is not None:
            return rounded_head(options, model, self.weights)
        matrix = stored_blocks(self.weights.tensors.get(model.lm_head))
        has_kernels = matrix is not None and (matrix.dtype == INT8 or matrix.group >= SMALLEST_INT4_GROUP)
        return matrix if has_kernels else None

    def llm_options(self, head: LMHead) -> LLMOptions:
        """Return the options of the language model's graph without drafting."""
        return LLMOptions(
            self.options.precision,
            self.options.max_kv_cache_capacity,
            head,
            lora=bool(self.adapters or self.options.max_lora_rank),
            hidden_state_layers=self.limits.hidden_state_layers,
            kv_cache=self.options.kv_cache,
        )

    def config(self) -> EngineConfig:
        """Return the engine's configuration, without files and the rank of adapters."""
        model, options, draft = self.model, self.options, self.draft
        reduced = 0 if self.vocab_map is None else len(self.vocab_map)
        return self.section.make(
            EngineConfig,
            format_version=FORMAT_VERSION,
            model_type=self.section.data["model_type"],
            precision=options.precision,
            llm=dataclasses.replace(model.llm, reduced_vocab_size=reduced),
            builder=self.limits,
            vision=model.vision,
            audio=model.audio,
            action=self.expert.architecture.config(model.llm) if self.expert else None,
            draft=self._draft_config(draft) if draft is not None else None,
            special_tokens=model.special_tokens,
            stop_token_ids=self.stop_token_ids,
            generation=model.generation or generation_defaults(read_generation_config(self.checkpoint)),
            files=(),
        )

    def _draft_config(self, draft: DraftHead) -> DraftConfig:
        options, verified = self.options, self.options.max_verify_tree_size
        if draft.kind == MTP:  # found without being asked for: a short KV cache is no error
            verified = min(verified, max(2, options.max_kv_cache_capacity - 1))
        return draft.config(options.max_draft_tree_size, verified)


def read_sources(
    checkpoint: Path, section: ConfigSection, options: ExportOptions, limits: BuilderConfig
) -> Sources:
    """Read a checkpoint; its weights are read when the files are written.

    Raises the errors of `export`.
    """
    family, weights, model = read_model(checkpoint, section)
    for each in options.scales:
        each.group.fold(weights, each.scales)
    if options.quantize is not None:
        weights.quantize(rounded_layout(options, model))
    limit = model.llm.max_position_embeddings
    if limits.max_kv_cache_capacity > limit:
        raise ValueError(
            f"max_kv_cache_capacity {limits.max_kv_cache_capacity} exceeds the model's "
            f"{model.position_limit} {limit}"
        )
    sources = Sources(
        checkpoint=checkpoint,
        section=section,
        options=options,
        limits=limits,
        family=family,
        weights=weights,
        model=model,
        expert=model.expert or _read_expert(checkpoint, model),
        draft=_read_draft(checkpoint, options, model, weights),
        vocab_map=None,
        adapters={} if options.max_lora_rank == 0 else find_adapters(checkpoint),
    )
    return dataclasses.replace(sources, vocab_map=_vocab_map(sources))


def _vocab_map(sources: Sources) -> np.ndarray | None:
    """Return the only tokens whose logits are computed; None = all."""
    model, given = sources.model, sources.options.vocab_map
    if given is None and not model.input_tokens:
        return None
    tokens = np.arange(model.llm.vocab_size, dtype=np.int32)
    if given is not None:
        tokens = read_vocab_map(Path(given), model.llm.vocab_size, sources.stop_token_ids)
    return tokens[~np.isin(tokens, model.input_tokens)]


def read_model(checkpoint: Path, section: ConfigSection) -> tuple[Family, Weights, Model]:
    """Read the model of a checkpoint by its family."""
    layout = find_layout(section)
    try:
        family = find_family(section)
        weights = Weights(checkpoint, layout)
        if "fc.weight" in weights:
            raise ValueError(
                f"{weights.where}: tensor 'fc.weight': a draft head, not a language model; export its "
                f"language model with --draft {checkpoint}"
            )
        if layout is not None and not weights.is_quantized:
            raise ValueError(f"{weights.where}: no layer is quantised, but the config says that some are")
        model = family.read(checkpoint, section, weights)
        return family, weights if model.weights is None else model.weights, model
    except MixtureOfExpertsError as error:
        raise ValueError(f"{error}{_size(checkpoint)}") from None


def rounded_layout(options: ExportOptions, model: Model) -> RoundedLayout:
    """Make the layout of the weights that `quantize` asks for."""
    layers, dtype = decoder_layers(model.embedding), np.dtype(DTYPES[options.precision].numpy())
    kept = {layer: shares for each in options.scales for layer, shares in each.kept.items()}
    return RoundedLayout(str(options.quantize), options.group_size, layers, dtype, kept)


def rounded_head(options: ExportOptions, model: Model, weights: Weights) -> QuantizedMatrix | None:
    """Round the LM head to 8 bits; None if its inputs fill no group."""
    module, dtype = model.lm_head.removesuffix(".weight"), np.dtype(DTYPES[options.precision].numpy())
    return RoundedLayout("int8", options.group_size, module, dtype).matrix(weights.tensors, module)


def _size(checkpoint: Path) -> str:
    """Tell how many parameters a checkpoint has; "" if its weights cannot be read."""
    try:
        return f"; the checkpoint has {Weights(checkpoint).parameters / 1e9:.3g} billion parameters"
    except (ValueError, OSError):
        return ""


def _read_expert(checkpoint: Path, model: Model) -> Expert | None:
    folder = checkpoint / EXPERT_FOLDER
    if not folder.is_dir():
        return None
    return Expert(expert_architecture(folder / "config.json", model.llm), Weights(folder))


def _read_draft(checkpoint: Path, options: ExportOptions, model: Model, weights: Weights) -> DraftHead | None:
    folder = checkpoint / DRAFT_FOLDER if options.draft is None else Path(options.draft)
    has_folder = options.draft is not None or folder.is_dir()
    if options.draft is not None and not folder.is_dir():
        raise FileNotFoundError(f"{folder}: expected the directory of a draft head, found none")
    drafts_blocks = options.with_draft and has_folder and is_block_drafter(folder)
    has_mtp = options.with_draft and not has_folder and model.mtp is not None
    if options.draft_vocab_size is not None and not (drafts_blocks or has_mtp):
        raise ValueError(
            f"--draft-vocab-size {options.draft_vocab_size} is for an MTP head or a DFlash drafter, and none "
            "is exported"
        )
    if not options.with_draft or not (has_folder or model.mtp):
        return None
    if drafts_blocks:
        count, capacity = options.draft_vocab_size, options.max_kv_cache_capacity
        head = read_block_drafter(folder, checkpoint, model, count, capacity)
        logger.info("%s", describe_block_drafter(head))
        return head
    if model.mtp is not None and not has_folder:
        head = read_mtp_head(checkpoint, model, model.mtp, weights, options.draft_vocab_size)
        logger.info("%s", describe_mtp_head(head))
        return head
    dtype = np.dtype(DTYPES[options.precision].numpy())
    return read_head(folder, model, weights, dtype, options.max_kv_cache_capacity)
