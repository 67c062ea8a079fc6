# SPDX-License-Identifier: Apache-2.0
"""Makes the state per row of engines: KV cache, recurrent state."""

from __future__ import annotations

from collections.abc import Sequence

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.kernels import Kernels
from edgellm_ros.runtime.batch.linear_kv_cache import LinearKVCache
from edgellm_ros.runtime.batch.recurrent_state import RecurrentState


def make_kv_cache(
    device: Device, kernels: Kernels, config: EngineConfig, executor: EngineExecutor
) -> LinearKVCache:
    """Make the KV cache that an executor's bindings describe."""
    return LinearKVCache(
        device,
        kernels,
        layers=config.num_attention_layers,
        max_batch_size=config.max_supported_batch_size,
        kv_heads=config.num_kv_heads,
        capacity=config.max_kv_cache_capacity,
        head_dim=config.head_dim,
        dtype=executor.dtype(names.key_cache(0)),
    )


def make_draft_cache(
    device: Device, kernels: Kernels, config: EngineConfig, executors: Sequence[EngineExecutor]
) -> LinearKVCache:
    """Make the KV cache of a draft head, which its executors share.

    EngineError if they have different caches, or one of another capacity than `config` says.
    """
    draft, first = config.draft, executors[0]
    assert draft is not None  # `check_drafting`
    capacity, dtype = draft.cache_capacity(config.max_kv_cache_capacity), first.dtype(names.key_cache(0))
    for each in executors:
        found = each.bindings[names.key_cache(0)]
        if found.shape[2] != capacity or found.dtype != dtype:
            raise EngineError(
                f"{each.name}: key_cache_0 is {found.dtype} {found.shape}, by config.json its capacity "
                f"is {capacity}, and {first.name} has {dtype}"
            )
    return LinearKVCache(
        device,
        kernels,
        layers=draft.num_layers,
        max_batch_size=config.max_supported_batch_size,
        kv_heads=draft.num_key_value_heads,
        capacity=capacity,
        head_dim=draft.head_dim,
        dtype=dtype,
    )


def make_recurrent_state(
    device: Device, kernels: Kernels, config: EngineConfig, executor: EngineExecutor, verifies: bool
) -> RecurrentState | None:
    """Make the state of recurrent layers; None if there are none.

    verifies: whether chains of drafted tokens are verified.
    """
    if config.llm.recurrent is None:
        return None
    return RecurrentState(
        device,
        kernels,
        config.llm.recurrent,
        max_batch_size=config.max_supported_batch_size,
        conv_dtype=executor.dtype(names.conv_state(0)),
        verifies=verifies,
    )
