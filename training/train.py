# SPDX-License-Identifier: Apache-2.0
"""Train the arena checkpoint from nothing: `python -m training.train --out models/arena`.

One model, two losses: the words of the answer (cross-entropy) and the velocity of the action flow (mean
squared error); the gradient of both reaches the vision tower. Samples come from worker processes and stay on
the GPU in a replay buffer, because drawing a scene costs more than a training step on it.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgellm_ros.arena.situation import situations
from training.checkpoint import new_thinker, save_checkpoint, thinker_config
from training.data import FIELDS, MAX_LENGTH, SampleStream
from training.evaluate import evaluate
from training.expert import ExpertDims, FlowExpert
from training.spec import ACTION_SPACE, HISTORY, SYSTEM_PROMPTS
from training.thinker import Sequences, ThinkerForward
from training.tokenizer import train_tokenizer

TEXT_VOCABULARY = 900
ANSWER_WINDOW = 96
FLOW_DRAWS = 2


def corpus(seed: int, count: int = 6000) -> list[str]:
    """Sentences to train the tokenizer on: commands and answers of situations, role names, system prompts."""
    drawn = list(itertools.islice(situations(seed, "train"), count))
    roles = ["system\n", "user\n", "assistant\n"] * count
    return [*(s.command.text for s in drawn), *(s.answer for s in drawn), *SYSTEM_PROMPTS * 50, *roles]


class ReplayBuffer:
    """The newest samples, on the device, drawn from uniformly."""

    def __init__(self, capacity: int, device: str):
        self.capacity, self.device, self.size, self._next = capacity, device, 0, 0
        as_torch = {
            np.uint8: torch.uint8,
            np.int16: torch.int16,
            np.bool_: torch.bool,
            np.float32: torch.float32,
        }
        self.fields = {
            name: torch.zeros(capacity, *shape, dtype=as_torch[dtype], device=device)
            for name, (shape, dtype) in FIELDS.items()
        }
        self.total = 0

    def add(self, chunk: dict[str, np.ndarray]) -> None:
        """Append a chunk, overwriting the oldest samples."""
        count = len(chunk["ids"])
        start = self._next if self._next + count <= self.capacity else 0
        for name, value in chunk.items():
            self.fields[name][start : start + count].copy_(torch.from_numpy(value))
        self._next = start + count
        self.size = max(self.size, self._next)
        self.total += count

    def draw(self, batch: int) -> dict[str, Tensor]:
        """A batch of samples, uniformly with replacement."""
        index = torch.randint(self.size, (batch,), device=self.device)
        return {name: value[index] for name, value in self.fields.items()}


class Policy(nn.Module):
    """Thinker and expert together."""

    def __init__(self, thinker: nn.Module, expert: FlowExpert, mean: Tensor, std: Tensor):
        super().__init__()
        self.thinker, self.expert = ThinkerForward(thinker), expert
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def prefix(self, batch: dict[str, Tensor]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Hidden states and cache of whole sequences."""
        sequences = Sequences(
            batch["ids"].long(), batch["position_ids"].movedim(1, 0), batch["image_start"].long()
        )
        return self.thinker(batch["image"], sequences)

    def velocity(self, x: Tensor, t: Tensor, cache: list, length: Tensor, rope_delta: Tensor) -> Tensor:
        """Velocity at x [B, T, 2], t [B], with the first `length` cache rows visible."""
        steps = torch.arange(x.shape[1], device=x.device)
        position = (rope_delta + length)[:, None] + steps
        cos, sin = self.thinker.rope(position.expand(3, -1, -1))
        capacity = cache[0][0].shape[2]
        seen = torch.arange(capacity, device=x.device) < length[:, None]
        mask = torch.cat((seen, seen.new_ones(x.shape[0], x.shape[1])), dim=1)[:, None, None]
        return self.expert(x, t, cache, mask.expand(-1, 1, x.shape[1], -1), cos, sin)

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(cross-entropy per answer token, mean squared velocity error)."""
        hidden, cache = self.prefix(batch)
        start, length = batch["prompt_length"].long(), batch["length"].long()
        window = start[:, None] + torch.arange(ANSWER_WINDOW, device=start.device)
        valid = window < length[:, None]
        window = window.clamp(max=MAX_LENGTH - 1)
        states = hidden.gather(1, (window - 1)[..., None].expand(-1, -1, hidden.shape[-1]))
        logits = self.thinker.thinker.lm_head(states)
        targets = batch["ids"].long().gather(1, window).masked_fill(~valid, -100)
        text = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100)

        actions = ((batch["actions"] - self.mean) / self.std).repeat_interleave(FLOW_DRAWS, 0)
        noise = torch.randn_like(actions)
        t = torch.rand(len(actions), device=actions.device)
        x = torch.lerp(noise, actions, t[:, None, None])
        cache = [(k.repeat_interleave(FLOW_DRAWS, 0), v.repeat_interleave(FLOW_DRAWS, 0)) for k, v in cache]
        repeat = lambda y: y.long().repeat_interleave(FLOW_DRAWS, 0)  # noqa: E731
        v = self.velocity(x, t, cache, repeat(length), repeat(batch["rope_delta"]))
        error = (v.float() - (actions - noise)).square().mean((1, 2))
        weight = batch["has_actions"].float().repeat_interleave(FLOW_DRAWS, 0)
        return text, (error * weight).sum() / weight.sum().clamp(min=1)


@dataclass(frozen=True)
class Schedule:
    """Learning rate over a time budget: linear warm-up, then cosine to a hundredth."""

    peak: float
    warmup_steps: int = 300

    def rate(self, step: int, progress: float) -> float:
        """Learning rate at `step`, when `progress` in [0, 1] of the time is spent."""
        cosine = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
        return self.peak * min(1.0, (step + 1) / self.warmup_steps) * cosine


def action_statistics(chunks: list[dict[str, np.ndarray]]) -> tuple[list[float], list[float]]:
    """Mean and standard deviation per action dimension, rounded so that they read well in the config."""
    actions = (
        np.concatenate([c["actions"][c["has_actions"]] for c in chunks]).reshape(-1, 2).astype(np.float64)
    )
    return np.round(actions.mean(0), 3).tolist(), np.round(actions.std(0), 3).tolist()


def optimizer_for(policy: Policy, rate: float, device: str) -> torch.optim.Optimizer:
    """AdamW; norms, biases and embeddings do not decay."""
    decay, keep = [], []
    for name, parameter in policy.named_parameters():
        (decay if parameter.ndim >= 2 and "embed" not in name else keep).append(parameter)
    groups = [{"params": decay, "weight_decay": 0.05}, {"params": keep, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=device == "cuda")


def main() -> None:
    """Train, print scores, write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="checkpoint directory to write")
    parser.add_argument("--minutes", type=float, default=17.0, help="wall-clock time for the optimisation")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--rate", type=float, default=1.2e-3, help="peak learning rate")
    parser.add_argument("--capacity", type=int, default=400_000, help="samples kept on the device")
    parser.add_argument("--first", type=int, default=16_384, help="samples to wait for before the first step")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-scenes", type=int, default=512)
    args = parser.parse_args()

    begin = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(corpus(args.seed), TEXT_VOCABULARY, HISTORY["num_tokens"])
    tokenizer_file = args.out / "tokenizer.json"
    tokenizer.save(str(tokenizer_file))
    stream = SampleStream(tokenizer_file, args.workers, seed=args.seed)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    buffer = ReplayBuffer(args.capacity, device)
    samples: list[dict[str, np.ndarray]] = []
    while buffer.total < args.first:
        for chunk in stream.take(wait=True):
            buffer.add(chunk)
            if len(samples) < 64:
                samples.append({k: chunk[k].copy() for k in ("actions", "has_actions")})
    mean, std = action_statistics(samples)
    action_space = {**ACTION_SPACE, "mean": mean, "std": std}
    waited = time.monotonic() - begin
    print(f"{buffer.total} samples after {waited:.0f} s; action mean {mean} std {std}", flush=True)

    thinker = new_thinker(thinker_config(tokenizer))
    policy = Policy(thinker, FlowExpert(ExpertDims()), torch.tensor(mean), torch.tensor(std)).to(device)
    average = copy.deepcopy(policy).requires_grad_(False)
    millions = sum(p.numel() for p in policy.parameters()) / 1e6
    print(f"{millions:.2f} M parameters, vocabulary {tokenizer.get_vocab_size()}", flush=True)
    schedule = Schedule(args.rate)
    optimizer = optimizer_for(policy, args.rate, device)
    train_begin, step, report = time.monotonic(), 0, time.monotonic()
    while (progress := (time.monotonic() - train_begin) / (60 * args.minutes)) < 1.0:
        for chunk in stream.take(wait=False):
            buffer.add(chunk)
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step, progress)
        with torch.autocast(device, dtype=torch.bfloat16):
            text, flow = policy.losses(buffer.draw(args.batch))
        optimizer.zero_grad(set_to_none=True)
        (text + flow).backward()
        norm = nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        decay = min(0.999, (step + 1) / (step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(policy.parameters()), 1 - decay)
        step += 1
        if time.monotonic() - report > 15:
            report = time.monotonic()
            print(
                f"{report - train_begin:6.0f} s  step {step:6d}  text {text.item():.4f}  "
                f"flow {flow.item():.4f}  norm {norm.item():.2f}  samples {buffer.total}",
                flush=True,
            )
    stream.close()
    minutes = (time.monotonic() - train_begin) / 60
    print(f"{step} steps, {buffer.total} samples, {minutes:.1f} minutes", flush=True)
    for parameter in average.parameters():  # the checkpoint is float16: score what is written
        parameter.data = parameter.data.half().float()
    written = copy.deepcopy(average).cpu()
    save_checkpoint(args.out, written.thinker.thinker, written.expert, tokenizer, action_space)
    print(f"written to {args.out} after {(time.monotonic() - begin) / 60:.1f} minutes in all", flush=True)
    for name, value in evaluate(average, tokenizer, args.eval_scenes, device).items():
        print(f"{name}: {value}", flush=True)


if __name__ == "__main__":
    main()
