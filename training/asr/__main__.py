# SPDX-License-Identifier: Apache-2.0
"""Train a small speech-to-text model on the arena's speakers.

Its layout is Qwen3-ASR's. The cross-entropy of the answers trains encoder and text model. An additional CTC
loss over the words trains the encoder. A tenth of the sounds have no command, and an answer without words.

Examples
--------
    python -m training.asr --out models/speech
    python -m training.asr --out models/speech --score
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from edgellm_ros.builder.families.qwen3_asr.config import MIN_SAMPLES
from training.asr.checkpoint import load_speech, save_speech
from training.asr.model import Recogniser, new_model, speech_config
from training.asr.score import score
from training.asr.sounds import transcript_writers
from training.asr.tokens import CONTEXTS, Sequences, contexts, sentences, train_tokenizer
from training.average import update_average
from training.buffer import ReplayBuffer
from training.checkpoint import round_to_saved
from training.hearing import LogMel, ctc_loss, token_count, vary
from training.policy import Batch
from training.schedule import Schedule
from training.speech import CLIP_CHUNK, CLIP_FIELDS
from training.stream import SampleStream, slots_for
from training.train import optimizer_for
from training.transfer import to_device

CONTEXT_SHARE = 0.2  # of the prompts: they have a context
HOST_FIELDS = ("count", "words", "word_count")
SENTENCES = 6000  # that the tokenizer is trained on


@dataclass
class Clips:
    """The buffer that batches are sampled from, and the workers that fill it."""

    stream: SampleStream
    buffer: ReplayBuffer
    sequences: Sequences
    rng: np.random.Generator

    def __post_init__(self) -> None:
        self._log_mel = LogMel().to(self.buffer.device)
        self._plain = self.sequences.before()
        self._befores = [self.sequences.before(context) for context in contexts(0, CONTEXTS)]

    def refresh(self, wait: bool = False) -> None:
        """Add the full chunks, at least one if `wait`."""
        for chunk in self.stream.take(wait):
            self.buffer.add(chunk)

    def fill(self, first: int) -> None:
        """Wait for `first` clips."""
        while self.buffer.total < first:
            self.refresh(wait=True)

    def sample(self, count: int) -> tuple[Batch, Tensor, dict[str, Tensor]]:
        """Sample a batch.

        Also returns its words [B, W], and on the host the numbers of tokens and words [B].
        """
        clips, known = self.buffer.sample(self.rng, count)
        samples, counts = vary(clips["samples"], torch.from_numpy(known["count"]), self.rng)
        counts = counts.clamp(min=MIN_SAMPLES)  # a shorter sound is extended with silence
        tokens = token_count(counts)
        answers = [
            self.sequences.answer(words[:n])
            for words, n in zip(known["words"].tolist(), known["word_count"].tolist(), strict=True)
        ]
        written = self.sequences.write([self._before() for _ in range(count)], tokens.tolist(), answers)
        batch = {name: to_device(value, samples.device) for name, value in written.items()}
        batch["features"] = self._log_mel(samples, to_device(counts.numpy(), samples.device))
        batch["audio_tokens"] = to_device(tokens.numpy(), samples.device)
        return (
            batch,
            clips["words"].long(),
            {"tokens": tokens, "words": torch.from_numpy(known["word_count"])},
        )

    def _before(self) -> list[int]:
        if self.rng.random() >= CONTEXT_SHARE:
            return self._plain
        return self._befores[int(self.rng.integers(len(self._befores)))]


def both_losses(
    losses: Callable[[Batch], tuple[Tensor, Tensor]], clips: Clips, count: int
) -> tuple[Tensor, Tensor]:
    """Compute the cross-entropy of the answers and the CTC loss of a sampled batch.

    losses: `Recogniser.losses`, compiled or not.
    """
    batch, words, lengths = clips.sample(count)
    answer, log_probabilities = losses(batch)
    return answer, ctc_loss(log_probabilities, lengths["tokens"], words, lengths["words"])


def train(args: argparse.Namespace, clips: Clips, recogniser: Recogniser, device: str) -> Recogniser:
    """Optimise for the given time; return the averaged weights, rounded to float16."""
    average = copy.deepcopy(recogniser).requires_grad_(False)
    schedule, optimizer = Schedule(args.rate), optimizer_for(recogniser, args.rate, device)
    losses = torch.compile(recogniser.losses) if device == "cuda" and args.compile else recogniser.losses
    begin, step, report = time.monotonic(), 0, time.monotonic()
    while (progress := (time.monotonic() - begin) / (60 * args.minutes)) < 1.0:
        clips.refresh()
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step, progress)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            answer, ctc = both_losses(losses, clips, args.batch)
        optimizer.zero_grad(set_to_none=True)
        (answer + args.ctc * ctc).backward()
        norms = [nn.utils.clip_grad_norm_(group, 1.0) for group in recogniser.groups()]
        optimizer.step()
        update_average(average, recogniser, step)
        step += 1
        if step == 1 or time.monotonic() - report > 15:
            report = time.monotonic()
            print(
                f"{report - begin:6.0f} s  step {step:6d}  answer {answer.item():.4f}  ctc {ctc.item():.4f}  "
                f"norms {norms[0].item():.2f} {norms[1].item():.2f}  clips {clips.buffer.total}",
                flush=True,
            )
    minutes = (time.monotonic() - begin) / 60
    made = f"{clips.buffer.total} clips, {minutes:.1f} minutes"
    print(
        f"{step} steps of {args.batch}, {made}; answer {answer.item():.4f}  ctc {ctc.item():.4f}", flush=True
    )
    round_to_saved(average)  # score the saved values
    return average


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="checkpoint directory to write")
    add("--score", action="store_true", help="only score the checkpoint in --out")
    add("--minutes", type=float, default=16.0, help="wall-clock time of the steps (default: %(default)s)")
    add("--batch", type=int, default=256, help="batch size (default: %(default)s)")
    add("--rate", type=float, default=1.2e-3, help="peak learning rate (default: %(default)s)")
    add("--ctc", type=float, default=0.3, help="weight of the CTC loss (default: %(default)s)")
    add("--clips", type=int, default=100_000, help="sounds on the device (default: %(default)s)")
    add("--first", type=int, default=8192, help="sounds to wait for before training (default: %(default)s)")
    add("--workers", type=int, help="worker processes (default: all cores but one)")
    add("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    add("--test-clips", type=int, default=1000, help="commands to score on (default: %(default)s)")
    add("--no-compile", dest="compile", action="store_false", help="do not compile the losses on a GPU")
    return parser.parse_args()


def main() -> None:
    """Train, save the checkpoint, print scores."""
    args, begin = arguments(), time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    if args.score:
        model, tokenizer = load_speech(args.out)
        average = Recogniser(model).to(device)
    else:
        tokenizer = train_tokenizer(sentences(args.seed, SENTENCES))
        workers = args.workers or max(1, (os.cpu_count() or 2) - 1)
        slots = slots_for(args.clips, 128, CLIP_CHUNK)
        stream = SampleStream(
            CLIP_FIELDS, transcript_writers(tokenizer), workers, CLIP_CHUNK, slots, args.seed
        )
        buffer = ReplayBuffer(args.clips, device, CLIP_FIELDS, HOST_FIELDS)
        clips = Clips(stream, buffer, Sequences(tokenizer), np.random.default_rng(args.seed))
        torch.manual_seed(args.seed)
        recogniser = Recogniser(new_model(speech_config(tokenizer))).to(device)
        clips.fill(args.first)
        millions = sum(p.numel() for p in recogniser.model.parameters()) / 1e6
        print(
            f"{clips.buffer.total} clips after {time.monotonic() - begin:.0f} s; "
            f"{millions:.2f} M parameters, vocabulary {tokenizer.get_vocab_size()}",
            flush=True,
        )
        average = train(args, clips, recogniser, device)
        stream.close()
        save_speech(args.out, copy.deepcopy(average.model).cpu(), tokenizer)
        print(f"written to {args.out} after {(time.monotonic() - begin) / 60:.1f} minutes in all", flush=True)
    if args.test_clips > 0:
        found = score(average, tokenizer, device, args.test_clips, max(1, args.test_clips // 10))
        for name, value in found.items():
            print(f"{name}: {value}", flush=True)


if __name__ == "__main__":
    main()
