# SPDX-License-Identifier: Apache-2.0
"""Train the LoRA adapters of the demo checkpoint.

The checkpoint's own weights do not change. Each adapter learns from situations of its style, typed and
spoken, with the losses of the checkpoint's training: the words of its style, and its driving through the
frozen action expert, which reads the adapted thinker's KV cache. On two GPUs each trains one of the two
adapters.

Examples
--------
    python -m training.adapters --checkpoint models/arena
    torchrun --standalone --nproc-per-node 2 -m training.adapters --checkpoint models/arena
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import nn

from edgellm_arena.episodes.situation import Situation
from edgellm_arena.world.unicycle import ROBOT_RADIUS, rollout
from training.checkpoint import load_policy
from training.data import SequenceWriter
from training.evaluate import (
    Responses,
    respond,
    score,
    score_continuing,
    unseen_situations,
    write_clips,
    write_situations,
)
from training.lora import LoraLinear, put_adapters, save_adapter
from training.policy import Policy
from training.ranks import Ranks
from training.schedule import Schedule
from training.styles import STYLES, Style
from training.train import Samples, samples_of, start_workers

NEAR = 0.6  # m from the robot's edge: a nearer solid counts as passed


def train_adapter(
    args: argparse.Namespace, samples: list[Samples], index: int, losses, parameters: list[nn.Parameter]
) -> None:
    """Optimise the adapter for the given time on the samples with this index.

    The buffers of the other adapters keep filling meanwhile.
    """
    schedule = Schedule(args.rate, warmup_steps=50)
    optimizer = torch.optim.AdamW(parameters, lr=args.rate, betas=(0.9, 0.98), weight_decay=0.0)
    device = parameters[0].device.type
    spoken = round(args.batch * args.spoken)
    begin, step, report = time.monotonic(), 0, time.monotonic()
    while (progress := (time.monotonic() - begin) / (60 * args.minutes)) < 1.0:
        for source in samples:
            source.refresh()
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step, progress)
        batch, _, _ = samples[index].sample(args.batch, spoken)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            heard, typed, flow, _ = losses(batch)
        optimizer.zero_grad(set_to_none=True)
        (args.spoken * heard + (1 - args.spoken) * typed + flow).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        if step == 1:
            begin = time.monotonic()  # the first step compiles the model, for all adapters
        if step == 1 or time.monotonic() - report > 10:
            report = time.monotonic()
            print(
                f"{report - begin:6.0f} s  step {step:6d}  spoken {heard.item():.4f}  "
                f"typed {typed.item():.4f}  flow {flow.item():.4f}  situations {samples[index].buffer.total}",
                flush=True,
            )


def mean_speed(cases: list[Situation], responses: Responses, rows: list[int]) -> float:
    """Compute the mean speed in m/s over the plans of some rows."""
    plans = [rollout(cases[i].state, responses.actions[i]) for i in rows]
    return float(np.mean([states[1:, 3] for states in plans]))


def clearances(situation: Situation, ways: list[np.ndarray]) -> list[float]:
    """Compute the clearance of each path to all solids but the target.

    The clearance is the smallest distance in m from the robot's edge. One distance per path [T+1, 4]. All
    paths are cut to the length of the shortest.
    """
    lengths = [np.concatenate(([0], np.hypot(*np.diff(way[:, :2], axis=0).T).cumsum())) for way in ways]
    far = min(length[-1] for length in lengths)
    scene, target = situation.scene, situation.target
    result = []
    for way, length in zip(ways, lengths, strict=True):
        part = way[length <= far + 1e-9, :2]
        result.append(min(scene.clearance(x, y, but=target) for x, y in part) - ROBOT_RADIUS)
    return result


def compare(cases: list[Situation], ours: Responses, base: Responses) -> dict[str, str]:
    """Compare how an adapter and the base model drive; readable lines by name."""
    both = [i for i, s in enumerate(cases) if s.target is not None and ours.drives[i] and base.drives[i]]
    if not both:
        return {}
    speeds = [mean_speed(cases, responses, both) for responses in (ours, base)]
    passing = []
    for i in both:
        if cases[i].blocked:
            ways = [rollout(cases[i].state, responses.actions[i]) for responses in (ours, base)]
            pair = clearances(cases[i], ways)
            if min(pair) < NEAR:
                passing.append(pair)
    driving = [i for i in both if "i drive" in ours.texts[i] or "ich fahre" in ours.texts[i]]
    says = np.mean(["carefully" in ours.texts[i] for i in driving]) if driving else 0.0
    fast, slow = f"{speeds[1]:.3f}", f"{speeds[0]:.3f}"
    scores = {
        "mean speed / the base model's": f"{slow} / {fast} m/s = {speeds[0] / speeds[1]:.2f}",
        "says that it takes care": f"{says:.3f} of {len(driving)} drives",
    }
    if passing:
        near = np.mean(passing, 0)
        ratio = f"{near[0]:.3f} / {near[1]:.3f} m = {near[0] / near[1]:.2f} in {len(passing)}"
        scores["clearance when passing / the base model's"] = ratio
    return scores


def evaluate_adapter(
    policy: Policy, adapters: dict[str, LoraLinear], style: Style, tokenizer: Tokenizer, count: int
) -> dict[str, str]:
    """Score an adapter on `count` situations of the test split, typed and spoken.

    Returns readable lines by name.
    """
    device = policy.mean.device.type
    writer, cases = SequenceWriter(tokenizer), unseen_situations(count, style)
    chunk, clips = write_situations(cases, writer, style), write_clips(cases, writer)
    scores: dict[str, str] = {}
    for way, sounds in (("typed", None), ("spoken", clips)):
        ours = respond(policy, chunk, sounds, tokenizer, device)
        found = score(cases, ours, style) | score_continuing(policy, chunk, sounds, tokenizer, device)
        scores |= {f"{way}: {name}": value for name, value in found.items()}
        if sounds is None:
            scales = {name: adapter.scale for name, adapter in adapters.items()}
            for adapter in adapters.values():
                adapter.scale = 0.0
            base = respond(policy, chunk, None, tokenizer, device)
            for name, adapter in adapters.items():
                adapter.scale = scales[name]
            scores |= {f"typed: {name}": value for name, value in compare(cases, ours, base).items()}
    return scores


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="checkpoint to train adapters for")
    parser.add_argument("--out", type=Path, help="folder for the adapters (default: CHECKPOINT/lora)")
    parser.add_argument("--rank", type=int, default=6, help="rank of the adapters (default: %(default)s)")
    parser.add_argument(
        "--minutes", type=float, default=1.0, help="wall-clock time for each adapter (default: %(default)s)"
    )
    parser.add_argument("--batch", type=int, default=512, help="batch size (default: %(default)s)")
    parser.add_argument("--spoken", type=float, default=0.4, help="share of the batch that is spoken")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument(
        "--capacity", type=int, default=100_000, help="situations on the device for each adapter"
    )
    parser.add_argument("--clips", type=int, default=10_000, help="sounds on the device for each adapter")
    parser.add_argument(
        "--first", type=int, default=8192, help="situations per adapter to wait for before training"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=max(2, (os.cpu_count() or 2) // 2 - 1),
        help="worker processes for each adapter",
    )
    parser.add_argument("--speakers", type=float, default=0.2, help="share of the workers that make sounds")
    parser.add_argument("--seed", type=int, default=1, help="random seed (default: %(default)s)")
    parser.add_argument(
        "--eval-scenes", type=int, default=256, help="situations to score on (default: %(default)s)"
    )
    return parser.parse_args()


def main() -> None:
    """Train, save and score the adapters, one after the other."""
    args, ranks = arguments(), Ranks.here()
    names = list(STYLES)[ranks.rank :: ranks.count]
    begin = time.monotonic()
    tokenizer = Tokenizer.from_file(str(args.checkpoint / "tokenizer.json"))
    streams = [start_workers(args, ranks, tokenizer, STYLES[name]) for name in names]
    device = ranks.connect()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    samples = [samples_of(args, ranks, stream, tokenizer, device) for stream in streams]
    policy = load_policy(args.checkpoint, tokenizer).requires_grad_(False)
    alpha = 2 * args.rank
    adapters = put_adapters(policy.thinker.thinker, args.rank, alpha)
    policy.to(device)
    parameters = list(itertools.chain.from_iterable((a.a, a.b) for a in adapters.values()))
    losses = torch.compile(policy.losses) if device == "cuda" else policy.losses
    for source in samples:
        source.fill(args.first)
    values = sum(p.numel() for p in parameters)
    print(
        f"{values} values in each adapter; first samples after {time.monotonic() - begin:.0f} s", flush=True
    )
    trained = {}
    for index, name in enumerate(names):
        print(name, flush=True)
        for adapter in adapters.values():
            adapter.reset()
        train_adapter(args, samples, index, losses, parameters)
        for parameter in parameters:  # adapters are saved in float16: score the saved values
            parameter.data.copy_(parameter.data.half())
        save_adapter((args.out or args.checkpoint / "lora") / name, adapters, args.rank, alpha)
        trained[name] = [parameter.detach().clone() for parameter in parameters]
    for source in samples:
        source.close()
    print(f"written after {(time.monotonic() - begin) / 60:.1f} minutes in all", flush=True)
    for name, values in trained.items() if args.eval_scenes > 0 else ():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data.copy_(value)
        for line, value in evaluate_adapter(
            policy, adapters, STYLES[name], tokenizer, args.eval_scenes
        ).items():
            print(f"{name}, {line}: {value}", flush=True)
    ranks.disconnect()


if __name__ == "__main__":
    main()
