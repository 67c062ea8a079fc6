# SPDX-License-Identifier: Apache-2.0
"""Train the demo checkpoint from random weights.

One model has three losses: the words of the answer (cross-entropy), the velocity of the action flow (mean
squared error), and the words that the audio tower hears (CTC). Gradients of the first two reach the vision
and the audio tower. Half of the trajectories continue actions that are given (continuing.py). Worker
processes make the samples, which stay on the GPU; situations and sounds are separate, because making a scene
costs more than a training step on it. With several GPUs, each has its own workers, samples and batches.

Examples
--------
    python -m training.train --out models/arena
    torchrun --standalone --nproc-per-node 2 -m training.train --out models/arena
    python -m training.train --init models/arena --out models/arena --rate 5e-4 --ctc 0
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from training.average import update_average
from training.buffer import ClipBank, ReplayBuffer, audio_marks, say_commands
from training.checkpoint import load_policy, new_thinker, round_to_saved, save_checkpoint, thinker_config
from training.data import FIELDS, situation_writers
from training.evaluate import evaluate
from training.expert import ExpertDims, FlowExpert
from training.hearing import LogMel, WordHead, ctc_loss, token_count, vary
from training.mistakes import LONGEST
from training.policy import Batch, Policy
from training.ranks import Ranks
from training.schedule import Schedule
from training.spec import ACTION_SPACE, HISTORY
from training.speech import CLIP_CHUNK, CLIP_FIELDS, clip_writers
from training.stream import Chunk, SampleStream, slots_for
from training.styles import Style
from training.tokenizer import PAD, corpus, train_tokenizer
from training.transfer import to_device

TEXT_VOCABULARY = 900
TIME_EVERY = 10  # steps between two readings of the clock, which is also read at each of the first ones


def action_space_of(args: argparse.Namespace, chunks: list[Chunk]) -> dict:
    """Return the action space with mean and standard deviation per dimension.

    The values are rounded for a readable config. With --init, the action space is that of the checkpoint.
    """
    if args.init:
        return json.loads((args.init / "action_expert" / "config.json").read_text())["action_space"]
    actions = np.concatenate([c["actions"][c["has_actions"]] for c in chunks]).reshape(-1, 2)
    mean, std = actions.mean(0, np.float64), actions.std(0, np.float64)
    return {**ACTION_SPACE, "mean": np.round(mean, 3).tolist(), "std": np.round(std, 3).tolist()}


def optimizer_for(model: nn.Module, rate: float, device: str) -> torch.optim.Optimizer:
    """Make AdamW without weight decay for norms, biases and embeddings."""
    decay, keep = [], []
    for name, parameter in model.named_parameters():
        (decay if parameter.ndim >= 2 and "embed" not in name else keep).append(parameter)
    groups = [{"params": decay, "weight_decay": 0.05}, {"params": keep, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=device == "cuda")


@dataclass
class Samples:
    """The buffers that batches are sampled from, and the workers that fill them."""

    situations: SampleStream
    clips: SampleStream
    buffer: ReplayBuffer
    bank: ClipBank
    log_mel: LogMel
    marks: tuple[int, int, int]
    rng: np.random.Generator

    def refresh(self, wait: bool = False, most: int | None = None) -> list[Chunk]:
        """Add the full chunks, at least one of situations if `wait`; return their actions.

        most: chunks of each kind to add at most, where workers are faster than the copies to the device.
        """
        taken = []
        for chunk in self.situations.take(wait, most):
            self.buffer.add(chunk)
            taken.append({name: chunk[name].copy() for name in ("actions", "has_actions")})
        for chunk in self.clips.take(wait and not self.bank.ready, most):
            self.bank.add(chunk)
        return taken

    def sample(self, count: int, spoken: int) -> tuple[Batch, Tensor, Batch]:
        """Sample a batch whose first `spoken` rows are spoken.

        Also returns their words [S, W], and on the host their numbers of tokens and words [S].
        """
        batch, known = self.buffer.sample(self.rng, count)
        clips, lengths = self.bank.sample(self.rng, known["meaning"][:spoken])
        samples, count = vary(clips["samples"], lengths["count"], self.rng)
        on_device = to_device(count.numpy(), samples.device)
        say_commands(batch, samples, on_device, self.log_mel, self.marks)
        return batch, clips["words"].long(), {"tokens": token_count(count), "words": lengths["word_count"]}

    def fill(self, first: int) -> list[Chunk]:
        """Wait for `first` situations and a clip of every meaning; return the actions."""
        taken: list[Chunk] = []
        while self.buffer.total < first or not self.bank.ready:
            taken += self.refresh(wait=True)
        return taken

    def close(self) -> None:
        """Stop the workers."""
        self.situations.close()
        self.clips.close()


def start_workers(
    args: argparse.Namespace, ranks: Ranks, tokenizer: Tokenizer, style: Style | None = None
) -> tuple[SampleStream, SampleStream]:
    """Start the workers for situations and for speech, before any threads exist."""
    speakers = max(1, round(args.workers * args.speakers))
    drawers = max(1, args.workers - speakers)
    seed = ranks.seed(args.seed)
    said, drawn = slots_for(args.clips, 64, CLIP_CHUNK), slots_for(args.capacity, 192)
    clips = SampleStream(CLIP_FIELDS, clip_writers(tokenizer), speakers, CLIP_CHUNK, said, seed)
    return SampleStream(FIELDS, situation_writers(tokenizer, style), drawers, slots=drawn, seed=seed), clips


def samples_of(
    args: argparse.Namespace,
    ranks: Ranks,
    streams: tuple[SampleStream, SampleStream],
    tokenizer: Tokenizer,
    device: str,
) -> Samples:
    """Allocate the buffers on the device."""
    return Samples(
        *streams,
        ReplayBuffer(args.capacity, device),
        ClipBank(args.clips, device),
        LogMel().to(device),
        audio_marks(tokenizer.token_to_id),
        np.random.default_rng(ranks.seed(args.seed)),
    )


def new_policy(args: argparse.Namespace, tokenizer: Tokenizer, mean: list, std: list) -> Policy:
    """Make a policy with random weights, or with those of --init.

    The word head, which no checkpoint has, always gets random weights.
    """
    if args.init:
        return load_policy(args.init, tokenizer).train()
    config = thinker_config(tokenizer)
    words = WordHead(config.audio_config.output_dim, tokenizer.token_to_id(PAD))
    expert = FlowExpert(ExpertDims(rtc_max_delay=LONGEST))
    return Policy(new_thinker(config), expert, words, torch.tensor(mean), torch.tensor(std))


def train(args: argparse.Namespace, ranks: Ranks, samples: Samples, policy: Policy, device: str) -> Policy:
    """Optimise for the given time; return the averaged weights, the same in all ranks."""
    average = copy.deepcopy(policy).requires_grad_(False)
    schedule = Schedule(args.rate)
    optimizer = optimizer_for(policy, args.rate, device)
    hearing = policy.hearing_parameters()
    known = {id(parameter) for parameter in hearing}
    others = [parameter for parameter in policy.parameters() if id(parameter) not in known]
    losses = torch.compile(policy.losses) if device == "cuda" else policy.losses
    spoken = round(args.batch * args.spoken)
    begin, step, report = time.monotonic(), 0, time.monotonic()
    while True:
        if step < TIME_EVERY or step % TIME_EVERY == 0:
            progress = ranks.agree((time.monotonic() - begin) / (60 * args.minutes))
            if progress >= 1.0:
                break
        samples.refresh()
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step, progress)
        batch, words, lengths = samples.sample(args.batch, spoken)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            heard, typed, flow, log_probabilities = losses(batch)
        ctc = ctc_loss(log_probabilities, lengths["tokens"], words, lengths["words"])
        answer = args.spoken * heard + (1 - args.spoken) * typed
        optimizer.zero_grad(set_to_none=True)
        (answer + flow + args.ctc * ctc).backward()
        ranks.average(policy.parameters())
        norms = [nn.utils.clip_grad_norm_(group, 1.0) for group in (others, hearing)]
        optimizer.step()
        update_average(average, policy, step)
        step += 1
        if ranks.first and time.monotonic() - report > 15:
            report = time.monotonic()
            print(
                f"{report - begin:6.0f} s  step {step:6d}  spoken {heard.item():.4f}  "
                f"typed {typed.item():.4f}  flow {flow.item():.4f}  ctc {ctc.item():.4f}  "
                f"norms {norms[0].item():.2f} {norms[1].item():.2f}  "
                f"situations {samples.buffer.total}  clips {samples.bank.total}",
                flush=True,
            )
    minutes = (time.monotonic() - begin) / 60
    made = f"{samples.buffer.total} situations and {samples.bank.total} clips"
    if ranks.first:
        print(f"{step} steps of {ranks.count} x {args.batch}, {made} each, {minutes:.1f} minutes", flush=True)
    round_to_saved(average)  # score the saved values
    return average


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="checkpoint directory to write")
    parser.add_argument(
        "--init", type=Path, help="checkpoint to start from, with its tokenizer (default: random weights)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=20.5,
        help="wall-clock time of the optimisation (default: %(default)s)",
    )
    parser.add_argument("--batch", type=int, default=512, help="batch size (default: %(default)s)")
    parser.add_argument("--spoken", type=float, default=0.4, help="share of the batch that is spoken")
    parser.add_argument("--rate", type=float, default=1.2e-3, help="peak learning rate")
    parser.add_argument(
        "--ctc",
        type=float,
        default=0.5,
        help="weight of the CTC loss, whose head is not saved: 0 where --init hears already",
    )
    parser.add_argument("--capacity", type=int, default=360_000, help="situations on the device")
    parser.add_argument("--clips", type=int, default=50_000, help="sounds on the device")
    parser.add_argument("--first", type=int, default=16_384, help="situations to wait for before training")
    parser.add_argument(
        "--corpus",
        type=int,
        default=6000,
        help="situations whose sentences the tokenizer is trained on (default: %(default)s)",
    )
    parser.add_argument("--workers", type=int, help="worker processes per GPU (default: all cores)")
    parser.add_argument("--speakers", type=float, default=0.2, help="share of the workers that make sounds")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    parser.add_argument(
        "--eval-scenes", type=int, default=512, help="situations to score on (default: %(default)s)"
    )
    return parser.parse_args()


def main() -> None:
    """Train, save the checkpoint, print scores."""
    args, ranks = arguments(), Ranks.here()
    args.workers = args.workers or max(2, (os.cpu_count() or 2) // ranks.count - 1)
    begin = time.monotonic()
    if args.init:
        tokenizer = Tokenizer.from_file(str(args.init / "tokenizer.json"))
    else:
        sentences = corpus(args.seed, args.corpus)
        tokenizer = train_tokenizer(sentences, TEXT_VOCABULARY, HISTORY["num_tokens"])
    streams = start_workers(args, ranks, tokenizer)
    device = ranks.connect()
    samples = samples_of(args, ranks, streams, tokenizer, device)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    action_space = ranks.agree(action_space_of(args, samples.fill(args.first)))
    policy = new_policy(args, tokenizer, action_space["mean"], action_space["std"]).to(device)
    ranks.share(policy)
    torch.manual_seed(ranks.seed(args.seed))
    if ranks.first:
        millions = sum(p.numel() for p in policy.parameters()) / 1e6
        heard = sum(p.numel() for p in policy.thinker.audio.parameters()) / 1e6
        print(
            f"{samples.buffer.total} situations and {samples.bank.total} clips after "
            f"{time.monotonic() - begin:.0f} s; actions {action_space['mean']}, {action_space['std']}\n"
            f"{millions:.2f} M parameters, {heard:.2f} M of them in the audio tower, "
            f"vocabulary {tokenizer.get_vocab_size()}",
            flush=True,
        )
    average = train(args, ranks, samples, policy, device)
    samples.close()
    ranks.disconnect()
    if not ranks.first:
        return
    written = copy.deepcopy(average).cpu()
    save_checkpoint(args.out, written.thinker.thinker, written.expert, tokenizer, action_space)
    print(f"written to {args.out} after {(time.monotonic() - begin) / 60:.1f} minutes in all", flush=True)
    if args.eval_scenes > 0:
        found = evaluate(average, tokenizer, args.eval_scenes, device, has_head=args.ctc > 0)
        for name, value in found.items():
            print(f"{name}: {value}", flush=True)


if __name__ == "__main__":
    main()
