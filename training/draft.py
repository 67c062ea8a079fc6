# SPDX-License-Identifier: Apache-2.0
"""Train the EAGLE-3 draft head of the demo checkpoint.

The checkpoint and its adapters are frozen. One head serves the base model and both adapters: it learns from
the states and the logits of each of them in turn, on typed and spoken commands. The answers are the true ones
of the training data, which the checkpoint has learned to give: they are close to samples of its own, and the
loss compares with its logits, not with the answers' tokens.

Examples
--------
    python -m training.draft --checkpoint models/arena
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from training.buffer import ClipBank, ReplayBuffer, audio_marks
from training.checkpoint import load_policy
from training.data import FIELDS, SequenceWriter, situation_writers
from training.draft_score import Drafting, draft_rows, tokens_per_verification
from training.eagle import (
    DraftDims,
    DraftHead,
    DraftRows,
    draft_loss,
    head_config,
    load_head,
    save_head,
    take,
)
from training.evaluate import batches, unseen_situations, write_clips, write_situations
from training.hearing import LogMel
from training.lora import adapter_rank, load_adapter, put_adapters
from training.policy import ANSWER_WINDOW, Batch, Policy
from training.speech import CLIP_CHUNK, CLIP_FIELDS, clip_writers
from training.stream import CHUNK, SampleStream, slots_for
from training.styles import PLAIN, STYLES, Style
from training.train import Samples, Schedule

STATE_LAYERS = (2, 4, 5)  # decoder layers whose inputs the head takes; layer 2 is behind the deepstack rows
VOCABULARY_STEP = 16  # the draft vocabulary is a multiple of this
BASE = "base"
SETTINGS = (
    *(Drafting(1, steps, steps + 1) for steps in (3, 4, 5, 6, 7)),
    *(Drafting(2, steps, rows) for steps, rows in ((4, 6), (4, 8), (5, 8), (6, 10))),
    *(Drafting(3, steps, rows) for steps, rows in ((5, 10), (6, 16))),
    Drafting(4, 6, 16),
)
TEMPERATURES = (0.0, 0.7)


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
    """The workers that make situations for the base model and each adapter, and recordings for all."""

    situations: dict[str, SampleStream]
    clips: SampleStream

    @classmethod
    def start(cls, args: argparse.Namespace, tokenizer: Tokenizer) -> Workers:
        """Start about --workers workers, before any threads exist; a share --speakers makes recordings."""
        styles: dict[str, Style | None] = {BASE: None, **STYLES}
        speaking = max(1, round(args.workers * args.speakers))
        drawing = max(1, (args.workers - speaking) // len(styles))
        seed = args.seed
        said, drawn = slots_for(args.clips, 64, CLIP_CHUNK), slots_for(args.capacity, 96)
        clips = SampleStream(CLIP_FIELDS, clip_writers(tokenizer), speaking, CLIP_CHUNK, said, seed)
        streams = {
            name: SampleStream(FIELDS, situation_writers(tokenizer, style), drawing, CHUNK, drawn, seed + i)
            for i, (name, style) in enumerate(styles.items())
        }
        return cls(streams, clips)

    def samples(self, args: argparse.Namespace, tokenizer: Tokenizer, device: str) -> dict[str, Samples]:
        """Allocate the buffers on the device."""
        capacity, bank, log_mel = args.capacity, ClipBank(args.clips, device), LogMel().to(device)
        marks, rng = audio_marks(tokenizer.token_to_id), np.random.default_rng(args.seed)
        return {
            name: Samples(stream, self.clips, ReplayBuffer(capacity, device), bank, log_mel, marks, rng)
            for name, stream in self.situations.items()
        }

    def close(self) -> None:
        """Stop the workers."""
        for stream in (*self.situations.values(), self.clips):
            stream.close()


@dataclass(frozen=True)
class Lesson:
    """A batch as the head learns it: what it takes from the base model, and the base model's logits."""

    rows: DraftRows
    first: Tensor  # [B], the row of the prompt's last token
    wanted: Tensor  # [B, W + K - 1, Vd], the base's logits of the rows after `first`
    valid: Tensor  # [B, W + K - 1], whether the base wants a token of the draft vocabulary there


