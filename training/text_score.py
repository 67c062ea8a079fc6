# SPDX-License-Identifier: Apache-2.0
"""Score a draft head of a text model: tokens per verification of chains."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from training.draft_rounds import Answered, Drafting, rounds_of
from training.eagle import DraftHead
from training.own_texts import Turns, Writer
from training.questions import Questions
from training.text_rows import rows_of

UNSEEN = Path(__file__).with_name("unseen_prompts.txt")
CHAINS = tuple(Drafting(1, steps, steps + 1) for steps in (1, 2, 3, 5, 7))
MADE_QUESTIONS = 32
CODE = re.compile(r"\b(code|program|function|class|query|command|SQL|JSON|Python)\b")


def kind_of(question: str) -> str:
    """Tell whether a question is about code, a summary, or chat."""
    if question.startswith("Summarize"):
        return "summaries"
    return "code" if CODE.search(question) else "chat"


@torch.no_grad()
def answered(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    layers: tuple[int, ...],
    questions: list[str],
    tokens: int,
    graphs: bool = True,
) -> Answered:
    """Let the model answer questions greedily.

    An answer has at most `tokens` tokens, its end token included.
    """
    turns = Turns.of(tokenizer)
    asked = [tokenizer(question, add_special_tokens=False).input_ids for question in questions]
    around = len(turns.start) + len(turns.middle)
    length = around + max(map(len, asked)) + tokens
    writer = Writer(model, turns, len(asked), length, graphs=graphs)
    ids = writer.write(asked, torch.zeros(len(asked), device=model.device)).ids
    prompt = torch.tensor([around + len(each) for each in asked], device=model.device)
    columns = torch.arange(length, device=model.device)
    ends = (ids == turns.end_of_answer) & (columns >= prompt[:, None])
    end = torch.where(ends.any(1), ends.int().argmax(1) + 1, length)
    rows, _ = rows_of(model, layers, ids)
    return Answered(ids, prompt, end.minimum(prompt + tokens), rows)


def score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    head: DraftHead,
    layers: tuple[int, ...],
    tokens: int,
    seed: int,
    graphs: bool = True,
) -> None:
    """Print tokens per verification of chains, by kind of question.

    Questions are those of `unseen_prompts.txt`, and made ones, most of which training has asked too.
    """
    table = model.get_input_embeddings().weight
    unseen = [line for line in UNSEEN.read_text(encoding="utf-8").splitlines() if line]
    sets = {f"unseen, {kind}": [q for q in unseen if kind_of(q) == kind] for kind in kinds_of(unseen)}
    sets["made"] = Questions(seed).make(MADE_QUESTIONS, [])
    totals = torch.zeros(len(CHAINS), 2)
    for name, questions in sets.items():
        answers = answered(model, tokenizer, layers, questions, tokens, graphs=graphs)
        counts = torch.tensor([rounds_of(head, table, answers, chain) for chain in CHAINS])
        if name != "made":
            totals += counts
        _print(name, counts)
    _print("unseen, all", totals)


def kinds_of(questions: Iterable[str]) -> list[str]:
    """Return the kinds of questions, each once."""
    return sorted({kind_of(question) for question in questions})


def _print(name: str, counts: torch.Tensor) -> None:
    parts = [
        f"{chain.name} {tokens / max(rounds, 1):.2f}"
        for chain, (tokens, rounds) in zip(CHAINS, counts.tolist(), strict=True)
    ]
    print(f"{name}, {counts[0, 0]:.0f} tokens: {', '.join(parts)}", flush=True)
