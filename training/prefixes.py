# SPDX-License-Identifier: Apache-2.0
"""Teach the action expert of the demo checkpoint to continue a chunk of actions.

Everything but the expert is frozen. Half of the trajectories begin with actions that are given, like those
that a robot executes while the next chunk is computed: they have no noise, their time is that of finished
actions, and the loss is that of the actions after them (arXiv 2512.05964). The other half has none, so that
the expert also begins a chunk as before. It learns over the KV caches of the base model and of each adapter
in turn, on typed and spoken commands.

Examples
--------
    python -m training.prefixes --checkpoint models/arena
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from training.checkpoint import load_policy, save_expert
from training.data import SequenceWriter
from training.draft import BASE, Adapters, Workers
from training.evaluate import batches, respond, score, unseen_situations, write_clips, write_situations
from training.expert import FlowExpert
from training.policy import Policy
from training.styles import PLAIN, STYLES
from training.train import Samples, Schedule

SCORED_DELAYS = (0, 1, 4, 8, 16)  # as far as the expert learns them
SCORED_TIMES = 8  # of each situation


def sample_delays(count: int, most: int, device: torch.device) -> Tensor:
    """Sample the numbers of given actions: 0 for half of them, else uniformly from 1 to `most`."""
    delays = torch.randint(1, most + 1, (count,), device=device)
    return delays * (torch.rand(count, device=device) < 0.5)


def train_expert(
    args: argparse.Namespace, samples: dict[str, Samples], policy: Policy, adapters: Adapters
) -> FlowExpert:
    """Optimise the expert for the given time; return its averaged weights."""
    device = policy.mean.device
    schedule = Schedule(args.rate, warmup_steps=100)
    parameters = list(policy.expert.parameters())
    average = copy.deepcopy(policy.expert).requires_grad_(False)
    optimizer = torch.optim.AdamW(parameters, lr=args.rate, betas=(0.9, 0.98), weight_decay=0.0)
    spoken, names = round(args.batch * args.spoken), list(samples)
    begin, step, report = time.monotonic(), 0, time.monotonic()
    losses: dict[str, Tensor] = {}
    while (progress := (time.monotonic() - begin) / (60 * args.minutes)) < 1.0:
        name = names[step % len(names)]
        samples[name].refresh(most=1)
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step, progress)
        batch, _, _ = samples[name].sample(args.batch, spoken)
        adapters.use(name)
        delays = sample_delays(args.batch * args.times, args.max_delay, device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            with torch.no_grad():
                _, cache = policy.thinker(policy.encode(batch))
            losses[name] = policy.flow_loss(batch, cache, delays, args.times)
        optimizer.zero_grad(set_to_none=True)
        losses[name].backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        decay = min(0.999, (step + 1) / (step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), parameters, 1 - decay)
        step += 1
        if step == len(names) or time.monotonic() - report > 10:
            report = time.monotonic()
            parts = "  ".join(f"{part} {loss.item():.4f}" for part, loss in losses.items())
            total = sum(source.buffer.total for source in samples.values())
            print(f"{report - begin:6.0f} s  step {step:6d}  {parts}  situations {total}", flush=True)
    total = sum(source.buffer.total for source in samples.values())
    print(f"{step} steps of {args.batch}, {total} situations, {args.minutes:.1f} minutes", flush=True)
    return average


@torch.no_grad()
def flow_errors(policy: Policy, source, delays: tuple[int, ...]) -> dict[int, float]:
    """Compute the flow loss by the number of given actions, with the same noise in every call."""
    totals = dict.fromkeys(delays, 0.0)
    count = 0
    for batch in source:
        _, cache = policy.thinker(policy.encode(batch))
        rows, count = len(batch["ids"]), count + 1
        for delay in delays:
            torch.manual_seed(count)
            given = torch.full((rows * SCORED_TIMES,), delay, device=policy.mean.device)
            totals[delay] += policy.flow_loss(batch, cache, given, SCORED_TIMES).item()
    return {delay: total / count for delay, total in totals.items()}


def evaluate_experts(
    policy: Policy,
    adapters: Adapters,
    tokenizer: Tokenizer,
    count: int,
    delays: tuple[int, ...],
    experts: dict[str, FlowExpert],
) -> None:
    """Print scores of experts on `count` situations of the test split for the base model and each adapter."""
    writer, device = SequenceWriter(tokenizer), policy.mean.device.type
    for name in (BASE, *STYLES):
        style = STYLES.get(name, PLAIN)
        cases = unseen_situations(count, style)
        chunk, clips = write_situations(cases, writer), write_clips(cases, writer)
        adapters.use(name)
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="checkpoint whose expert is trained")
    parser.add_argument("--out", type=Path, help="folder for the expert (default: CHECKPOINT/action_expert)")
    parser.add_argument("--score", action="store_true", help="only score the checkpoint's expert")
    parser.add_argument(
        "--max-delay", type=int, default=16, help="most actions that are given (default: %(default)s)"
    )
    parser.add_argument(
        "--minutes", type=float, default=3.5, help="wall-clock time of the steps (default: %(default)s)"
    )
    parser.add_argument("--batch", type=int, default=256, help="batch size (default: %(default)s)")
    parser.add_argument(
        "--times", type=int, default=4, help="flow times of each situation in a step (default: %(default)s)"
    )
    parser.add_argument("--spoken", type=float, default=0.4, help="share of the batch that is spoken")
    parser.add_argument("--rate", type=float, default=4e-4, help="peak learning rate")
    parser.add_argument(
        "--capacity", type=int, default=60_000, help="situations on the device for each adapter"
    )
    parser.add_argument("--clips", type=int, default=20_000, help="sounds on the device")
    parser.add_argument(
        "--first", type=int, default=2048, help="situations per adapter to wait for before training"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=max(4, (os.cpu_count() or 2) - 1),
        help="worker processes (default: all cores but one)",
    )
    parser.add_argument("--speakers", type=float, default=0.2, help="share of the workers that make sounds")
    parser.add_argument("--seed", type=int, default=3, help="random seed (default: %(default)s)")
    parser.add_argument(
        "--eval-scenes", type=int, default=128, help="situations to score on (default: %(default)s)"
    )
    return parser.parse_args()


def main() -> None:
    """Train and save the expert; score it beside the one before."""
    args = arguments()
    out, begin = args.out or args.checkpoint / "action_expert", time.monotonic()
    tokenizer = Tokenizer.from_file(str(args.checkpoint / "tokenizer.json"))
    workers = None if args.score else Workers.start(args, tokenizer)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    policy = load_policy(args.checkpoint, tokenizer).requires_grad_(False)
    adapters = Adapters(policy, args.checkpoint / "lora", list(STYLES))
    policy.requires_grad_(False).to(device)
    experts = {"checkpoint": copy.deepcopy(policy.expert)}
    if workers is not None:
        samples = workers.samples(args, tokenizer, device)
        for source in samples.values():
            source.fill(args.first)
        print(f"first samples after {time.monotonic() - begin:.0f} s", flush=True)
        policy.expert.requires_grad_(True)
        policy.expert = train_expert(args, samples, policy, adapters)
        workers.close()
        policy.expert.dims = dataclasses.replace(policy.expert.dims, rtc_max_delay=args.max_delay)
        config = json.loads((args.checkpoint / "action_expert" / "config.json").read_text())
        save_expert(out, policy.expert, {**config, "rtc_max_delay": args.max_delay})
        print(f"written to {out} after {(time.monotonic() - begin) / 60:.1f} minutes in all", flush=True)
        for parameter in policy.expert.parameters():  # saved in float16: score the saved values
            parameter.data = parameter.data.half().float()
        experts["trained"] = policy.expert
    if args.eval_scenes > 0:
        delays = tuple(delay for delay in SCORED_DELAYS if delay <= args.max_delay)
        evaluate_experts(policy, adapters, tokenizer, args.eval_scenes, delays, experts)


if __name__ == "__main__":
    main()
