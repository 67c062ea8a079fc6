# SPDX-License-Identifier: Apache-2.0
"""Score the draft head of the demo checkpoint: tokens per verification."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from training.draft_rounds import Answered, Drafting, rounds_of
from training.eagle import DraftHead, DraftRows
from training.evaluate import decode_answers, most_likely
from training.policy import Batch, Policy
from training.thinker import Sequences, mrope_positions


def draft_rows(policy: Policy, sequences: Sequences, layers: tuple[int, ...]) -> tuple[DraftRows, Tensor]:
    """Run the base model; return a head's rows and the final states [B, L, H].

    The rows are those on the inputs of `layers`.
    """
    thinker = policy.thinker
    embeddings = thinker.embed(sequences)
    hidden, _, states = thinker.run(sequences, embeddings, layers)
    cos, sin = thinker.rope(mrope_positions(sequences.image_start, hidden.shape[1]))
    following = torch.cat((embeddings[:, 1:], embeddings[:, -1:]), 1)
    rows = DraftRows(following, torch.cat(states, -1), torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
    return rows, hidden


@torch.no_grad()
def answer(
    policy: Policy, batch: Batch, layers: tuple[int, ...], stops: list[int], temperature: float, seed: int = 0
) -> Answered:
    """Let the base model answer a batch of prompts, greedily at temperature 0."""
    generator = torch.Generator(batch["ids"].device).manual_seed(seed)

    def sample(logits: Tensor) -> Tensor:
        shares = (logits.float() / temperature).softmax(-1)
        return torch.multinomial(shares, 1, generator=generator)[:, 0]

    sequences = policy.encode(batch)
    decode_answers(policy, batch, sequences, stops, sample if temperature > 0 else most_likely)
    rows, _ = draft_rows(policy, sequences, layers)
    return Answered(sequences.ids, batch["prompt_length"].long(), batch["length"].long(), rows)


def tokens_per_verification(
    policy: Policy,
    head: DraftHead,
    layers: tuple[int, ...],
    batch_source: Iterable[Batch],
    stops: list[int],
    temperature: float,
    settings: Iterable[Drafting],
) -> dict[Drafting, float]:
    """Score drafting settings on prompts: tokens per verification.

    The base model's own token is included.
    """
    table = policy.thinker.thinker.model.language_model.embed_tokens.weight
    sums = {drafting: np.zeros(2) for drafting in settings}
    for batch in batch_source:
        answered = answer(policy, batch, layers, stops, temperature)
        for drafting, found in sums.items():
            found += rounds_of(head, table, answered, drafting)
    return {drafting: float(tokens / max(rounds, 1)) for drafting, (tokens, rounds) in sums.items()}
