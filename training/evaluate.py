# SPDX-License-Identifier: Apache-2.0
"""Scores of a policy on unseen situations: are the words true, does the sampled path arrive and stay clear.

Open loop, in PyTorch, right after training; `edgellm demo` scores the exported engines in closed loop.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import torch
from tokenizers import Tokenizer

from edgellm_ros.arena.scoring import check
from edgellm_ros.arena.situation import Situation, situations
from edgellm_ros.arena.unicycle import ROBOT_RADIUS, rollout
from training.data import SequenceWriter, new_chunk, write_sample

TEST_SEED = 987_654_321
MAX_ANSWER = 90
DENOISE_STEPS = 10


@torch.no_grad()
def greedy_answers(policy, batch: dict[str, torch.Tensor], stops: list[int]) -> list[list[int]]:
    """Greedy answer ids of each prompt, by whole forward passes (slow, simple); fills `ids` and `length`."""
    batch["length"] = batch["prompt_length"].clone()
    open_rows = torch.ones(len(batch["ids"]), dtype=torch.bool, device=batch["ids"].device)
    rows = torch.arange(len(open_rows), device=open_rows.device)
    for _ in range(MAX_ANSWER):
        hidden, _ = policy.prefix(batch)
        token = policy.thinker.thinker.lm_head(hidden[rows, batch["length"].long() - 1]).argmax(-1)
        index = batch["length"].long()[open_rows]
        batch["ids"][rows[open_rows], index] = token[open_rows].to(batch["ids"].dtype)
        batch["length"] += open_rows
        for stop in stops:
            open_rows &= token != stop
        if not open_rows.any():
            break
    rows = zip(batch["ids"], batch["prompt_length"], batch["length"], strict=True)
    return [ids[prompt:length].tolist() for ids, prompt, length in rows]


@torch.no_grad()
def sample_actions(policy, batch: dict[str, torch.Tensor], generator: torch.Generator) -> np.ndarray:
    """One trajectory per row [B, 40, 2], in physical units."""
    _, cache = policy.prefix(batch)
    device = batch["ids"].device
    x = torch.randn(*batch["actions"].shape, generator=generator, device=device)
    for i in range(DENOISE_STEPS):
        t = torch.full((len(x),), i / DENOISE_STEPS, device=device)
        velocity = policy.velocity(x, t, cache, batch["length"].long(), batch["rope_delta"].long())
        x = x + velocity / DENOISE_STEPS
    return (x * policy.std + policy.mean).float().cpu().numpy()


def path_clearance(situation: Situation, actions: np.ndarray) -> float:
    """Least distance in m from the robot's edge to a solid along the path."""
    states = rollout(situation.state, actions)
    return min(situation.scene.clearance(x, y) for x, y in states[:, :2]) - ROBOT_RADIUS


def evaluate(policy, tokenizer: Tokenizer, count: int, device: str) -> dict[str, str]:
    """Score `count` situations of the test split; returns readable lines by name."""
    rng = np.random.default_rng(TEST_SEED)
    drawn = list(itertools.islice(situations(TEST_SEED, "test"), count))
    writer, chunk = SequenceWriter(tokenizer), new_chunk(count)
    for i, situation in enumerate(drawn):
        write_sample(chunk, i, situation, "", writer, rng)
    tensors = {name: torch.from_numpy(value).to(device) for name, value in chunk.items()}
    stops = [tokenizer.token_to_id(name) for name in ("<|im_end|>", "<|traj_future_start|>")]
    generator = torch.Generator(device).manual_seed(0)
    answers: list[list[int]] = []
    sampled: list[np.ndarray] = []
    for rows in torch.arange(count).split(256):
        batch = {name: value[rows.to(device)] for name, value in tensors.items()}
        answers += greedy_answers(policy, batch, stops)
        sampled.append(sample_actions(policy, batch, generator))
    actions = np.concatenate(sampled)

    right: dict[str, list[bool]] = defaultdict(list)
    misses, collided, expert_collided = [], [], []
    for i, (situation, ids) in enumerate(zip(drawn, answers, strict=True)):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        parts = check(text, situation)
        right[f"true {situation.kind}"].append(all(parts.values()))
        if situation.target is not None:
            named = [parts[key] for key in ("color", "shape", "side")]
            right["right colour, shape and side of the thing named"].append(all(named))
        if situation.has_actions and ids[-1] == stops[1]:
            ours, wanted = (rollout(situation.state, a)[-1] for a in (actions[i], situation.actions))
            misses.append(np.hypot(*(ours - wanted)[:2]))
            collided.append(path_clearance(situation, actions[i]) < 0)
            expert_collided.append(path_clearance(situation, situation.actions) < 0)
    scores = {name: f"{np.mean(ok):.3f} of {len(ok)}" for name, ok in sorted(right.items())}
    scores["end point, median distance to one expert path"] = f"{np.median(misses):.3f} m of {len(misses)}"
    scores["open-loop paths that collide"] = f"{np.mean(collided):.4f}"
    scores["the expert's own paths that collide"] = f"{np.mean(expert_collided):.4f}"
    return scores
