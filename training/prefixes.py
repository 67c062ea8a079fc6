# SPDX-License-Identifier: Apache-2.0
"""Teach the action expert of the demo checkpoint to continue a chunk of actions.

Everything but the expert is frozen. Half of the trajectories begin with actions that are given, like those
that a robot executes while the next chunk is computed: they have no noise, their time is that of finished
actions, and the loss is that of the actions after them (arXiv 2512.05964). Most of the given actions are
those of a driver who is mistaken about the scene (mistakes.py), so that the expert looks where they lead.
The other half has none, so that the expert also begins a chunk as before. It learns over the KV caches of the
base model and of each adapter in turn, on typed and spoken commands.

Examples
--------
    python -m training.prefixes --checkpoint models/arena
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from training.checkpoint import save_expert
from training.data import CONTINUED_FIELDS, SequenceWriter, write_continuation
from training.evaluate import (
    TEST_SEED,
    batches,
    respond,
    score,
    unseen_situations,
    write_clips,
    write_situations,
)
from training.expert import FlowExpert
from training.mistakes import LONGEST, continuations
from training.part import BASE, Frozen, part_parser
from training.policy import Batch, Policy
from training.stream import Chunk, new_chunk
from training.styles import PLAIN, STYLES

SCORED_DELAYS = (0, 1, 4, 8, 16)  # as far as the expert learns them
SCORED_TIMES = 8  # of each situation


def sample_delays(count: int, most: int, device: torch.device) -> Tensor:
    """Sample numbers of given actions: 0 for half, others uniform from 1 to `most`."""
    delays = torch.randint(1, most + 1, (count,), device=device)
    return delays * (torch.rand(count, device=device) < 0.5)


def with_prefixes(batch: Batch, most: int, mistaken: float) -> tuple[Batch, Tensor]:
    """Choose a batch's actions, and how many of them are given [B], up to `most`.

    The batch has B rows. A share `mistaken` of the rows with given actions take the continuation of a
    mistaken driver, where there is one, and the others the expert's own actions.
    """
    delays = sample_delays(len(batch["given"]), most, batch["given"].device)
    given = batch["given"].long()
    change = (delays > 0) & (given > 0) & (given <= most)
    change &= torch.rand(len(delays), device=delays.device) < mistaken
    actions = torch.where(change[:, None, None], batch["continued"], batch["actions"])
    return {**batch, "actions": actions}, torch.where(change, given, delays)


def train_expert(args: argparse.Namespace, frozen: Frozen) -> FlowExpert:
    """Optimise the expert for the given time; return its averaged weights."""
    policy, device = frozen.policy, frozen.device
    policy.expert.requires_grad_(True)
    parameters = list(policy.expert.parameters())
    average = copy.deepcopy(policy.expert).requires_grad_(False)

    def loss_of(batch: Batch) -> Tensor:
        batch, delays = with_prefixes(batch, args.max_delay, args.mistaken)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            with torch.no_grad():
                _, cache = policy.thinker(policy.encode(batch))
            return policy.flow_loss(batch, cache, delays.repeat_interleave(args.times), args.times)

    @torch.no_grad()
    def take_average(step: int) -> None:
        decay = min(0.999, (step + 1) / (step + 10))
        torch._foreach_lerp_(list(average.parameters()), parameters, 1 - decay)

    frozen.optimise(args, parameters, loss_of, weight_decay=0.0, clip=1.0, after=take_average)
    return average


@torch.no_grad()
def flow_errors(policy: Policy, source: Iterable[Batch], delays: tuple[int, ...]) -> dict[str, float]:
    """Compute the flow loss by the number of given actions.

    The noise is the same in every call. "mistaken" is that after the actions of a mistaken driver.
    """
    totals: dict[str, float] = {}
    count = 0
    for batch in source:
        _, cache = policy.thinker(policy.encode(batch))
        count += 1
        given = batch["given"].long()
        cases = {str(delay): (batch, torch.full_like(given, delay)) for delay in delays}
        continued = {"actions": batch["continued"], "has_actions": given > 0}
        cases["mistaken"] = ({**batch, **continued}, given)
        for name, (case, delay) in cases.items():
            torch.manual_seed(count)
            error = policy.flow_loss(case, cache, delay.repeat_interleave(SCORED_TIMES), SCORED_TIMES).item()
            totals[name] = totals.get(name, 0.0) + error
    return {name: total / count for name, total in totals.items()}


def unseen_chunk(cases, writer: SequenceWriter, style) -> Chunk:
    """Write situations with their continuations."""
    chunk = {**new_chunk(CONTINUED_FIELDS, len(cases)), **write_situations(cases, writer)}
    made = continuations(np.random.default_rng(TEST_SEED), cases, style.manner)
    for i, continuation in enumerate(made):
        write_continuation(chunk, i, continuation)
    return chunk


def evaluate_experts(
    frozen: Frozen, count: int, delays: tuple[int, ...], experts: dict[str, FlowExpert]
) -> None:
    """Print scores of experts for the base model and each adapter.

    They are scored on `count` situations of the test split.
    """
    policy, tokenizer, device = frozen.policy, frozen.tokenizer, frozen.device
    writer = SequenceWriter(tokenizer)
    for name in (BASE, *STYLES):
        style = STYLES.get(name, PLAIN)
        cases = unseen_situations(count, style)
        chunk, clips = unseen_chunk(cases, writer, style), write_clips(cases, writer)
        frozen.adapters.use(name)
        for expert, policy.expert in experts.items():
            for way, sounds in (("typed", None), ("spoken", clips)):
                errors = flow_errors(policy, batches(chunk, sounds, tokenizer, device), delays)
                parts = ", ".join(f"{delay}: {error:.4f}" for delay, error in errors.items())
                print(f"{expert}, {name}, {way}: flow loss by given actions: {parts}", flush=True)
            for line, value in score(cases, respond(policy, chunk, None, tokenizer, device), style).items():
                if "path" in line:
                    print(f"{expert}, {name}, typed: {line}: {value}", flush=True)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = part_parser(
        __doc__, minutes=4.5, rate=4e-4, capacity=60_000, clips=20_000, first=2048, seed=3, scenes=128
    )
    parser.add_argument("--out", type=Path, help="folder for the expert (default: CHECKPOINT/action_expert)")
    parser.add_argument(
        "--max-delay", type=int, default=16, help="most actions that are given (default: %(default)s)"
    )
    parser.add_argument(
        "--times", type=int, default=4, help="flow times of each situation in a step (default: %(default)s)"
    )
    parser.add_argument(
        "--mistaken",
        type=float,
        default=0.7,
        help=f"share of given actions of a mistaken driver, who gives up to {LONGEST} (default: %(default)s)",
    )
    return parser.parse_args()


def main() -> None:
    """Train and save the expert; score it beside the one before."""
    args = arguments()
    out = args.out or args.checkpoint / "action_expert"
    frozen = Frozen.open(args, with_continuations=True)
    policy = frozen.policy
    experts = {"checkpoint": copy.deepcopy(policy.expert)}
    if not args.score:
        policy.expert = train_expert(args, frozen)
        policy.expert.dims = dataclasses.replace(policy.expert.dims, rtc_max_delay=args.max_delay)
        config = json.loads((args.checkpoint / "action_expert" / "config.json").read_text())
        save_expert(out, policy.expert, {**config, "rtc_max_delay": args.max_delay})
        frozen.written(out)
        for parameter in policy.expert.parameters():  # saved in float16: score the saved values
            parameter.data = parameter.data.half().float()
        experts["trained"] = policy.expert
    if args.eval_scenes > 0:
        delays = tuple(delay for delay in SCORED_DELAYS if delay <= args.max_delay)
        evaluate_experts(frozen, args.eval_scenes, delays, experts)


if __name__ == "__main__":
    main()
