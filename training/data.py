# SPDX-License-Identifier: Apache-2.0
"""Situations of the arena as rows of arrays: image, token sequence, actions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from tokenizers import Tokenizer

from edgellm_arena.episodes.situation import Situation, situations
from edgellm_arena.words.language import Command
from edgellm_arena.world.renderer import render
from edgellm_arena.world.scene import COLORS, SHAPES
from edgellm_ros.diffusion.config import TrajectoryHistoryConfig
from edgellm_ros.diffusion.trajectory_history import history_tokens
from training.mistakes import Continuation, continued
from training.spec import HISTORY, SYSTEM_PROMPTS
from training.stream import Chunk, Fields
from training.styles import PLAIN, STYLES, Style

MAX_LENGTH = 240  # the longest prompt with 5 s of sound (187 tokens) and the longest answer (48) fit
HORIZON = 40
IMAGE_SHAPE = (224, 320, 3)
MERGED_GRID = (7, 10)
IMAGE_TOKENS = MERGED_GRID[0] * MERGED_GRID[1]
STYLE_SHARE = 0.04  # of the base model's samples, for each of the STYLES
FOUND_SHARE = 0.12  # of all samples: a search has just found its target
SYSTEM_PROMPT_SHARE = 0.4  # of the other samples: they have a system prompt

# Meanings of commands, without their wording; a sound can replace a command of the same meaning.
MEANINGS = (
    *((kind, color, shape) for kind in ("go", "where") for color in (None, *COLORS) for shape in SHAPES),
    ("describe", None, None),
    ("stop", None, None),
)
_MEANING_INDEX = {meaning: i for i, meaning in enumerate(MEANINGS)}

FIELDS: Fields = {
    "image": (IMAGE_SHAPE, np.uint8),
    "ids": ((MAX_LENGTH,), np.int16),
    "image_start": ((), np.int16),
    "command_start": ((), np.int16),
    "command_length": ((), np.int16),
    "prompt_length": ((), np.int16),
    "length": ((), np.int16),
    "meaning": ((), np.int16),
    "has_actions": ((), np.bool_),
    "actions": ((HORIZON, 2), np.float32),
    "given": ((), np.int16),  # first rows of "continued" that are given; 0 = there is none
    "continued": ((HORIZON, 2), np.float32),
}


def meaning_of(command: Command) -> int:
    """Return the command's index in MEANINGS."""
    return _MEANING_INDEX[command.kind, command.color, command.shape]


@dataclass(frozen=True)
class Prompt:
    """Token ids of a typed prompt, with the positions of its image and its command."""

    ids: list[int]
    image_start: int
    command_start: int
    command_length: int


@dataclass(frozen=True)
class SequenceWriter:
    """Writes a situation as the same token sequence as the runtime."""

    tokenizer: Tokenizer

    @cached_property
    def _history(self) -> TrajectoryHistoryConfig:
        first = self.tokenizer.token_to_id("<|traj_0|>")
        return TrajectoryHistoryConfig(**HISTORY, first_token_id=first, single_precision=False)

    def text(self, text: str) -> list[int]:
        """Return the token ids of plain text."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def prompt(self, command: str, history: np.ndarray, system: str) -> Prompt:
        """Write the prompt up to the answer's first token."""
        t = self.tokenizer.token_to_id
        ids: list[int] = []
        if system:
            ids += [t("<|im_start|>"), *self.text("system\n" + system), t("<|im_end|>"), *self.text("\n")]
        ids += [t("<|im_start|>"), *self.text("user\n"), t("<|vision_start|>")]
        image_start = len(ids)
        ids += [t("<|image_pad|>")] * IMAGE_TOKENS + [t("<|vision_end|>"), t("<|traj_history_start|>")]
        ids += history_tokens(history, self._history)
        ids += [t("<|traj_history_end|>")]
        command_start, words = len(ids), self.text(command)
        ids += [*words, t("<|im_end|>"), *self.text("\n"), t("<|im_start|>"), *self.text("assistant\n")]
        return Prompt(ids, image_start, command_start, len(words))

    def answer(self, text: str, has_actions: bool) -> list[int]:
        """Return the answer's ids.

        The last id is a stop token, which says whether a trajectory follows."""
        stop = "<|traj_future_start|>" if has_actions else "<|im_end|>"
        return [*self.text(text), self.tokenizer.token_to_id(stop)]


