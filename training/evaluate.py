# SPDX-License-Identifier: Apache-2.0
"""Score a policy on unseen situations, open loop in PyTorch.

Scores say whether the words are true, and whether the sampled path arrives and stays clear. Commands are
given typed, and spoken by speakers in rooms of the test split. `edgellm demo` scores exported engines in
closed loop.

Examples
--------
    python -m training.evaluate models/arena
"""

from __future__ import annotations

import argparse
import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from edgellm_arena.episodes.scoring import check
from edgellm_arena.episodes.situation import Situation, situations
from edgellm_arena.world.unicycle import ROBOT_RADIUS, rollout
from training.buffer import audio_marks, say_commands
from training.checkpoint import load_policy
from training.continuing import flow_errors
from training.data import FIELDS, SequenceWriter, meaning_of, write_sample
from training.hearing import LogMel, greedy_words, token_count
from training.mistakes import continuations
from training.policy import Batch, Policy
from training.speech import CLIP_FIELDS, heard_words, record_command, write_clip
from training.stream import Chunk, new_chunk
from training.styles import PLAIN, STYLES, Style
from training.thinker import Sequences

TEST_SEED = 987_654_321
MAX_ANSWER = 50
DENOISE_STEPS = 10
ROWS = 256


def most_likely(logits: Tensor) -> Tensor:
    """Return the most likely token [B] of logits [B, V]."""
    return logits.argmax(-1)


@torch.no_grad()
def decode_answers(
    policy: Policy,
    batch: Batch,
    sequences: Sequences,
    stops: list[int],
    choose: Callable[[Tensor], Tensor] = most_likely,
) -> list[list[int]]:
    """Decode each prompt, greedily unless `choose` samples, and return the answer ids.

    Each token takes a complete forward pass, which is slow and simple. The call fills sequences.ids and the
    batch's length.
    """
    batch["length"] = batch["prompt_length"].clone()
    open_rows = torch.ones(len(batch["ids"]), dtype=torch.bool, device=batch["ids"].device)
    rows = torch.arange(len(open_rows), device=open_rows.device)
    for _ in range(MAX_ANSWER):
        hidden, _ = policy.thinker(sequences)
        token = choose(policy.thinker.thinker.lm_head(hidden[rows, batch["length"].long() - 1]))
        index = batch["length"].long()[open_rows]
        sequences.ids[rows[open_rows], index] = token[open_rows]
        batch["length"] += open_rows
        for stop in stops:
            open_rows &= token != stop
        open_rows &= batch["length"] < batch["ids"].shape[1]
        if not open_rows.any():
            break
    rows = zip(sequences.ids, batch["prompt_length"], batch["length"], strict=True)
    return [ids[prompt:length].tolist() for ids, prompt, length in rows]


@torch.no_grad()
def sample_actions(
    policy: Policy, batch: Batch, sequences: Sequences, generator: torch.Generator
) -> np.ndarray:
    """Sample one trajectory per row, after `decode_answers`.

    Returns [B, 40, 2] in physical units."""
    _, cache = policy.thinker(sequences)
    device = batch["ids"].device
    x = torch.randn(*batch["actions"].shape, generator=generator, device=device)
    for i in range(DENOISE_STEPS):
        t = torch.full((len(x),), i / DENOISE_STEPS, device=device)
        x = x + policy.velocity(x, t, cache, batch["length"].long()) / DENOISE_STEPS
    return (x * policy.std + policy.mean).float().cpu().numpy()


def path_clearance(situation: Situation, actions: np.ndarray) -> float:
    """Compute the least distance in m from the robot's edge to a solid on the path."""
    states = rollout(situation.state, actions)
    return min(situation.scene.clearance(x, y) for x, y in states[:, :2]) - ROBOT_RADIUS


def write_situations(
    cases: list[Situation], writer: SequenceWriter, style: Style = PLAIN, system: str = ""
) -> Chunk:
    """Write typed prompts, images, and actions to continue."""
    rng, chunk = np.random.default_rng(TEST_SEED), new_chunk(FIELDS, len(cases))
    continued = continuations(np.random.default_rng(TEST_SEED), cases, style.manner)
    for i, (situation, continuation) in enumerate(zip(cases, continued, strict=True)):
        write_sample(chunk, i, situation, system, writer, rng, style, continuation)
    return chunk


def write_clips(cases: list[Situation], writer: SequenceWriter) -> Chunk:
    """Record the situations' own commands with speakers and rooms of the test split."""
    rng, chunk = np.random.default_rng(TEST_SEED + 1), new_chunk(CLIP_FIELDS, len(cases))
    for i, situation in enumerate(cases):
        text = situation.command.text
        (sound,) = record_command(text, "test", rng)
        write_clip(chunk, i, sound, meaning_of(situation.command), heard_words(text, writer))
    return chunk


def batches(chunk: Chunk, clips: Chunk | None, tokenizer: Tokenizer, device: str):
    """Yield batches of up to ROWS rows; with clips, every command is spoken."""
    log_mel, marks = LogMel().to(device), audio_marks(tokenizer.token_to_id)
    for first in range(0, len(chunk["ids"]), ROWS):
        rows = slice(first, first + ROWS)
        batch = {name: torch.from_numpy(value[rows].copy()).to(device) for name, value in chunk.items()}
        if clips is not None:
            samples, count = (torch.from_numpy(clips[name][rows]).to(device) for name in ("samples", "count"))
            say_commands(batch, samples, count.long(), log_mel, marks)
        yield batch


@dataclass(frozen=True)
class Responses:
    """Answers of a policy in N situations."""

    texts: list[str]
    drives: list[bool]  # whether the answer is followed by a trajectory
    actions: np.ndarray  # [N, 40, 2]; meaningless without a trajectory


