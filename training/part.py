# SPDX-License-Identifier: Apache-2.0
"""Train a part of a finished checkpoint over its frozen base model and adapters.

A step takes a batch of the base model or of one of its adapters, in turn, so one part serves all of them.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from training.buffer import ClipBank, ReplayBuffer, audio_marks
from training.checkpoint import load_policy
from training.data import FIELDS, situation_writers
from training.hearing import LogMel
from training.lora import adapter_rank, load_adapter, put_adapters
from training.policy import Batch, Policy
from training.schedule import Schedule
from training.speech import CLIP_CHUNK, CLIP_FIELDS, clip_writers
from training.stream import CHUNK, SampleStream, slots_for
from training.styles import STYLES, Style
from training.train import Samples

BASE = "base"


def part_parser(
    description: str | None,
    minutes: float,
    rate: float,
    capacity: int,
    clips: int,
    first: int,
    seed: int,
    scenes: int,
) -> argparse.ArgumentParser:
    """Make a command line with the options of every part and the given defaults."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, help="checkpoint whose part is trained")
    add("--score", action="store_true", help="only score the part that is there")
    add(
        "--minutes",
        type=float,
        default=minutes,
        help="wall-clock time of the steps (default: %(default)s)",
    )
    add("--batch", type=int, default=256, help="batch size (default: %(default)s)")
    add("--spoken", type=float, default=0.4, help="share of the batch that is spoken (default: %(default)s)")
    add("--rate", type=float, default=rate, help="peak learning rate (default: %(default)s)")
    add(
        "--capacity",
        type=int,
        default=capacity,
        help="situations on the device for each adapter (default: %(default)s)",
    )
    add("--clips", type=int, default=clips, help="sounds on the device (default: %(default)s)")
    add(
        "--first",
        type=int,
        default=first,
        help="situations per adapter to wait for before training (default: %(default)s)",
    )
    add(
        "--workers",
        type=int,
        default=max(4, (os.cpu_count() or 2) - 1),
        help="worker processes (default: all cores but one)",
    )
    add("--speakers", type=float, default=0.2, help="share of the workers that make sounds")
    add("--seed", type=int, default=seed, help="random seed (default: %(default)s)")
    add(
        "--eval-scenes",
        type=int,
        default=scenes,
        help="situations to score on (default: %(default)s)",
    )
    return parser


class Adapters:
    """The base model's adapters, one of which (or none) has an effect."""

    def __init__(self, policy: Policy, folder: Path, names: list[str]):
        rank, alpha = adapter_rank(folder / names[0])
        self._adapters = put_adapters(policy.thinker.thinker, rank, alpha)
        self._weights = {BASE: self._copy()}  # new adapters have no effect
        for name in names:
            load_adapter(folder / name, self._adapters)
            self._weights[name] = self._copy()
        self.use(BASE)

    def _parameters(self) -> list[Tensor]:
        return [value.data for a in self._adapters.values() for value in (a.a, a.b)]

    def _copy(self) -> list[Tensor]:
        return [value.clone() for value in self._parameters()]

    def use(self, name: str) -> None:
        """Let an adapter have its effect; BASE for none."""
        parameters = self._parameters()
        if self._weights[name][0].device != parameters[0].device:
            self._weights[name] = [value.to(parameters[0].device) for value in self._weights[name]]
        torch._foreach_copy_(parameters, self._weights[name])