@torch.no_grad()
def lesson_of(policy: Policy, head: DraftHead, layers: tuple[int, ...], batch: Batch, steps: int) -> Lesson:
    """Run the base model on a batch with answers."""
    sequences = policy.encode(batch)
    rows, hidden = draft_rows(policy, sequences, layers)
    first = batch["prompt_length"].long() - 1
    index = first[:, None] + 1 + torch.arange(ANSWER_WINDOW + steps - 1, device=first.device)
    inside = index < batch["length"].long()[:, None] - 1
    with torch.autocast(first.device.type, enabled=False):
        logits = policy.thinker.thinker.lm_head(take(hidden, index.clamp(max=hidden.shape[1] - 1)).float())
    valid = inside & head.t2d[logits.argmax(-1)]
    return Lesson(rows, first, logits[..., head.token_ids], valid)


def answer_tokens(samples: list[Samples], count: int, vocabulary: int) -> Tensor:
    """Return the ids [Vd] that occur in the answers of `count` sampled situations of each style.

    Ascending. Other ids fill up the last VOCABULARY_STEP.
    """
    total = torch.zeros(vocabulary, dtype=torch.int64)
    for source in samples:
        batch, _ = source.buffer.sample(source.rng, count)
        column = torch.arange(batch["ids"].shape[1], device=batch["ids"].device)
        answers = (column >= batch["prompt_length"][:, None]) & (column < batch["length"][:, None])
        total += torch.bincount(batch["ids"][answers].long(), minlength=vocabulary).cpu()
    used = int((total > 0).sum())
    used = -(-used // VOCABULARY_STEP) * VOCABULARY_STEP
    return total.sort(descending=True, stable=True).indices[:used].sort().values


def train_head(
    args: argparse.Namespace, samples: dict[str, Samples], policy: Policy, adapters: Adapters, head: DraftHead
) -> None:
    """Optimise the head for the given time; each step learns from one of the adapters or the base."""
    device = head.d2t.device.type
    schedule = Schedule(args.rate, warmup_steps=100)
    optimizer = torch.optim.AdamW(head.parameters(), lr=args.rate, betas=(0.9, 0.98), weight_decay=0.01)
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
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            lesson = lesson_of(policy, head, STATE_LAYERS, batch, args.steps)
            found = head.unroll(lesson.rows, lesson.first, ANSWER_WINDOW, args.steps)
        losses[name] = draft_loss(found, lesson.wanted, lesson.valid)
        optimizer.zero_grad(set_to_none=True)
        losses[name].backward()
        nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        optimizer.step()
        step += 1
        if step == len(names) or time.monotonic() - report > 10:
            report = time.monotonic()
            parts = "  ".join(f"{part} {loss.item():.4f}" for part, loss in losses.items())
            total = sum(source.buffer.total for source in samples.values())
            print(f"{report - begin:6.0f} s  step {step:6d}  {parts}  situations {total}", flush=True)
    total = sum(source.buffer.total for source in samples.values())
    print(f"{step} steps of {args.batch}, {total} situations, {args.minutes:.1f} minutes", flush=True)


def evaluate_head(
    policy: Policy,
    adapters: Adapters,
    head: DraftHead,
    layers: tuple[int, ...],
    tokenizer: Tokenizer,
    count: int,
    settings: tuple[Drafting, ...] = SETTINGS,
) -> None:
    """Print tokens per verification on `count` situations of the test split for each adapter."""
    device = head.d2t.device.type
    stops = [tokenizer.token_to_id(name) for name in ("<|im_end|>", "<|traj_future_start|>")]
    writer = SequenceWriter(tokenizer)
    for name in (BASE, *STYLES):
        cases = unseen_situations(count, STYLES.get(name, PLAIN))
        chunk, clips = write_situations(cases, writer), write_clips(cases, writer)
        adapters.use(name)
        for way, sounds in (("typed", None), ("spoken", clips)):
            for temperature in TEMPERATURES:
                source = batches(chunk, sounds, tokenizer, device)
                found = tokens_per_verification(policy, head, layers, source, stops, temperature, settings)
                print(f"{name}, {way}, temperature {temperature}:", flush=True)
                print("  " + ", ".join(f"{s.name} {value:.2f}" for s, value in found.items()), flush=True)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="checkpoint to train a head for")
    parser.add_argument("--out", type=Path, help="folder for the head (default: CHECKPOINT/draft)")
    parser.add_argument("--score", action="store_true", help="only score the head in the folder")
    parser.add_argument(
        "--minutes", type=float, default=4.0, help="wall-clock time of the steps (default: %(default)s)"
    )
    parser.add_argument("--batch", type=int, default=256, help="batch size (default: %(default)s)")
    parser.add_argument("--spoken", type=float, default=0.4, help="share of the batch that is spoken")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument(
        "--steps", type=int, default=7, help="tokens to draft in training (default: %(default)s)"
    )
    parser.add_argument(
        "--intermediate", type=int, default=512, help="size of the MLP (default: %(default)s)"
    )
    parser.add_argument(
        "--capacity", type=int, default=100_000, help="situations on the device for each adapter"
    )
    parser.add_argument("--clips", type=int, default=30_000, help="sounds on the device")
    parser.add_argument(
        "--first", type=int, default=8192, help="situations per adapter to wait for before training"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=max(4, (os.cpu_count() or 2) - 1),
        help="worker processes (default: all cores but one)",
    )
    parser.add_argument("--speakers", type=float, default=0.2, help="share of the workers that make sounds")
    parser.add_argument("--seed", type=int, default=2, help="random seed (default: %(default)s)")
    parser.add_argument(
        "--eval-scenes", type=int, default=256, help="situations to score on (default: %(default)s)"
    )
    return parser.parse_args()


