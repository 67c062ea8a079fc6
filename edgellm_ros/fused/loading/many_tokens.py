# SPDX-License-Identifier: Apache-2.0
"""Loads what runs many tokens in the fused kernels.

These are prompts, and verifications of batches of trees.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.errors import DeviceLostError, EngineError
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.fused.loading.backend import Decoder
from edgellm_ros.fused.loading.drafting import DraftSizes

if TYPE_CHECKING:
    from edgellm_ros.fused.decoder import FusedDecoder
    from edgellm_ros.fused.fusion import StateFusion
    from edgellm_ros.fused.plan.shape import FusedShape
    from edgellm_ros.fused.weights import FusedWeights

logger = logging.getLogger(__name__)

MOST_NODES = 128  # of a verification, over all trees


class ManyTokens(NamedTuple):
    """What runs many tokens; None = the engine does."""

    prefill: Decoder | None = None
    verification: Decoder | None = None  # of more nodes than the kernels of decode steps take
    most_nodes: int = 0  # of a verification


class Sizes(NamedTuple):
    """The largest runs that `make_many_tokens` makes memory for."""

    prompt_tokens: int  # over all sequences
    nodes: int  # of a verification, over all trees; 0 = there is none
    trees: bool  # whether the nodes of a sequence are a tree with a mask; False: a chain


def load_many_tokens(
    device: Device,
    shape: FusedShape,
    weights: FusedWeights,
    decoder: FusedDecoder,
    *,
    config: EngineConfig,
    drafting: DraftSizes | None,
    fusion: StateFusion | None,
) -> ManyTokens:
    """Make what runs many tokens.

    Empty, with a line in the log, if the kernels do not take the shape, or there is no memory for prompts.
    """
    batch, tree = config.max_supported_batch_size, drafting.tree_size if drafting is not None else 0
    nodes = min(batch, MOST_NODES // tree) * tree if tree else 0
    if shape.recurrent is not None:
        nodes = 0  # the kernels of prompts do not output the values of chains
    sizes = Sizes(
        prompt_tokens=batch * config.max_supported_input_length,
        nodes=nodes if nodes > decoder.max_rows else 0,
        trees=drafting is not None and not drafting.is_chain,
    )
    try:
        return make_many_tokens(device, shape, weights, decoder, sizes, fusion)
    except DeviceLostError:
        raise
    except (EngineError, ImportError) as reason:
        logger.info("the engine computes prompts: %s", reason)
        return ManyTokens()


def make_many_tokens(  # type: ignore[no-untyped-def]
    device, shape, weights, decoder, sizes: Sizes, fusion
) -> ManyTokens:
    """Make what runs prompts and verifications of at most these sizes."""
    from edgellm_ros.fused.cuda.products import CublasProducts
    from edgellm_ros.fused.plan.prefill import check_supported
    from edgellm_ros.fused.prefill import FusedPrefill, FusedVerification

    check_supported(shape)  # before memory is taken
    parts = device, shape, weights, decoder, CublasProducts(device, shape.dtype)
    prefill = FusedPrefill(*parts, sizes.prompt_tokens, fusion=fusion)
    if not sizes.nodes:
        return ManyTokens(prefill)
    verification = FusedVerification(*parts, sizes.nodes, fusion=fusion, trees=sizes.trees)
    return ManyTokens(prefill, verification, sizes.nodes)
