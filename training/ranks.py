# SPDX-License-Identifier: Apache-2.0
"""One process per GPU, started by `torchrun`, and the communication between them.

Every process ("rank") makes its own samples and has the same weights; gradients are averaged after each
backward pass. Without torchrun there is one rank and no communication.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

MAX_RANKS = 64  # ranks, and seeds per --seed


@dataclass(frozen=True)
class Ranks:
    """Number of this process, and number of processes on this machine."""

    rank: int
    count: int

    @classmethod
    def here(cls) -> Ranks:
        """Read torchrun's environment.

        ValueError for several machines or more than MAX_RANKS ranks.
        """
        rank, count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if count > MAX_RANKS or count != int(os.environ.get("LOCAL_WORLD_SIZE", count)):
            raise ValueError(f"expected at most {MAX_RANKS} processes on one machine, got {count}")
        return cls(rank, count)

    @property
    def first(self) -> bool:
        """Return True in the process that prints, writes and scores."""
        return self.rank == 0

    def seed(self, seed: int) -> int:
        """Return a different seed in every rank."""
        return seed * MAX_RANKS + self.rank

    def connect(self) -> str:
        """Choose this rank's device ("cuda" or "cpu") and connect to the other ranks.

        Call it after all workers are forked.
        """
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda":
            torch.cuda.set_device(self.rank)
        if self.count > 1:
            dist.init_process_group("nccl" if device == "cuda" else "gloo")
        return device

    def agree(self, value: Any) -> Any:
        """Return the first rank's value in all ranks."""
        if self.count == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]

    def share(self, module: nn.Module) -> None:
        """Copy the first rank's weights to all ranks."""
        if self.count > 1:
            for parameter in module.parameters():
                dist.broadcast(parameter.data, 0)

    def average(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace gradients by their mean over the ranks."""
        if self.count == 1:
            return
        gradients = [parameter.grad for parameter in parameters]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        parts = (flat / self.count).split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_(gradients, [p.view_as(g) for p, g in zip(parts, gradients, strict=True)])

    def disconnect(self) -> None:
        """Disconnect from the other ranks."""
        if self.count > 1:
            dist.destroy_process_group()
