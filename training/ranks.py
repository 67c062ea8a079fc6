# SPDX-License-Identifier: Apache-2.0
"""One process per GPU: what the processes that `torchrun` starts have to tell each other.

Every process ("rank") draws samples of its own and holds the same weights; after each backward pass the
gradients are averaged. Without torchrun there is one rank, and nothing is exchanged.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

MOST = 64  # ranks, and seeds per --seed


@dataclass(frozen=True)
class Ranks:
    """This process's number and how many there are, on this machine."""

    rank: int
    count: int

    @classmethod
    def here(cls) -> Ranks:
        """As torchrun's environment says. Raises ValueError beyond one machine or MOST ranks."""
        rank, count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if count > MOST or count != int(os.environ.get("LOCAL_WORLD_SIZE", count)):
            raise ValueError(f"{count} processes, expected at most {MOST}, all on one machine")
        return cls(rank, count)

    @property
    def first(self) -> bool:
        """True in the process that prints, writes and scores."""
        return self.rank == 0

    def seed(self, seed: int) -> int:
        """Another seed in every rank."""
        return seed * MOST + self.rank

    def connect(self) -> str:
        """Choose this rank's device, "cuda" or "cpu", and find the others. After all workers are forked."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda":
            torch.cuda.set_device(self.rank)
        if self.count > 1:
            dist.init_process_group("nccl" if device == "cuda" else "gloo")
        return device

    def agree(self, value: Any) -> Any:
        """The first rank's value, in all of them."""
        if self.count == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]

    def share(self, module: nn.Module) -> None:
        """Give all ranks the first one's weights."""
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

    def part(self) -> None:
        """The end, for all."""
        if self.count > 1:
            dist.destroy_process_group()