@dataclass(frozen=True)
class Workers:
    """The workers that make situations and recordings.

    Situations are made for the base model and each adapter, recordings for all of them.
    """

    situations: dict[str, SampleStream]
    clips: SampleStream

    @classmethod
    def start(cls, args: argparse.Namespace, tokenizer: Tokenizer) -> Workers:
        """Start about --workers workers, before any threads exist.

        A share --speakers makes recordings.
        """
        styles: dict[str, Style | None] = {BASE: None, **STYLES}
        speaking = max(1, round(args.workers * args.speakers))
        drawing = max(1, (args.workers - speaking) // len(styles))
        said, drawn = slots_for(args.clips, 64, CLIP_CHUNK), slots_for(args.capacity, 96)
        clips = SampleStream(CLIP_FIELDS, clip_writers(tokenizer), speaking, CLIP_CHUNK, said, args.seed)
        streams = {}
        for i, (name, style) in enumerate(styles.items()):
            writers = situation_writers(tokenizer, style)
            streams[name] = SampleStream(FIELDS, writers, drawing, CHUNK, drawn, args.seed + i)
        return cls(streams, clips)

    def samples(self, args: argparse.Namespace, tokenizer: Tokenizer, device: str) -> dict[str, Samples]:
        """Allocate the buffers on the device."""
        bank, log_mel = ClipBank(args.clips, device), LogMel().to(device)
        marks, rng = audio_marks(tokenizer.token_to_id), np.random.default_rng(args.seed)
        return {
            name: Samples(stream, self.clips, ReplayBuffer(args.capacity, device), bank, log_mel, marks, rng)
            for name, stream in self.situations.items()
        }

    def close(self) -> None:
        """Stop the workers."""
        for stream in (*self.situations.values(), self.clips):
            stream.close()


@dataclass(frozen=True)
class Frozen:
    """The checkpoint, frozen, and the samples of the base model and each adapter."""

    policy: Policy
    adapters: Adapters
    tokenizer: Tokenizer
    device: str
    begin: float  # time.monotonic() at the start
    workers: Workers | None  # None = the part is only scored
    samples: dict[str, Samples]  # empty without workers

    @classmethod
    def open(cls, args: argparse.Namespace) -> Frozen:
        """Start the workers, load the checkpoint and wait for the first situations.

        Situations are --first of the base model and of each adapter. With --score there are no workers.
        """
        begin = time.monotonic()
        tokenizer = Tokenizer.from_file(str(args.checkpoint / "tokenizer.json"))
        workers = None if args.score else Workers.start(args, tokenizer)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        policy = load_policy(args.checkpoint, tokenizer)
        adapters = Adapters(policy, args.checkpoint / "lora", list(STYLES))
        policy.requires_grad_(False).to(device)
        samples = {} if workers is None else workers.samples(args, tokenizer, device)
        for source in samples.values():
            source.fill(args.first)
        if samples:
            print(f"first samples after {time.monotonic() - begin:.0f} s", flush=True)
        return cls(policy, adapters, tokenizer, device, begin, workers, samples)

    def optimise(
        self,
        args: argparse.Namespace,
        parameters: list[nn.Parameter],
        loss_of: Callable[[Batch], Tensor],
        weight_decay: float,
        clip: float,
    ) -> None:
        """Optimise the parameters for --minutes, then stop the workers.

        loss_of: the loss of a batch, with its adapter in use. clip: the largest norm of a
        gradient.
        """
        schedule = Schedule(args.rate, warmup_steps=100)
        optimizer = torch.optim.AdamW(parameters, lr=args.rate, betas=(0.9, 0.98), weight_decay=weight_decay)
        spoken, names = round(args.batch * args.spoken), list(self.samples)
        begin, step, report = time.monotonic(), 0, time.monotonic()
        losses: dict[str, Tensor] = {}
        while (progress := (time.monotonic() - begin) / (60 * args.minutes)) < 1.0:
            name = names[step % len(names)]
            self.samples[name].refresh(most=1)
            for group in optimizer.param_groups:
                group["lr"] = schedule.rate(step, progress)
            batch, _, _ = self.samples[name].sample(args.batch, spoken)
            self.adapters.use(name)
            losses[name] = loss_of(batch)
            optimizer.zero_grad(set_to_none=True)
            losses[name].backward()
            nn.utils.clip_grad_norm_(parameters, clip)
            optimizer.step()
            step += 1
            if step == len(names) or time.monotonic() - report > 10:
                report = time.monotonic()
                parts = "  ".join(f"{part} {loss.item():.4f}" for part, loss in losses.items())
                made = f"situations {self.made}"
                print(f"{report - begin:6.0f} s  step {step:6d}  {parts}  {made}", flush=True)
        print(f"{step} steps of {args.batch}, {self.made} situations, {args.minutes:.1f} minutes", flush=True)
        if self.workers is not None:
            self.workers.close()

    @property
    def made(self) -> int:
        """Return the number of situations that the workers have made."""
        return sum(source.buffer.total for source in self.samples.values())

    def written(self, out: Path) -> None:
        """Print where the part was written, and the time since the start."""
        print(f"written to {out} after {(time.monotonic() - self.begin) / 60:.1f} minutes in all", flush=True)
