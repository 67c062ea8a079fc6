# SPDX-License-Identifier: Apache-2.0
"""Train an EAGLE-3 draft head for a text model, on texts that it writes itself.

The checkpoint is a directory in Hugging Face format or a GGUF file. A third of the texts begin with a
question of `questions.py`, the others with one that the model writes; the answers have temperatures from 0 to
1, half of them below 0.25. The head learns the answers' rows only. It has a norm for each of the three states
(`fc_norm`), and begins with weights of the model: norms, LM head and one layer.

The head is written every half minute, so an interrupted run leaves one too. `edgellm export MODEL
ENGINE_DIR --draft HEAD_DIR` takes it.

Examples
--------
    python -m training.text_draft --checkpoint SmolLM2-135M-Instruct --out draft_head --minutes 18
    python -m training.text_draft --checkpoint MODEL.gguf --out draft_head --score
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from training.eagle import (
    HEAD_FILES,
    DraftDims,
    DraftHead,
    DraftRows,
    Lesson,
    draft_loss,
    head_config,
    load_head,
    most_frequent,
    save_head,
)
from training.own_texts import Texts, Turns, Writer, above_zero, in_bf16, load_model
from training.questions import Questions
from training.schedule import Schedule
from training.text_rows import begin_as_model, lesson_of, state_layers
from training.text_score import score

WRITING = 1 / 3  # largest share of the time that writing takes
OWN_QUESTIONS = 2 / 3  # share of texts whose first question the model writes
PASSAGE = 400  # characters of a passage to summarise, at most
KEPT_PASSAGES = 4096
SAVE_SECONDS, REPORT_SECONDS = 30, 10


def passages_of(texts: Texts, turns: Turns, tokenizer: PreTrainedTokenizerBase, rng: Random) -> list[str]:
    """Return the first sentences of some first answers, as passages to summarise."""
    found = []
    ids, answers = texts.ids.cpu(), texts.answers.cpu()
    for row in rng.sample(range(len(texts)), min(len(texts), KEPT_PASSAGES // 4)):
        before = int(answers[row].int().argmax())  # 0 without an answer
        answer = ids[row, before + 1 :].tolist() if before else []
        if turns.end_of_answer in answer:
            answer = answer[: answer.index(turns.end_of_answer)]
        text = " ".join(tokenizer.decode(answer, skip_special_tokens=True).split())[:PASSAGE]
        sentences = text[: f"{text} ".rfind(". ") + 1]
        if len(sentences) > PASSAGE // 4:
            found.append(sentences)
    return found


def write_texts(
    writer: Writer, tokenizer: PreTrainedTokenizerBase, most: int, end: float, seed: int
) -> Texts:
    """Write texts in batches, at least one batch.

    Writing ends with `most` texts, and at the time `end` of time.monotonic().
    """
    rng = Random(seed)
    questions = Questions(rng.getrandbits(32))  # of its own numbers: what it draws says nothing about rng's
    passages: list[str] = []
    written: list[Texts] = []
    begin = time.monotonic()
    while not written or (sum(map(len, written)) < most and time.monotonic() < end):
        asked: list[list[int] | None] = [
            None
            if not writer.turns.middle or rng.random() < OWN_QUESTIONS
            else tokenizer(question, add_special_tokens=False).input_ids
            for question in questions.make(writer.batch, passages)
        ]
        written.append(writer.write(asked, torch.rand(writer.batch, device=writer.device)))
        if writer.turns.middle:
            passages = (passages_of(written[-1], writer.turns, tokenizer, rng) + passages)[:KEPT_PASSAGES]
        count, seconds = sum(map(len, written)), time.monotonic() - begin
        speed = count * writer.length / seconds
        print(f"{seconds:6.0f} s  {count} texts written, {speed:.0f} tokens/s", flush=True)
    return Texts.join(written)


def new_head(
    args: argparse.Namespace, model: PreTrainedModel, layers: tuple[int, ...], token_ids: Tensor
) -> DraftHead:
    """Make a head that begins with weights of the model."""
    config = model.config
    dims = DraftDims(
        hidden_size=config.hidden_size,
        intermediate_size=args.intermediate or config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=model.get_decoder().layers[0].self_attn.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        vocab_size=config.vocab_size,
        draft_vocab_size=len(token_ids),
        fc_norm=True,
    )
    head = DraftHead(dims, token_ids.cpu())
    begin_as_model(head, model, layers)
    return head


@torch.no_grad()
def agreement(head: DraftHead, lesson: Lesson, steps: int) -> list[float]:
    """Return the share of the base's most likely tokens that each step predicts.

    Of rows whose most likely token the draft vocabulary has.
    """
    window = lesson.valid.shape[1] - steps + 1
    shares = []
    for step, logits in enumerate(head.unroll(lesson.rows, lesson.first, window, steps)):
        part = slice(step, step + window)
        right = logits.argmax(-1) == lesson.wanted[:, part].argmax(-1)
        inside = lesson.valid[:, part]
        shares.append(((right & inside).sum() / inside.sum().clamp(min=1)).item())
    return shares


def train(
    args: argparse.Namespace,
    head: DraftHead,
    texts: Texts,
    lesson: Callable[[Texts], Lesson],
    end: float,
    save: Callable[[], None],
) -> None:
    """Optimise the head until the time `end` of time.monotonic().

    lesson: makes a batch of texts a lesson. The first --batch texts are not trained on. SystemExit if no time
    is left for a step.
    """
    device = texts.ids.device
    unseen, texts = texts[: args.batch], texts[args.batch :]
    schedule = Schedule(args.rate, warmup_steps=100)
    optimizer = torch.optim.AdamW(
        head.parameters(), lr=args.rate, betas=(0.9, 0.95), weight_decay=0.01, fused=device.type == "cuda"
    )
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda" or args.bf16)

    def loss_of(rows: DraftRows, first: Tensor, wanted: Tensor, valid: Tensor) -> Tensor:
        window = valid.shape[1] - args.steps + 1
        return draft_loss(head.unroll(rows, first, window, args.steps), wanted, valid)

    if device.type == "cuda" and args.compile:
        loss_of = torch.compile(loss_of, dynamic=False)
    begin = saved = reported = time.monotonic()
    step, order = 0, torch.empty(0, dtype=torch.int64)
    size = min(args.batch, len(texts))
    last = time.monotonic() >= end
    while not last:
        if len(order) < size:
            order = torch.randperm(len(texts))
        rows, order = order[:size].to(device), order[size:]
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step, (time.monotonic() - begin) / (end - begin))
        with autocast:
            now = lesson(texts[rows])
            loss = loss_of(now.rows, now.first, now.wanted, now.valid)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        step += 1
        last = time.monotonic() >= end
        if step == 1 or last or time.monotonic() - reported > REPORT_SECONDS:
            with autocast:
                shares = agreement(head, lesson(unseen), args.steps)
            reported = time.monotonic()
            speed = step * texts.ids[rows].numel() / (reported - begin)
            print(
                f"{reported - begin:6.0f} s  step {step:6d}  {speed:.0f} tokens/s  loss {loss.item():.4f}  "
                f"agreement {' '.join(f'{share:.3f}' for share in shares)}",
                flush=True,
            )
        if time.monotonic() - saved > SAVE_SECONDS:
            save()
            saved = time.monotonic()
    if step == 0:
        raise SystemExit(f"--minutes {args.minutes}: no time is left for a step after writing")
    print(f"{step} steps of {size} texts, {step * size / len(texts):.1f} times each text", flush=True)
    if device.type == "cuda":
        print(f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB of GPU memory", flush=True)
    save()


def write_and_train(
    args: argparse.Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, begin: float
) -> None:
    """Write texts, train a head on them and save it.

    All of this ends --minutes after the time `begin`.
    """
    layers = state_layers(model.config.num_hidden_layers, args.layers)
    end = begin + 60 * args.minutes
    base = in_bf16(model) if args.bf16 or model.device.type == "cuda" else model
    turns = Turns.of(tokenizer)
    size = min(args.write_batch, args.texts)
    writer = Writer(base, turns, size, len(turns.start) + args.tokens, graphs=args.graphs)
    texts = write_texts(writer, tokenizer, args.texts, begin + 60 * args.minutes * WRITING, args.seed)
    del writer
    print(f"{len(texts)} texts written after {time.monotonic() - begin:.0f} s", flush=True)
    if time.monotonic() > end:
        raise SystemExit(f"--minutes {args.minutes}: writing {len(texts)} texts has taken all of them")
    if len(texts) < 2 * args.batch:
        raise SystemExit(f"--texts {len(texts)}: expected twice --batch {args.batch} or more")
    learned = texts.ids[:, 1:][texts.answers[:, :-1]]
    if not len(learned):
        raise SystemExit(f"--tokens {args.tokens}: no answer begins within them in {len(texts)} texts")
    counts = torch.bincount(learned, minlength=model.config.vocab_size)
    token_ids = most_frequent(counts, args.vocabulary)
    covered = counts[token_ids].sum() / counts.sum()
    print(f"{len(token_ids)} draft tokens cover {covered:.2%} of the answers' tokens", flush=True)
    head = new_head(args, model, layers, token_ids).to(model.device)
    print(f"{sum(p.numel() for p in head.parameters())} values in the head", flush=True)
    config = head_config(head.dims, model.config.to_dict(), layers)
    first = len(turns.start) - 1

    def lesson(batch: Texts) -> Lesson:
        return lesson_of(base, head, layers, batch, first)

    train(args, head, texts, lesson, end, lambda: save_head(args.out, head, config))


def _layers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    found = [int(part) for part in parts if part.strip().isdecimal()]
    if len(parts) != 3 or len(found) != 3 or found != sorted({*found}) or found[0] < 1:
        raise argparse.ArgumentTypeError(f"expected three rising layers such as 2,15,27, got {text}")
    return tuple(found)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def number(name: str, default: int, words: str, least: int = 1) -> None:
        def value(text: str) -> int:
            if not text.isdigit() or int(text) < least:
                raise argparse.ArgumentTypeError(f"expected a whole number from {least}, got {text}")
            return int(text)

        parser.add_argument(name, type=value, default=default, help=f"{words} (default: %(default)s)")

    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, help="directory in Hugging Face format, or a GGUF file")
    add("--out", type=Path, required=True, help="directory of the head")
    add("--minutes", type=above_zero, default=18, help="of writing and steps (default: %(default)s)")
    number("--texts", 131072, "texts that the model writes, at most, in a third of --minutes")
    number("--tokens", 288, "tokens of a text after those before its first question")
    number("--write-batch", 2048, "texts that are written together")
    number("--batch", 64, "texts of a step")
    number("--steps", 6, "tokens to draft in training")
    number("--vocabulary", 16384, "tokens that the head can draft, at most")
    number("--intermediate", 0, "size of the MLP, 0 = the model's", least=0)
    add("--layers", type=_layers, help="layers whose inputs the head takes (default: 2, L / 2 and L - 3)")
    add("--rate", type=above_zero, default=1e-3, help="largest learning rate (default: %(default)s)")
    number("--seed", 0, "of texts and order", least=0)
    number("--score-tokens", 160, "tokens of each answer that is scored")
    add("--bf16", action="store_true", help="bfloat16 on a CPU too; a GPU has it always")
    add("--graphs", action=argparse.BooleanOptionalAction, default=True, help="write with a CUDA graph")
    add("--compile", action=argparse.BooleanOptionalAction, default=True, help="compile the loss on a GPU")
    add("--score", action="store_true", help="only score the head in --out")
    args = parser.parse_args(arguments)
    if args.tokens <= args.steps + 1:
        parser.error(f"--tokens {args.tokens}: expected more than --steps {args.steps} and one")
    if args.score and not all((args.out / name).is_file() for name in HEAD_FILES):
        parser.error(f"--out {args.out}: expected a head ({' and '.join(HEAD_FILES)}) to --score")
    return args


def main(arguments: list[str] | None = None) -> None:
    """Write, train, save and score."""
    args = parse(arguments)
    begin = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    model, tokenizer = load_model(args.checkpoint, device)
    print(f"{args.checkpoint.name} loaded in {time.monotonic() - begin:.0f} s", flush=True)
    if not args.score:
        write_and_train(args, model, tokenizer, begin)
        print(f"written to {args.out} after {(time.monotonic() - begin) / 60:.1f} minutes", flush=True)
    head, layers = load_head(args.out)  # saved in float16: score the saved values
    head.requires_grad_(False).to(device)
    score(model, tokenizer, head, layers, args.score_tokens, args.seed + 1, graphs=args.graphs)


if __name__ == "__main__":
    main()
