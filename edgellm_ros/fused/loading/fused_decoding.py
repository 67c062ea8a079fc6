# SPDX-License-Identifier: Apache-2.0
"""FusedDecoding: the loaded fused kernels of an engine directory."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels.chain_protocol import ChainDrafter, PromptRows


@dataclass(frozen=True)
class FusedDecoding:
    """The fused kernels of a language model or a draft head, for its engine runner."""

    executor: EngineExecutor
    most_rows: int  # largest batch of decode steps
    shared: dict[str, Tensor]  # weights on the device, by name of the graph's initializer
    most_verified_rows: int = 0  # most nodes of a verification, over all trees
    adapted: EngineExecutor | None = None  # as executor, for sequences with LoRA adapters
    most_adapted_rows: int = 0  # most tokens of a step with adapters
    most_lora_rank: int = 0
    chain: ChainDrafter | None = None  # of a draft head
    prompts: PromptRows | None = None  # likewise
    most_step_rows: int = 0  # most nodes that `executor` verifies; `verification` takes more
    prefill: EngineExecutor | None = None  # of prompts without adapters; None = the engine computes all
    verification: EngineExecutor | None = None  # of up to most_verified_rows nodes
