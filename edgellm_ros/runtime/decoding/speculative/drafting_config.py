# SPDX-License-Identifier: Apache-2.0
"""SpecDecodeDraftingConfig: how many tokens are drafted, and by which drafter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from edgellm_ros.echo import quoted
from edgellm_ros.engine_directory.choices import FP8
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.engine_directory.draft_config import DFLASH, EAGLE, HEAD_KINDS, MTP
from edgellm_ros.engine_directory.files import VERIFY, graph_path
from edgellm_ros.kernels.tree_protocol import (
    MOST_CANDIDATES,
    MOST_TABLE_ENTRIES,
    MOST_TREE_NODES,
    entries,
)

AUTO, OFF, LOOKUP = "auto", "off", "lookup"
STRATEGIES = (*HEAD_KINDS, LOOKUP)
DRAFTING = (AUTO, OFF, *STRATEGIES)  # values of the option


@dataclass(frozen=True)
class SpecDecodeDraftingConfig:
    """Shape of the trees of drafted tokens.

    The draft has `drafting_step` levels. It has `drafting_top_k` candidates for each token that it runs on,
    and it runs on the best `drafting_top_k` candidates of a level. The base model verifies the best
    candidates of all levels. ValueError for sizes that make no tree.
    """

    drafting_top_k: int = 4
    drafting_step: int = 4
    verify_tree_size: int = 16  # rows of a verification, with the newest token
    strategy: str = EAGLE  # "eagle", "mtp": a draft head; "dflash": a block; "lookup": earlier text, a chain
    falls_back: bool = True  # to shorter chains (on a CPU) and vanilla steps while they are faster

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, got {quoted(self.strategy)}")
        for name, least in (("drafting_top_k", 1), ("drafting_step", 1), ("verify_tree_size", 2)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer from {least}, got {quoted(value)}")

    @property
    def has_head(self) -> bool:
        """Whether a draft head drafts."""
        return self.strategy in HEAD_KINDS

    @property
    def is_chain(self) -> bool:
        """Whether each node of a tree has one child at most."""
        return self.strategy in (LOOKUP, DFLASH) or self.drafting_top_k == 1

    @property
    def tree_size(self) -> int:
        """Rows of a verification, not more than the draft has candidates."""
        top_k = 1 if self.is_chain else self.drafting_top_k
        candidates = top_k + (self.drafting_step - 1) * top_k**2
        return min(self.verify_tree_size, 1 + candidates)

    @property
    def tokens_per_round(self) -> int:
        """Maximum number of tokens that a round commits per row."""
        return min(self.drafting_step + 1, self.tree_size)

    @property
    def drafted_rows(self) -> int:
        """Maximum number of KV rows that a tree takes in a draft head's cache."""
        return max((self.drafting_step - 1) * self.drafting_top_k, self.tokens_per_round)


def base_graph(drafting: SpecDecodeDraftingConfig | None, config: EngineConfig) -> str:
    """Return the language model's graph: with drafting `llm/verify`, if there is one.

    `llm/verify` outputs the states that a draft head takes, and the changes of recurrent states by the tokens
    of a chain. The graph takes trees on every device, but only chains if the model has recurrent layers.
    """
    verifies = config.draft is not None or config.llm.recurrent is not None
    return VERIFY if drafting is not None and verifies else "llm"


def fused_size(drafting: SpecDecodeDraftingConfig | None, config: EngineConfig) -> int:
    """Return the size of the states that `base_graph` outputs; 0 = it has none."""
    if drafting is None or config.draft is None or config.draft.kind == DFLASH:
        return 0
    return config.draft.hidden_size


def state_layers(drafting: SpecDecodeDraftingConfig | None, config: EngineConfig) -> tuple[int, ...]:
    """Return the layers whose outputs `hidden_states_i` `base_graph` has."""
    layers = config.hidden_state_layers
    return layers if drafting is None or config.draft is None else config.draft.states_of_verification(layers)


