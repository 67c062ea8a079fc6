# SPDX-License-Identifier: Apache-2.0
"""Dequantised checkpoints, rounded in PyTorch, and engines compared on them.

A quantised engine should be the engine of the checkpoint that holds the rounded weights as plain numbers.
"""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest

GROUP = 128
HEAD = "lm_head.weight"
LAYERS = "model.layers."  # prefix of the weights that are rounded
UNCHANGED = ("draft", "lora")  # folders of a checkpoint that a copy does not need


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """Round a weight [N,K] to 4 bits as `--quantize int4` does; returns it in fp32."""
    blocks = weight.float().unflatten(1, (-1, GROUP))
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scales = (largest / -8).half().float()  # of an engine in fp16
    return ((blocks / scales).round().clamp(-8, 7) * scales).flatten(1)


def rounded_head(weight: torch.Tensor) -> torch.Tensor:
    """Round an LM head [V,H] to 8 bits in groups, with scales in fp16."""
    blocks = weight.float().unflatten(1, (-1, GROUP))
    scales = (blocks.abs().amax(-1, keepdim=True) / 127).half().float()
    return ((blocks / scales).round().clamp(-128, 127) * scales).flatten(1)


def write_dequantized(checkpoint: Path, directory: Path) -> Path:
    """Copy a checkpoint in fp32, its layers rounded to 4 bits, its LM head to 8."""
    shutil.copytree(checkpoint, directory, ignore=shutil.ignore_patterns(*UNCHANGED))
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        chosen = [name for name, each in tensors.items() if name.startswith(LAYERS) and each.dim() == 2]
        tensors |= {name: rounded(tensors[name]) for name in chosen}
        if HEAD in tensors:
            tensors[HEAD] = rounded_head(tensors[HEAD])
        save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    return directory


@dataclass(frozen=True)
class GreedyAnswer:
    """Tokens of an answer, and the logits that each was chosen from."""

    prompt: list[int]
    tokens: list[int]
    logits: np.ndarray  # [tokens,V]


def answer(runtime: LLMInferenceRuntime, requests: Iterable[LLMGenerationRequest]) -> list[GreedyAnswer]:
    """Answer requests one by one, with the logits of every step."""
    answers = []
    with recorded_logits(runtime) as rows:
        for request in requests:
            rows.clear()
            tokens = runtime.handle_request(request).token_ids
            prompt = list(runtime.base_model_input_token_ids[0])
            answers.append(GreedyAnswer(prompt, tokens, np.stack(rows[: len(tokens)])))
    return answers


@contextmanager
def recorded_logits(runtime: LLMInferenceRuntime) -> Iterator[list[np.ndarray]]:
    """Append the logits [V] of every prefill and decode step to the list, row 0."""
    runner, device, rows = runtime.pipeline.runner, runtime.pipeline.device, []

    def recording(run: Callable[..., None]) -> Callable[..., None]:
        def run_and_record(*arguments: Any, **options: Any) -> None:
            given = inspect.signature(run).bind(*arguments, **options).arguments
            run(*arguments, **options)
            rows.append(device.download(given["output_logits"])[0, 0].astype(np.float32))

        return run_and_record

    with pytest.MonkeyPatch.context() as patch:
        for name in ("execute_prefill_step", "execute_vanilla_decoding_step"):
            patch.setattr(runner, name, recording(getattr(runner, name)))
        yield rows


@dataclass(frozen=True)
class Difference:
    """The first different token of a quantised and a plain engine's answers."""

    prompt: int
    position: int
    tokens: tuple[int, int]  # quantised, plain
    margin: float  # between the reference's logits of both


@dataclass
class Agreement:
    """A quantised engine beside reference and engine of the dequantised weights.

    Errors are those of logits after equal tokens; relative: of a whole vector in the Euclidean norm, and of
    the largest difference to the largest logit.
    """

    euclidean: float = 0.0
    maximum: float = 0.0
    arithmetic: float = 0.0  # largest absolute error of the dequantised engine against the reference
    positions: int = 0
    equal: int = 0
    differences: list[Difference] = field(default_factory=list)

    def ties(self) -> list[Difference]:
        """Return the differences that the arithmetic's error in both logits explains."""
        return [each for each in self.differences if each.margin <= 2 * self.arithmetic]


def compare(
    quantized: Sequence[GreedyAnswer],
    dequantized: Sequence[GreedyAnswer],
    reference: Callable[[int, GreedyAnswer], np.ndarray],
) -> Agreement:
    """Compare answers to the same prompts.

    reference: logits [n,V] of the dequantised weights after the first tokens of an answer to prompt i.
    """
    found = Agreement()
    for i, (mine, plain) in enumerate(zip(quantized, dequantized, strict=True)):
        assert mine.prompt == plain.prompt
        expected = reference(i, mine)
        logits = mine.logits[: len(expected)]
        error, size = logits - expected, np.linalg.norm(expected, axis=-1)
        found.euclidean = max(found.euclidean, float((np.linalg.norm(error, axis=-1) / size).max()))
        found.maximum = max(found.maximum, float((np.abs(error).max(-1) / np.abs(expected).max(-1)).max()))
        found.positions += len(expected)
        pairs = enumerate(zip(mine.tokens, plain.tokens, strict=False))
        differing = [position for position, (one, other) in pairs if one != other]
        same = differing[0] if differing else min(len(mine.tokens), len(plain.tokens)) - 1
        common = min(same + 1, len(expected))  # positions after equal tokens
        worst = np.abs(plain.logits[:common] - expected[:common]).max()
        found.arithmetic = max(found.arithmetic, float(worst))
        found.equal += mine.tokens == plain.tokens
        if differing:
            tokens = mine.tokens[same], plain.tokens[same]
            margin = abs(float(expected[same][tokens[0]]) - float(expected[same][tokens[1]]))
            found.differences.append(Difference(i, same, tokens, margin))
    return found
