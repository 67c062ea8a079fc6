# SPDX-License-Identifier: Apache-2.0
"""Computes the memory that an engine needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from edgellm_ros.builder.graph.graph import DTYPES, KV_CACHE_DTYPES
from edgellm_ros.builder.report.reports import AdapterReport, PartReport
from edgellm_ros.engine_directory.config import EngineConfig


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Memory in bytes."""

    weights: int
    embedding: int
    kv_cache_per_token: int
    kv_cache_per_sequence: int
    kv_cache: int  # `max_kv_cache_capacity` tokens for each of `max_batch_size` sequences
    state_per_sequence: int  # of the recurrent layers; 0 if there are none
    states: int  # of `max_batch_size` sequences, before and after a run
    draft_embedding: int  # the draft head's own table; 0 without
    draft_kv_cache: int  # of the draft head, for `max_batch_size` sequences; 0 without one
    prefix_cache: int  # by default as large as the KV rows and states of the batch
    total: int


def memory_report(config: EngineConfig, parts: Sequence[PartReport]) -> MemoryReport:
    """Compute the memory that an engine needs at its limits."""
    llm, builder = config.llm, config.builder
    itemsize = np.dtype(DTYPES[config.precision].numpy()).itemsize
    weights = sum(part.weight_bytes for part in parts)
    if config.policy is not None:  # the graph of the prefix has the embedding table
        return MemoryReport(
            weights=weights,
            embedding=0,
            kv_cache_per_token=0,
            kv_cache_per_sequence=0,
            kv_cache=0,
            state_per_sequence=0,
            states=0,
            draft_embedding=0,
            draft_kv_cache=0,
            prefix_cache=0,
            total=weights,
        )
    embedding = llm.vocab_size * llm.hidden_size * itemsize
    values = 2 * llm.num_attention_layers * llm.num_key_value_heads * llm.head_dim
    per_token = values * np.dtype(KV_CACHE_DTYPES[config.kv_cache_type].numpy()).itemsize
    per_sequence = per_token * builder.max_kv_cache_capacity
    cache = per_sequence * builder.max_batch_size
    state = llm.recurrent.bytes_per_sequence if llm.recurrent else 0
    states, prefixes = 2 * builder.max_batch_size * state, cache + builder.max_batch_size * state
    draft_embedding, draft_cache = _draft_memory(config, itemsize)
    total = weights + embedding + cache + states + draft_embedding + draft_cache + prefixes
    return MemoryReport(
        weights=weights,
        embedding=embedding,
        kv_cache_per_token=per_token,
        kv_cache_per_sequence=per_sequence,
        kv_cache=cache,
        state_per_sequence=state,
        states=states,
        draft_embedding=draft_embedding,
        draft_kv_cache=draft_cache,
        prefix_cache=prefixes,
        total=total,
    )


def _draft_memory(config: EngineConfig, itemsize: int) -> tuple[int, int]:
    """Compute the bytes of a draft head's own table of embeddings and its KV cache.

    Both are 0 without a head.
    """
    draft, builder = config.draft, config.builder
    if draft is None:
        return 0, 0
    table = 0 if draft.shares_embedding else config.llm.vocab_size * draft.hidden_size * itemsize
    rows = builder.max_batch_size * draft.cache_capacity(builder.max_kv_cache_capacity)
    per_row = 2 * draft.num_layers * draft.num_key_value_heads * draft.head_dim * itemsize
    return table, rows * per_row


def memory_rows(
    parts: Sequence[PartReport], adapters: Sequence[AdapterReport], memory: MemoryReport
) -> list[tuple[str, str]]:
    """Make the rows of a table about memory."""
    rows = [(f"weights of {part.name}", part.weight_bytes) for part in parts]
    rows += [(f"adapter {adapter.name}", adapter.bytes) for adapter in adapters]
    if not memory.kv_cache:  # a policy
        return size_rows([*rows, ("weights", memory.total)])
    rows += [
        ("embedding table", memory.embedding),
        ("KV cache of a token", memory.kv_cache_per_token),
        ("KV cache of a sequence", memory.kv_cache_per_sequence),
        ("KV cache", memory.kv_cache),
    ]
    if memory.states:
        rows += [
            ("recurrent state of a sequence", memory.state_per_sequence),
            ("recurrent states, before and after a run", memory.states),
        ]
    if memory.draft_embedding:
        rows.append(("embedding table of the draft head", memory.draft_embedding))
    if memory.draft_kv_cache:
        rows.append(("KV cache of the draft head", memory.draft_kv_cache))
    caches = "all caches" if memory.draft_kv_cache else "both caches"
    rows += [
        ("prefix cache", memory.prefix_cache),
        (f"weights, embedding, {'states, ' if memory.states else ''}{caches}", memory.total),
    ]
    return size_rows(rows)


def size_rows(rows: Iterable[tuple[str, int]]) -> list[tuple[str, str]]:
    """Format sizes in bytes."""
    return [(name, f"{size / 2**20:9.3f} MiB") for name, size in rows]