def check_drafting(drafting: SpecDecodeDraftingConfig, config: EngineConfig, on_cpu: bool) -> None:
    """Raise ValueError unless an engine directory can draft with these settings.

    on_cpu: whether it drafts on a CPU or on a GPU.
    """
    draft, most = config.draft, config.max_verify_tree_size
    if config.llm.recurrent is not None:
        if not drafting.is_chain:
            raise ValueError(
                f"drafting_top_k {drafting.drafting_top_k}: a model with recurrent layers verifies chains, "
                "whose drafting_top_k is 1"
            )
        if graph_path(VERIFY) not in {entry.path for entry in config.files}:
            raise ValueError(f"drafting {drafting.strategy}: {graph_path(VERIFY)} is missing: export again")
    if drafting.tree_size > most:
        raise ValueError(f"verify_tree_size {drafting.tree_size}: this engine verifies at most {most} tokens")
    if not on_cpu:
        _check_cuda_limits(drafting)
        if config.kv_cache_type == FP8 and not drafting.is_chain:
            raise ValueError(
                f"drafting_top_k {drafting.drafting_top_k}: with a KV cache of type fp8 a GPU verifies "
                "chains, whose drafting_top_k is 1"
            )
    if not drafting.has_head:
        return
    if draft is None:
        how = "export a checkpoint with an MTP head" if drafting.strategy == MTP else "edgellm export --draft"
        raise ValueError(f"drafting {drafting.strategy}: this engine has no draft head ({how})")
    if draft.kind != drafting.strategy:
        raise ValueError(f"drafting {drafting.strategy}: this engine's draft head is of kind {draft.kind}")
    if drafting.strategy == DFLASH:
        if drafting.drafting_top_k != 1:
            raise ValueError(
                f"drafting_top_k {drafting.drafting_top_k}: a block is a chain, whose drafting_top_k is 1"
            )
        if drafting.drafting_step >= draft.block_size:
            raise ValueError(
                f"drafting_step {drafting.drafting_step}: this engine drafts at most {draft.block_size - 1} "
                f"tokens in a block of {draft.block_size}"
            )
        return
    if drafting.drafted_rows > draft.max_draft_tree_size:
        raise ValueError(
            f"drafting_top_k {drafting.drafting_top_k} and drafting_step {drafting.drafting_step} need "
            f"{drafting.drafted_rows} rows of drafted tokens; this engine has "
            f"{draft.max_draft_tree_size} (max_draft_tree_size)"
        )
    if drafting.drafting_top_k > draft.vocab_size:
        raise ValueError(
            f"drafting_top_k {drafting.drafting_top_k} exceeds the draft's {draft.vocab_size} tokens"
        )


def _check_cuda_limits(drafting: SpecDecodeDraftingConfig) -> None:
    """Raise ValueError for sizes for which the CUDA kernels lack smem."""
    top_k, levels = drafting.drafting_top_k, drafting.drafting_step
    limits = [("verify_tree_size", drafting.tree_size, MOST_TREE_NODES)]
    if drafting.has_head:
        table = f"the candidates of drafting_top_k {top_k} and drafting_step {levels}:"
        limits += [
            ("drafting_top_k", top_k, MOST_CANDIDATES),
            ("drafting_step", levels, MOST_TREE_NODES),
            (table, entries(top_k, levels), MOST_TABLE_ENTRIES),
        ]
    for name, value, limit in limits:
        if value > limit:
            raise ValueError(f"{name} {value}: on a GPU at most {limit}")