def respond(
    policy: Policy, chunk: Chunk, clips: Chunk | None, tokenizer: Tokenizer, device: str
) -> Responses:
    """Decode greedy answers and sample a trajectory each, for typed commands or clips."""
    generator = torch.Generator(device).manual_seed(0)
    driving = tokenizer.token_to_id("<|traj_future_start|>")
    answers: list[list[int]] = []
    actions: list[np.ndarray] = []
    for batch in batches(chunk, clips, tokenizer, device):
        with torch.no_grad():
            sequences = policy.encode(batch)
        answers += decode_answers(policy, batch, sequences, [tokenizer.token_to_id("<|im_end|>"), driving])
        actions.append(sample_actions(policy, batch, sequences, generator))
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]
    return Responses(texts, [ids[-1] == driving for ids in answers], np.concatenate(actions))


def score(cases: list[Situation], responses: Responses, style: Style = PLAIN) -> dict[str, str]:
    """Score responses; readable lines by name."""
    right: dict[str, list[bool]] = defaultdict(list)
    misses, collided, expert_collided = [], [], []
    for i, situation in enumerate(cases):
        parts = check(style.read(responses.texts[i]), situation)
        right[f"true {situation.kind}"].append(all(parts.values()))
        if situation.command.shape is not None:
            right["right colour and shape named"].append(parts["color"] and parts["shape"])
        if situation.target is not None:
            named = [parts[key] for key in ("color", "shape", "side")]
            right["right colour, shape and side of a thing in view"].append(all(named))
        if situation.has_actions and responses.drives[i]:
            actions = responses.actions[i]
            ours, wanted = (rollout(situation.state, a)[-1] for a in (actions, situation.actions))
            misses.append(np.hypot(*(ours - wanted)[:2]))
            collided.append(path_clearance(situation, actions) < 0)
            expert_collided.append(path_clearance(situation, situation.actions) < 0)
    scores = {name: f"{np.mean(ok):.3f} of {len(ok)}" for name, ok in sorted(right.items())}
    if misses:
        far = f"{np.median(misses):.3f} m of {len(misses)}"
        scores["end point, median distance to one expert path"] = far
        collisions = f"{np.mean(collided):.4f} (of the expert's own: {np.mean(expert_collided):.4f})"
        scores["open-loop paths that collide"] = collisions
    return scores


@torch.no_grad()
def words_heard(policy: Policy, clips: Chunk, device: str) -> str:
    """Compute the share of clips whose words the word head recognises correctly."""
    log_mel, right = LogMel().to(device), []
    for first in range(0, len(clips["count"]), ROWS):
        rows = slice(first, first + ROWS)
        count = torch.from_numpy(clips["count"][rows]).long().to(device)
        features = log_mel(torch.from_numpy(clips["samples"][rows]).to(device), count)
        embeddings = policy.thinker.audio(features, token_count(count))
        for heard in greedy_words(policy.words(embeddings), token_count(count)):
            i = len(right)
            right.append(heard == clips["words"][i, : clips["word_count"][i]].tolist())
    return f"{np.mean(right):.3f} of {len(right)}"


def score_continuing(
    policy: Policy, chunk: Chunk, clips: Chunk | None, tokenizer: Tokenizer, device: str
) -> dict[str, str]:
    """Score the flow loss by the number of given actions; a readable line by name."""
    errors = flow_errors(policy, batches(chunk, clips, tokenizer, device))
    values = ", ".join(f"{delay}: {error:.4f}" for delay, error in errors.items())
    return {"flow loss by given actions": values}


def unseen_situations(count: int, style: Style = PLAIN) -> list[Situation]:
    """Return situations of the test split; the same for the same count and style."""
    return list(itertools.islice(situations(TEST_SEED, "test", style.manner), count))


def evaluate(policy: Policy, tokenizer: Tokenizer, count: int, device: str, has_head: bool) -> dict[str, str]:
    """Score `count` situations of the test split, and half as many in each style.

    The system prompt requests the style. `has_head`: the word head is trained, so it is scored too. Returns
    readable lines by name.
    """
    writer, cases = SequenceWriter(tokenizer), unseen_situations(count)
    chunk, clips = write_situations(cases, writer), write_clips(cases, writer)
    scores: dict[str, str] = {}
    for way, sounds in (("typed", None), ("spoken", clips)):
        found = score(cases, respond(policy, chunk, sounds, tokenizer, device))
        found |= score_continuing(policy, chunk, sounds, tokenizer, device)
        scores |= {f"{way}: {name}": value for name, value in found.items()}
    if has_head:
        scores["spoken: every word heard (word head)"] = words_heard(policy, clips, device)
    for name, style in STYLES.items():
        cases = unseen_situations(count // 2, style)
        chunk = write_situations(cases, writer, style, style.prompt)
        found = score(cases, respond(policy, chunk, None, tokenizer, device), style)
        scores |= {f"{name} requested: {part}": value for part, value in found.items()}
    return scores


def main() -> None:
    """Score a saved checkpoint."""
    parser = argparse.ArgumentParser(description="Score a checkpoint on unseen situations, open loop.")
    parser.add_argument("checkpoint", type=Path, help="checkpoint directory to score")
    parser.add_argument(
        "--scenes", type=int, default=512, help="situations to score on (default: %(default)s)"
    )
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = Tokenizer.from_file(str(args.checkpoint / "tokenizer.json"))
    policy = load_policy(args.checkpoint, tokenizer).to(device)
    for name, value in evaluate(policy, tokenizer, args.scenes, device, has_head=False).items():
        print(f"{name}: {value}", flush=True)


if __name__ == "__main__":
    main()