def new_head(args: argparse.Namespace, base, token_ids: Tensor) -> DraftHead:
    """Make a head with random weights for a base model's text configuration."""
    dims = DraftDims(
        base.hidden_size,
        args.intermediate,
        base.num_attention_heads,
        base.num_key_value_heads,
        base.head_dim,
        base.rms_norm_eps,
        base.vocab_size,
        len(token_ids),
    )
    return DraftHead(dims, token_ids)


def main() -> None:
    """Train, save and score the head."""
    args = arguments()
    out, begin = args.out or args.checkpoint / "draft", time.monotonic()
    tokenizer = Tokenizer.from_file(str(args.checkpoint / "tokenizer.json"))
    workers = None if args.score else Workers.start(args, tokenizer)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    policy = load_policy(args.checkpoint, tokenizer).requires_grad_(False)
    adapters = Adapters(policy, args.checkpoint / "lora", list(STYLES))
    policy.requires_grad_(False).to(device)
    if workers is not None:
        samples = workers.samples(args, tokenizer, device)
        for source in samples.values():
            source.fill(args.first)
        base = policy.thinker.thinker.config.text_config
        token_ids = answer_tokens(list(samples.values()), args.first, base.vocab_size)
        head = new_head(args, base, token_ids).to(device)
        values = sum(p.numel() for p in head.parameters())
        print(
            f"{values} values in the head, {len(token_ids)} draft tokens; first samples after "
            f"{time.monotonic() - begin:.0f} s",
            flush=True,
        )
        train_head(args, samples, policy, adapters, head)
        workers.close()
        save_head(out, head, head_config(head.dims, base.to_dict(), STATE_LAYERS))
        print(f"written to {out} after {(time.monotonic() - begin) / 60:.1f} minutes in all", flush=True)
    head, layers = load_head(out)  # saved in float16: score the saved values
    head.requires_grad_(False).to(device)
    if args.eval_scenes > 0:
        evaluate_head(policy, adapters, head, layers, tokenizer, args.eval_scenes)


if __name__ == "__main__":
    main()