LOOKUP_CHAIN = SpecDecodeDraftingConfig(1, 7, 8, LOOKUP)
CHAIN = SpecDecodeDraftingConfig(1, 5, 6)  # on a CPU every row of a verification takes time
# For dense models below these hidden sizes. On a CPU their verification takes as long with a few more rows.
# On a GPU one kernel drafts whole chains with their heads, and verifications are compiled for 8 rows.
SMALL_HIDDEN_SIZE, SMALL_HIDDEN_SIZE_ON_GPU = 1024, 512
SMALL_CHAIN = SpecDecodeDraftingConfig(1, 8, 9)
SMALL_CHAIN_ON_GPU = SpecDecodeDraftingConfig(1, 7, 8)
# Each level of an MTP head reads many rows of the base's LM head, and the head was trained for one level.
MTP_CHAIN = SpecDecodeDraftingConfig(1, 3, 4, MTP)
MTP_CHAIN_ON_CPU = SpecDecodeDraftingConfig(1, 2, 3, MTP)
# A block costs the same for any number of tokens, a verification does not: on a GPU the fused kernels are
# compiled for 8 rows, on a CPU every row takes time.
BLOCK_CHAIN = SpecDecodeDraftingConfig(1, 7, 8, DFLASH)
BLOCK_CHAIN_ON_CPU = SpecDecodeDraftingConfig(1, 4, 5, DFLASH)


def _block_chain(config: EngineConfig, on_cpu: bool) -> SpecDecodeDraftingConfig:
    default = BLOCK_CHAIN_ON_CPU if on_cpu else BLOCK_CHAIN
    most = default.drafting_step if config.draft is None else config.draft.block_size - 1
    return default if most >= default.drafting_step else SpecDecodeDraftingConfig(1, most, most + 1, DFLASH)


def drafting_config(
    drafting: str,
    config: EngineConfig,
    on_cpu: bool,
    drafting_top_k: int | None = None,
    drafting_step: int | None = None,
    verify_tree_size: int | None = None,
) -> SpecDecodeDraftingConfig | None:
    """Return the configuration that options name for an engine; None = no drafting.

    "auto" is the kind of the engine's draft head, if it can draft with it, else "off". An option that is
    None keeps the default of the strategy, which for heads depends on device and model. ValueError for
    options that do not fit.
    """
    sizes: dict[str, Any] = {
        name: value
        for name, value in (
            ("drafting_top_k", drafting_top_k),
            ("drafting_step", drafting_step),
            ("verify_tree_size", verify_tree_size),
        )
        if value is not None
    }
    if drafting == AUTO:
        head = config.draft
        drafting = OFF if head is None or head.max_draft_tree_size < 2 else head.kind
        if drafting == OFF and sizes:
            raise ValueError(f"{next(iter(sizes))} is for drafting, and this engine has no draft head")
    if drafting == OFF:
        return None
    if drafting not in STRATEGIES:
        expected = ", ".join(DRAFTING)
        raise ValueError(f"drafting must be one of {expected}, got {quoted(drafting)}")
    default = LOOKUP_CHAIN
    if drafting == DFLASH:
        default = _block_chain(config, on_cpu)
    if drafting == MTP:
        default = MTP_CHAIN_ON_CPU if on_cpu else MTP_CHAIN
    if drafting == EAGLE:
        only_chains = on_cpu or config.llm.recurrent is not None or config.kv_cache_type == FP8
        default = CHAIN if only_chains else SpecDecodeDraftingConfig()
        small_size = SMALL_HIDDEN_SIZE if on_cpu else SMALL_HIDDEN_SIZE_ON_GPU
        if config.llm.recurrent is None and config.hidden_size < small_size:
            most = 0 if config.draft is None else config.draft.max_draft_tree_size
            small = SMALL_CHAIN if on_cpu else SMALL_CHAIN_ON_GPU
            default = small if small.drafted_rows <= most else CHAIN
    if config.draft is not None:
        most = config.draft.max_draft_tree_size
        grows = default.strategy in (EAGLE, MTP)  # the KV cache, with each level
        if grows and default.drafted_rows > most > 1:  # the longest chain that fits
            default = SpecDecodeDraftingConfig(1, most - 1, most, default.strategy)
        default = replace(
            default, verify_tree_size=min(default.verify_tree_size, config.draft.max_verify_tree_size)
        )
    return replace(default, **sizes)
