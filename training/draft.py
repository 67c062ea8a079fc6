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
from pathlib import Path

import torch
from torch import Tensor

from training.data import SequenceWriter
from training.draft_rounds import Drafting
from training.draft_score import draft_rows, tokens_per_verification
from training.eagle import (
    DraftDims,
    DraftHead,
    Lesson,
    draft_loss,
    head_config,
    load_head,
    most_frequent,
    save_head,
    take,
)
from training.evaluate import batches, unseen_situations, write_clips, write_situations
from training.part import BASE, Frozen, part_parser
from training.policy import ANSWER_WINDOW, Batch, Policy
from training.styles import PLAIN, STYLES
from training.train import Samples

STATE_LAYERS = (2, 4, 5)  # decoder layers whose inputs the head takes; layer 2 is behind the deepstack rows
SETTINGS = (
    *(Drafting(1, steps, steps + 1) for steps in (3, 4, 5, 6, 7)),
    *(Drafting(2, steps, rows) for steps, rows in ((4, 6), (4, 8), (5, 8), (6, 10))),
    *(Drafting(3, steps, rows) for steps, rows in ((5, 10), (6, 16))),
    Drafting(4, 6, 16),
)
TEMPERATURES = (0.0, 0.7)


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
    """Return the ids [Vd] that occur in answers, ascending.

    The answers are those of `count` sampled situations of each style.
    """
    total = torch.zeros(vocabulary, dtype=torch.int64)
    for source in samples:
        batch, _ = source.buffer.sample(source.rng, count)
        column = torch.arange(batch["ids"].shape[1], device=batch["ids"].device)
        answers = (column >= batch["prompt_length"][:, None]) & (column < batch["length"][:, None])
        total += torch.bincount(batch["ids"][answers].long(), minlength=vocabulary).cpu()
    return most_frequent(total)


def train_head(args: argparse.Namespace, frozen: Frozen, head: DraftHead) -> None:
    """Optimise the head for the given time.

    Each step learns from one of the adapters or the base.
    """
    device = frozen.device

    def loss_of(batch: Batch) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            lesson = lesson_of(frozen.policy, head, STATE_LAYERS, batch, args.steps)
            found = head.unroll(lesson.rows, lesson.first, ANSWER_WINDOW, args.steps)
        return draft_loss(found, lesson.wanted, lesson.valid)

    frozen.optimise(args, list(head.parameters()), loss_of, weight_decay=0.01, clip=0.5)


def evaluate_head(
    frozen: Frozen,
    head: DraftHead,
    layers: tuple[int, ...],
    count: int,
    settings: tuple[Drafting, ...] = SETTINGS,
) -> None:
    """Print tokens per verification for each adapter.

    Measured on `count` situations of the test split.
    """
    policy, tokenizer, device = frozen.policy, frozen.tokenizer, frozen.device
    stops = [tokenizer.token_to_id(name) for name in ("<|im_end|>", "<|traj_future_start|>")]
    writer = SequenceWriter(tokenizer)
    for name in (BASE, *STYLES):
        cases = unseen_situations(count, STYLES.get(name, PLAIN))
        chunk, clips = write_situations(cases, writer), write_clips(cases, writer)
        frozen.adapters.use(name)
        for way, sounds in (("typed", None), ("spoken", clips)):
            for temperature in TEMPERATURES:
                source = batches(chunk, sounds, tokenizer, device)
                found = tokens_per_verification(policy, head, layers, source, stops, temperature, settings)
                print(f"{name}, {way}, temperature {temperature}:", flush=True)
                print("  " + ", ".join(f"{s.name} {value:.2f}" for s, value in found.items()), flush=True)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = part_parser(
        __doc__, minutes=4.0, rate=2e-3, capacity=100_000, clips=30_000, first=8192, seed=2, scenes=256
    )
    parser.add_argument("--out", type=Path, help="folder for the head (default: CHECKPOINT/draft)")
    parser.add_argument(
        "--steps", type=int, default=7, help="tokens to draft in training (default: %(default)s)"
    )
    parser.add_argument(
        "--intermediate", type=int, default=512, help="size of the MLP (default: %(default)s)"
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
    out = args.out or args.checkpoint / "draft"
    frozen = Frozen.open(args)
    if not args.score:
        base = frozen.policy.thinker.thinker.config.text_config
        token_ids = answer_tokens(list(frozen.samples.values()), args.first, base.vocab_size)
        head = new_head(args, base, token_ids).to(frozen.device)
        values = sum(p.numel() for p in head.parameters())
        print(f"{values} values in the head, {len(token_ids)} draft tokens", flush=True)
        train_head(args, frozen, head)
        save_head(out, head, head_config(head.dims, base.to_dict(), STATE_LAYERS))
        frozen.written(out)
    head, layers = load_head(out)  # saved in float16: score the saved values
    head.requires_grad_(False).to(frozen.device)
    if args.eval_scenes > 0:
        evaluate_head(frozen, head, layers, args.eval_scenes)


if __name__ == "__main__":
    main()