def write_sample(
    out: Chunk,
    i: int,
    situation: Situation,
    system: str,
    writer: SequenceWriter,
    rng: np.random.Generator,
    style: Style = PLAIN,
    continuation: Continuation | None = None,
) -> None:
    """Render the image and fill row i of a chunk; ValueError for too many tokens."""
    prompt = writer.prompt(situation.command.text, situation.history, system)
    sequence = prompt.ids + writer.answer(style.write(situation.answer), situation.has_actions)
    if len(sequence) > MAX_LENGTH:
        raise ValueError(
            f"{situation.command.text!r}: expected at most {MAX_LENGTH} tokens, got {len(sequence)}"
        )
    out["image"][i] = render(situation.scene, situation.state, rng)
    out["ids"][i] = 0
    out["ids"][i, : len(sequence)] = sequence
    out["image_start"][i] = prompt.image_start
    out["command_start"][i], out["command_length"][i] = prompt.command_start, prompt.command_length
    out["prompt_length"][i], out["length"][i] = len(prompt.ids), len(sequence)
    out["meaning"][i] = meaning_of(situation.command)
    out["has_actions"][i] = situation.has_actions
    out["actions"][i] = situation.actions if situation.has_actions else 0.0
    out["given"][i] = 0 if continuation is None else continuation.given
    out["continued"][i] = 0.0 if continuation is None else continuation.actions


def training_situations(seed: int, style: Style) -> Iterator[Situation]:
    """Yield situations of the training split, FOUND_SHARE of them "found"."""
    common, found = (situations(seed, "train", style.manner, family) for family in (None, "found"))
    rng = np.random.default_rng([seed, 3])
    while True:
        yield next(found if rng.random() < FOUND_SHARE else common)


def situation_writer(tokenizer: Tokenizer, style: Style | None, seed: int) -> Callable[[Chunk, int], None]:
    """Make a SampleStream's function that writes situations of the training split.

    With a style, all samples are in that style, for its adapter, and the system prompt does not mention it.
    Without a style, for the base model, most samples are plain and a few in each of the STYLES, which the
    system prompt then requests.
    """
    writer = SequenceWriter(tokenizer)
    rng = np.random.default_rng([seed, 1])
    styles = [PLAIN, *STYLES.values()] if style is None else [style]
    sources = [training_situations(seed * len(styles) + i, s) for i, s in enumerate(styles)]
    mistakes = np.random.default_rng([seed, 2])
    pairs = [continued(mistakes, source, s.manner) for source, s in zip(sources, styles, strict=True)]
    shares = np.array([1 - STYLE_SHARE * (len(styles) - 1), *[STYLE_SHARE] * (len(styles) - 1)])

    def write(chunk: Chunk, i: int) -> None:
        index = int(rng.choice(len(styles), p=shares))
        system = str(rng.choice(SYSTEM_PROMPTS)) if rng.random() < SYSTEM_PROMPT_SHARE else ""
        if index > 0:
            system = styles[index].prompt
        situation, continuation = next(pairs[index])
        write_sample(chunk, i, situation, system, writer, rng, styles[index], continuation)

    return write


def situation_writers(
    tokenizer: Tokenizer, style: Style | None = None
) -> Callable[[int], Callable[[Chunk, int], None]]:
    """Return `situation_writer` for a SampleStream, which supplies the seed."""
    return partial(situation_writer, tokenizer, style)
