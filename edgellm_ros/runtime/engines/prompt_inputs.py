# SPDX-License-Identifier: Apache-2.0
"""PromptInputs: what a run on prompts reads on the device, besides embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.packed_arrays import Fields, PackedBuffer
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.runtime.adapters.lora import LoraAdapter


@dataclass(frozen=True)
class PromptRun:
    """A run of the engine on parts of prompts.

    Equal runs queue the same work, if the embeddings and `PromptInputs` have the same addresses.
    """

    tokens: int  # S: of each row, with padding
    rows: range  # of the batch, B in all
    adapters: tuple[LoraAdapter, ...]  # of each row; empty = the base model for all
    first: tuple[bool, ...]  # whether nothing is cached of a row
    continues: bool = False  # whether an earlier run has computed a part of some prompt
    ends: bool = True  # whether all prompts end in this run


@dataclass(frozen=True)
class PromptInputs:
    """Tensors of a run on B prompts, padded at the end to S tokens each."""

    positions: Tensor  # [B,3,S] float32
    new_tokens: Tensor  # [B] int64, without padding; 0 for a row that stays as it is
    last_token_ids: Tensor  # [B,1] int64: index of the last new token, 0 without one
    starts: Tensor  # [B] int64: KV rows before the run
    deltas: Tensor  # [B] float32: of RoPE, see `LinearKVCache.rope_deltas`

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> PromptInputs:
        """Take the tensors from those of a layout with `prompt_fields`."""
        return cls(*(tensors[field.name] for field in fields(cls)))


def prompt_fields(batch: int, tokens: int) -> Fields:
    """Return the arrays that `write_prompts` writes."""
    return {
        "positions": ((batch, 3, tokens), np.float32),
        "new_tokens": ((batch,), np.int64),
        "last_token_ids": ((batch, 1), np.int64),
        "starts": ((batch,), np.int64),
        "deltas": ((batch,), np.float32),
    }


def write_prompts(
    arrays: Mapping[str, np.ndarray],
    lengths: Sequence[int],
    positions: Sequence[np.ndarray],
    starts: Sequence[int],
    deltas: Sequence[float],
) -> None:
    """Write the arrays of `prompt_fields`.

    lengths [B]: new tokens of each row; positions: [3,n] float32 of each row, n <= S; starts, deltas [B].
    """
    arrays["new_tokens"][:] = lengths
    np.maximum(arrays["new_tokens"][:, None] - 1, 0, out=arrays["last_token_ids"])
    arrays["starts"][:] = starts
    arrays["deltas"][:] = deltas
    write_positions(arrays["positions"], positions)


def write_positions(out: np.ndarray, positions: Sequence[np.ndarray]) -> None:
    """Write positions [3,n] of each row to out [B,3,S], and zeros after them."""
    for row, given in zip(out, positions, strict=True):
        count = given.shape[1]
        row[:, :count] = given
        row[:, count:] = 0


def upload_prompts(
    device: Device, lengths: Sequence[int], positions: np.ndarray, starts: Sequence[int] = ()
) -> PromptInputs:
    """Upload the inputs of a run to new memory.

    lengths [B], positions [B,3,S] float32: see `write_prompts`; starts [B]: empty = zeros.
    """
    batch, _, tokens = positions.shape
    layout = prompt_fields(batch, tokens)
    packed = PackedBuffer(device, layout).layout(layout)
    write_prompts(packed.arrays, lengths, list(positions), starts or [0] * batch, [0] * batch)
    packed.upload()
    return PromptInputs.of(packed.tensors)
