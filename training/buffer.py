# SPDX-License-Identifier: Apache-2.0
"""Training samples on the device: situations, and clips to play in them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from training.data import FIELDS, MAX_LENGTH
from training.hearing import LogMel, token_count
from training.policy import Batch
from training.speech import CLIP_CHUNK, CLIP_FIELDS, meaning_shares
from training.stream import Chunk, Fields
from training.transfer import to_device

_AS_TORCH = {
    np.uint8: torch.uint8,
    np.int16: torch.int16,
    np.int32: torch.int32,
    np.bool_: torch.bool,
    np.float32: torch.float32,
}


def _storage(fields: Fields, capacity: int, device: str) -> dict[str, Tensor]:
    return {
        name: torch.zeros(capacity, *shape, dtype=_AS_TORCH[dtype], device=device)
        for name, (shape, dtype) in fields.items()
    }


class ReplayBuffer:
    """The newest samples, sampled uniformly: situations, or rows of other fields.

    host: fields that are also kept on the host. Of situations that is the meaning, by which clips are
    selected.
    """

    def __init__(
        self, capacity: int, device: str, fields: Fields = FIELDS, host: tuple[str, ...] = ("meaning",)
    ):
        self.capacity, self.device, self.size, self._next, self.total = capacity, device, 0, 0, 0
        self._fields = _storage(fields, capacity, device)
        self._host = {name: np.zeros((capacity, *fields[name][0]), np.int64) for name in host}

    def add(self, chunk: Chunk) -> None:
        """Append a chunk; the oldest samples are overwritten."""
        count = len(next(iter(chunk.values())))
        start = self._next if self._next + count <= self.capacity else 0
        for name, value in chunk.items():
            self._fields[name][start : start + count] = to_device(value, self.device)
        for name, kept in self._host.items():
            kept[start : start + count] = chunk[name]
        self._next = start + count
        self.size = max(self.size, self._next)
        self.total += count

    def rows(self) -> Batch:
        """Return all rows that are there, not copied."""
        return {name: value[: self.size] for name, value in self._fields.items()}

    def sample(self, rng: np.random.Generator, count: int) -> tuple[Batch, Chunk]:
        """Sample a batch uniformly with replacement.

        Also returns its fields on the host, as int64.
        """
        rows = rng.integers(self.size, size=count)
        index = to_device(rows, self.device)
        batch = {name: value[index] for name, value in self._fields.items()}
        return batch, {name: value[rows] for name, value in self._host.items()}


class ClipBank:
    """The newest clips of each meaning.

    Frequent meanings have more room; each meaning has room for a whole chunk.
    """

    def __init__(self, capacity: int, device: str):
        share = np.maximum(CLIP_CHUNK, (meaning_shares() * capacity).astype(np.int64))
        self._first = np.concatenate(([0], np.cumsum(share)[:-1]))
        self._room, self.device, self.total = share, device, 0
        self._size, self._next = np.zeros_like(share), np.zeros_like(share)
        self._fields = _storage(CLIP_FIELDS, int(share.sum()), device)
        self._count = np.zeros(int(share.sum()), np.int64)
        self._word_count = np.zeros(int(share.sum()), np.int64)

    @property
    def ready(self) -> bool:
        """Return True once there is a clip of every meaning."""
        return bool((self._size > 0).all())

    def add(self, chunk: Chunk) -> None:
        """Add a chunk; it replaces the oldest clips of the same meanings."""
        if len(chunk["meaning"]) > CLIP_CHUNK:
            raise ValueError(f"expected a chunk of at most {CLIP_CHUNK} clips, got {len(chunk['meaning'])}")
        rows = np.zeros(len(chunk["meaning"]), np.int64)
        for i, meaning in enumerate(chunk["meaning"]):
            rows[i] = self._first[meaning] + self._next[meaning]
            self._next[meaning] = (self._next[meaning] + 1) % self._room[meaning]
            self._size[meaning] = min(self._size[meaning] + 1, self._room[meaning])
        index = to_device(rows, self.device)
        for name, value in chunk.items():
            self._fields[name][index] = to_device(value, self.device)
        self._count[rows], self._word_count[rows] = chunk["count"], chunk["word_count"]
        self.total += len(rows)

    def sample(self, rng: np.random.Generator, meanings: np.ndarray) -> tuple[Batch, Batch]:
        """Sample a clip for each meaning.

        Returns rows of CLIP_FIELDS on the device, and count and word_count on the host too.
        """
        rows = self._first[meanings] + rng.integers(self._size[meanings])
        index = to_device(rows, self.device)
        host = {
            "count": torch.from_numpy(self._count[rows]),
            "word_count": torch.from_numpy(self._word_count[rows]),
        }
        return {name: value[index] for name, value in self._fields.items()}, host


def say_commands(
    batch: Batch, samples: Tensor, count: Tensor, log_mel: LogMel, marks: tuple[int, int, int]
) -> None:
    """Replace the typed commands of the batch's first S rows by sounds.

    samples: [S, N] int16, of which count [S] are valid. marks: ids of audio start, pad and end. `ids`,
    `prompt_length` and `length` of the batch change. The batch gets `features` [S, 128, F], `audio_start` and
    `audio_tokens` [S].
    """
    tokens = token_count(count)
    said = slice(len(tokens))
    ids = batch["ids"][said].long()
    start, length = (batch[name][said].long() for name in ("command_start", "command_length"))
    longer = tokens + 2 - length
    if ids.shape[1] != MAX_LENGTH:
        raise ValueError(f"ids must have {MAX_LENGTH} columns, got {ids.shape[1]}")
    column = torch.arange(MAX_LENGTH, device=ids.device)
    inside = column - start[:, None]
    before, end = inside < 0, inside - tokens[:, None] - 1
    source = torch.where(before, column, column - longer[:, None]).clamp(0, MAX_LENGTH - 1)
    moved = ids.gather(1, source)
    moved = torch.where((inside > 0) & (end < 0), marks[1], moved)
    moved = torch.where(inside == 0, marks[0], moved)
    moved = torch.where(end == 0, marks[2], moved)
    batch["ids"][said] = moved.to(batch["ids"].dtype)
    for name in ("prompt_length", "length"):
        batch[name][said] += longer.to(batch[name].dtype)
    batch["features"] = log_mel(samples, count)
    batch["audio_start"], batch["audio_tokens"] = start + 1, tokens


def audio_marks(token_to_id) -> tuple[int, int, int]:
    """Return the ids of audio start, pad and end."""
    return tuple(token_to_id(name) for name in ("<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"))
