# SPDX-License-Identifier: Apache-2.0
"""What the action expert sees of a chunk that it continues (real-time chunking).

Half of the trajectories begin with actions that are given, like those that a robot executes while the next
chunk is computed: they have no noise, their time is that of finished actions, and the loss is that of the
actions after them (arXiv 2512.05964). Most of the given actions are those of a driver who is mistaken about
the scene (mistakes.py), so that the model looks where they lead. The other half has none, so that the model
also learns to begin a chunk.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from training.mistakes import LONGEST

if TYPE_CHECKING:
    from training.policy import Batch, Policy

MISTAKEN = 0.7  # share of the given actions that are those of a mistaken driver, where there are some
SCORED_DELAYS = (0, 1, 4, 8, LONGEST)
SCORED_TIMES = 8  # of each situation


def sample_delays(count: int, device: torch.device, most: int = LONGEST) -> Tensor:
    """Sample numbers of given actions [count]: 0, or uniform from 1 to `most`.

    Half of them are 0.
    """
    delays = torch.randint(1, most + 1, (count,), device=device)
    return delays * (torch.rand(count, device=device) < 0.5)


def with_given_actions(batch: Batch, most: int = LONGEST) -> tuple[Batch, Tensor]:
    """Choose the actions of a batch, and how many are given [B], up to `most`.

    A share MISTAKEN of the rows with given actions take the continuation of a mistaken driver, where there is
    one, and the others the expert's own actions.
    """
    given = batch["given"].long()
    delays = sample_delays(len(given), given.device, most)
    change = (delays > 0) & (given > 0) & (given <= most)
    change &= torch.rand(len(delays), device=delays.device) < MISTAKEN
    actions = torch.where(change[:, None, None], batch["continued"], batch["actions"])
    return {**batch, "actions": actions}, torch.where(change, given, delays)


@torch.no_grad()
def flow_errors(policy: Policy, source: Iterable[Batch]) -> dict[str, float]:
    """Compute the mean flow loss of batches by the number of given actions.

    The noise is the same in every call. "mistaken" is the loss after the actions of a mistaken driver.
    """
    totals: dict[str, float] = {}
    count = 0
    for batch in source:
        _, cache = policy.thinker(policy.encode(batch))
        count += 1
        given = batch["given"].long()
        cases = {str(delay): (batch, torch.full_like(given, delay)) for delay in SCORED_DELAYS}
        continued = {"actions": batch["continued"], "has_actions": given > 0}
        cases["mistaken"] = ({**batch, **continued}, given)
        for name, (case, delay) in cases.items():
            torch.manual_seed(count)
            error = policy.flow_loss(case, cache, delay.repeat_interleave(SCORED_TIMES), SCORED_TIMES).item()
            totals[name] = totals.get(name, 0.0) + error
    return {name: total / count for name, total in totals.items()}
