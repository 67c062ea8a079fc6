# SPDX-License-Identifier: Apache-2.0
"""The model that is trained (thinker, action expert, word head) and its losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.continuing import with_given_actions
from training.expert import FlowExpert
from training.hearing import WordHead
from training.thinker import ROPE_DELTA, Sequences, Sounds, ThinkerForward

ANSWER_WINDOW = 48
FLOW_SAMPLES = 2
Batch = dict[str, Tensor]


def answer_losses(head: nn.Module, batch: Batch, hidden: Tensor, window: int) -> Tensor:
    """Compute the cross-entropy [B, window] of answer tokens; 0 after the answer.

    batch: ids [B, L], prompt_length and length [B]; hidden: the text model's last states [B, L, H].
    """
    start, length = batch["prompt_length"].long(), batch["length"].long()
    index = start[:, None] + torch.arange(window, device=start.device)
    valid = index < length[:, None]
    index = index.clamp(max=batch["ids"].shape[1] - 1)
    states = hidden.gather(1, (index - 1)[..., None].expand(-1, -1, hidden.shape[-1]))
    targets = batch["ids"].long().gather(1, index).masked_fill(~valid, -100)
    loss = F.cross_entropy(head(states).float().flatten(0, 1), targets.flatten(), reduction="none")
    return loss.view_as(targets)


class Policy(nn.Module):
    """Thinker, expert and word head.

    mean, std: of the actions [2].
    """

    def __init__(self, thinker: nn.Module, expert: FlowExpert, words: WordHead, mean: Tensor, std: Tensor):
        super().__init__()
        self.thinker, self.expert, self.words = ThinkerForward(thinker), expert, words
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def hearing_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of audio tower and word head."""
        return [*self.thinker.audio.parameters(), *self.words.parameters()]

    def hear(self, batch: Batch) -> Sounds | None:
        """Encode the sounds of the batch's first rows; None if it has no features."""
        if "features" not in batch:
            return None
        embeddings = self.thinker.audio(batch["features"], batch["audio_tokens"])
        return Sounds(embeddings, batch["audio_start"], batch["audio_tokens"])

    def encode(self, batch: Batch) -> Sequences:
        """Encode the images and sounds of a batch."""
        image, deepstack = self.thinker.vision(batch["image"])
        ids, start = batch["ids"].long(), batch["image_start"].long()
        return Sequences(ids, start, image, deepstack, self.hear(batch))

    def velocity(self, x: Tensor, t: Tensor, cache: list, length: Tensor) -> Tensor:
        """Compute the velocity at x [B, T, 2] and t [B] or [B, T].

        The first `length` [B] rows of the KV cache are visible.
        """
        steps = torch.arange(x.shape[1], device=x.device)
        position = (ROPE_DELTA + length)[:, None] + steps
        cos, sin = self.thinker.rope(position.expand(3, -1, -1))
        capacity = cache[0][0].shape[2]
        seen = torch.arange(capacity, device=x.device) < length[:, None]
        mask = torch.cat((seen, seen.new_ones(x.shape[0], x.shape[1])), dim=1)[:, None, None]
        return self.expert(x, t, cache, mask.expand(-1, 1, x.shape[1], -1), cos, sin)

    def answer_loss(self, batch: Batch, hidden: Tensor, window: int = ANSWER_WINDOW) -> Tensor:
        """Compute the cross-entropy [B, window] of answer tokens; 0 after the answer."""
        return answer_losses(self.thinker.thinker.lm_head, batch, hidden, window)

    def flow_loss(
        self, batch: Batch, cache: list, delays: Tensor | None = None, size: int = FLOW_SAMPLES
    ) -> Tensor:
        """Compute the mean squared velocity error of the rows with actions.

        size: the number of times for each row. delays [size * B]: the first actions of a trajectory that are
        given: they have no noise, the time 1 and no error. A row's samples lie behind each other. None = no
        action is given.
        """
        actions = ((batch["actions"] - self.mean) / self.std).repeat_interleave(size, 0)
        noise = torch.randn_like(actions)
        t = torch.rand(len(actions), device=actions.device)
        if delays is not None:
            given = torch.arange(actions.shape[1], device=actions.device) < delays[:, None]
            t = t[:, None].masked_fill(given, 1.0)
        x = torch.lerp(noise, actions, t.view(len(t), -1, 1))
        cache = [(k.repeat_interleave(size, 0), v.repeat_interleave(size, 0)) for k, v in cache]
        v = self.velocity(x, t, cache, batch["length"].long().repeat_interleave(size, 0))
        error = (v.float() - (actions - noise)).square().mean(2)
        weight = batch["has_actions"].float().repeat_interleave(size, 0)[:, None].expand_as(error)
        if delays is not None:
            weight = weight * ~given
        return (error * weight).sum() / weight.sum().clamp(min=1)

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute the losses of a batch, whose first S rows are spoken.

        Returns cross-entropy per answer token of the spoken rows and of the typed rows, the flow loss, where
        half of the trajectories begin with given actions (continuing.py), and the word head's
        log-probabilities [T, S, V + 1].
        """
        sequences = self.encode(batch)
        hidden, cache = self.thinker(sequences)
        loss = self.answer_loss(batch, hidden)
        tokens = (batch["length"] - batch["prompt_length"]).float()
        spoken = len(sequences.sounds.start)
        parts = (slice(spoken), slice(spoken, None))
        heard, typed = (loss[rows].sum() / tokens[rows].sum().clamp(min=1) for rows in parts)
        batch, delays = with_given_actions(batch)
        flow = self.flow_loss(batch, cache, delays.repeat_interleave(FLOW_SAMPLES))
        return heard, typed, flow, self.words(sequences.sounds.embeddings)
