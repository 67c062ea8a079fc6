# SPDX-License-Identifier: Apache-2.0
"""An endless stream of training samples: arena situations, rendered, written as token sequences.

Worker processes draw situations and fill slots of shared memory; the trainer takes full slots and hands them
back. NumPy only: workers never import PyTorch.
"""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from tokenizers import Tokenizer

from edgellm_ros.arena.renderer import render
from edgellm_ros.arena.situation import Situation, situations
from training.spec import HISTORY, SYSTEM_PROMPTS

MAX_LENGTH = 224
HORIZON = 40
IMAGE_SHAPE = (224, 320, 3)
MERGED_GRID = (7, 10)
IMAGE_TOKENS = MERGED_GRID[0] * MERGED_GRID[1]

FIELDS = {
    "image": (IMAGE_SHAPE, np.uint8),
    "ids": ((MAX_LENGTH,), np.int16),
    "position_ids": ((3, MAX_LENGTH), np.int16),
    "image_start": ((), np.int16),
    "prompt_length": ((), np.int16),
    "length": ((), np.int16),
    "rope_delta": ((), np.int16),
    "has_actions": ((), np.bool_),
    "actions": ((HORIZON, 2), np.float32),
}


def history_token_bins(history: np.ndarray) -> np.ndarray:
    """Trajectory history [N, 2] in the current base frame -> bins [2N]: first point, then differences."""
    values = np.concatenate([history[:1], np.diff(history, axis=0)]).astype(np.float64)
    low, high = np.asarray(HISTORY["low"]), np.asarray(HISTORY["high"])
    bins = np.rint((values - low) / (high - low) * (HISTORY["num_tokens"] - 1))
    return np.clip(bins, 0, HISTORY["num_tokens"] - 1).astype(np.int64).reshape(-1)


@dataclass(frozen=True)
class SequenceWriter:
    """Writes a situation as the token sequence that the runtime makes of the same request."""

    tokenizer: Tokenizer

    def _text(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def prompt(self, command: str, history: np.ndarray, system: str) -> tuple[list[int], int]:
        """(ids, index of the first image token)."""
        t = self.tokenizer.token_to_id
        ids: list[int] = []
        if system:
            ids += [t("<|im_start|>"), *self._text("system\n" + system), t("<|im_end|>"), *self._text("\n")]
        ids += [t("<|im_start|>"), *self._text("user\n"), t("<|vision_start|>")]
        image_start = len(ids)
        ids += [t("<|image_pad|>")] * IMAGE_TOKENS + [t("<|vision_end|>"), t("<|traj_history_start|>")]
        ids += (history_token_bins(history) + t("<|traj_0|>")).tolist()
        ids += [t("<|traj_history_end|>"), *self._text(command), t("<|im_end|>"), *self._text("\n")]
        ids += [t("<|im_start|>"), *self._text("assistant\n")]
        return ids, image_start

    def answer(self, text: str, has_actions: bool) -> list[int]:
        """Answer ids with the stop token that says whether a trajectory follows."""
        stop = "<|traj_future_start|>" if has_actions else "<|im_end|>"
        return [*self._text(text), self.tokenizer.token_to_id(stop)]


def mrope_positions(length: int, image_start: int) -> tuple[np.ndarray, int]:
    """Qwen3-Omni's positions of one image in text: ([3, length], delta to add to indices after the image)."""
    rows, columns = MERGED_GRID
    positions = np.tile(np.arange(length), (3, 1))
    end = image_start + IMAGE_TOKENS
    positions[0, image_start:end] = image_start
    positions[1, image_start:end] = image_start + np.repeat(np.arange(rows), columns)
    positions[2, image_start:end] = image_start + np.tile(np.arange(columns), rows)
    delta = max(rows, columns) - IMAGE_TOKENS
    positions[:, end:] += delta
    return positions, delta


def write_sample(
    out: dict[str, np.ndarray], i: int, situation: Situation, system: str, writer: SequenceWriter, rng
) -> None:
    """Fill row i of a chunk; the image is rendered here."""
    ids, image_start = writer.prompt(situation.command.text, situation.history, system)
    sequence = ids + writer.answer(situation.answer, situation.has_actions)
    if len(sequence) > MAX_LENGTH:
        raise ValueError(f"{situation.command.text!r}: {len(sequence)} tokens, at most {MAX_LENGTH}")
    positions, delta = mrope_positions(MAX_LENGTH, image_start)
    out["image"][i] = render(situation.scene, situation.state, rng)
    out["ids"][i] = 0
    out["ids"][i, : len(sequence)] = sequence
    out["position_ids"][i] = positions
    out["image_start"][i], out["rope_delta"][i] = image_start, delta
    out["prompt_length"][i], out["length"][i] = len(ids), len(sequence)
    out["has_actions"][i] = situation.has_actions
    out["actions"][i] = situation.actions if situation.has_actions else 0.0


def new_chunk(size: int) -> dict[str, np.ndarray]:
    """Empty rows of every field."""
    return {name: np.zeros((size, *shape), dtype) for name, (shape, dtype) in FIELDS.items()}


class SampleStream:
    """Worker processes that fill chunks of samples without end.

    Start it before CUDA is initialised: workers are forked.
    """

    def __init__(self, tokenizer_file: Path, workers: int, chunk: int = 128, slots: int = 48, seed: int = 0):
        context = mp.get_context("fork")
        self.chunk = chunk
        self._buffers = []
        for _ in range(slots):
            fields = {}
            for name, (shape, dtype) in FIELDS.items():
                count = chunk * int(np.prod(shape, dtype=np.int64))
                raw = context.RawArray("b", count * np.dtype(dtype).itemsize)
                fields[name] = np.frombuffer(raw, dtype).reshape(chunk, *shape)
            self._buffers.append(fields)
        self._free, self._full = context.SimpleQueue(), context.Queue()
        for slot in range(slots):
            self._free.put(slot)
        self._processes = [
            context.Process(target=self._work, args=(str(tokenizer_file), seed * 10_000 + i), daemon=True)
            for i in range(workers)
        ]
        for process in self._processes:
            process.start()

    def _work(self, tokenizer_file: str, seed: int) -> None:
        cv2.setNumThreads(1)
        writer = SequenceWriter(Tokenizer.from_file(tokenizer_file))
        rng = np.random.default_rng([seed, 1])
        source = situations(seed, "train")
        while True:
            slot = self._free.get()
            for i in range(self.chunk):
                system = str(rng.choice(SYSTEM_PROMPTS)) if rng.random() < 0.4 else ""
                write_sample(self._buffers[slot], i, next(source), system, writer, rng)
            self._full.put(slot)

    def take(self, wait: bool) -> Iterator[dict[str, np.ndarray]]:
        """Yield the chunks that are ready, at least one if `wait`; each until the next is asked for."""
        first = wait
        while first or not self._full.empty():
            first = False
            slot = self._full.get(timeout=120)
            yield self._buffers[slot]
            self._free.put(slot)

    def close(self) -> None:
        """Stop the workers."""
        for process in self._processes:
            process.terminate()
