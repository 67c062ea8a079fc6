# SPDX-License-Identifier: Apache-2.0
"""FusedDecoding: the fused kernels as an engine runner takes them."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels.chain_protocol import ChainDrafter, PromptRows


@dataclass(frozen=True)
class FusedDecoding:
    """The fused kernels of one engine directory, loaded."""

    executor: EngineExecutor
    most_rows: int  # largest batch of decode steps
    shared: dict[str, Tensor]  # weights on the device, by name of the graph's initializer
    most_verified_rows: int = 0  # most nodes of all trees of a verification
    adapted: EngineExecutor | None = None  # the same for sequences with LoRA adapters
    most_adapted_rows: int = 0  # most tokens of a step with adapters
    most_lora_rank: int = 0
    chain: ChainDrafter | None = None  # of a draft head
    prompts: PromptRows | None = None  # likewise
