# SPDX-License-Identifier: Apache-2.0
"""LoRA inputs of a language model's graph: names, shapes and packing of adapters.

A linear layer with LoRA inputs computes y = x W + (x A) B. Layers that read the same x share one pair of
inputs, so that the graph has two products for all of them:

    <module>.lora_A.weight [K, r]       <module>.lora_B.weight [r, N]          one layer
    <parent>.<name>:<N>+<name>:<N>+...  A [K, n r], B [n r, sum of N]          n layers, such as
    model.layers.0.self_attn.q_proj:256+k_proj:128+v_proj:128.lora_A.weight    [K, 3r]

A of n layers holds their matrices side by side; B holds theirs on the diagonal, with zeros elsewhere. r is
the rank that is bound, the same for all inputs of a run; 0 is the base model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_JOINED = 4  # most layers that share one pair of inputs: those into a gated delta net
_INPUT = re.compile(r"(.+)\.lora_([AB])\.weight")
# The decoder's layers in whatever model: the decoder alone, a thinker, a language model beside encoders.
# `backbone` is the decoder of Nemotron-H in its published code.
_DECODER = re.compile(
    r"(?:thinker\.)?(?:model\.)?(?:language_model\.)?(?:model\.|backbone\.)?(?P<module>layers\.\d+\..+)"
)
Weights = Mapping[str, tuple[np.ndarray, np.ndarray]]  # module -> A [K, rank], B [rank, N]


@dataclass(frozen=True)
class LoraInput:
    """One pair of LoRA inputs."""

    name: str  # without ".lora_A.weight"
    fan_in: int  # K
    modules: Mapping[str, int]  # full name of each linear layer -> its fan_out

    @property
    def a_name(self) -> str:
        """Return the name of the input A [K, n r]."""
        return f"{self.name}.lora_A.weight"

    @property
    def b_name(self) -> str:
        """Return the name of the input B [n r, sum of N]."""
        return f"{self.name}.lora_B.weight"

    def shapes(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Compute the shapes of A and B at a rank."""
        joined = len(self.modules) * rank
        return (self.fan_in, joined), (joined, sum(self.modules.values()))

    def is_adapted(self, weights: Weights) -> bool:
        """Tell whether an adapter changes any of these layers."""
        return any(module in weights for module in self.modules)

    def pack(self, weights: Weights, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Lay out an adapter's matrices as A and B, float32.

        Layers of a smaller rank, and layers without an adapter, are padded with zeros.
        """
        a, b = (np.zeros(shape, np.float32) for shape in self.shapes(rank))
        row = column = 0
        for module, fan_out in self.modules.items():
            if module in weights:
                given_a, given_b = weights[module]
                rows = slice(row, row + given_a.shape[1])
                a[:, rows] = given_a
                b[rows, column : column + fan_out] = given_b
            row, column = row + rank, column + fan_out
        return a, b


def engine_module(name: str) -> str:
    """Return the engine's name of a module of a checkpoint or of an adapter.

    Modules of the decoder are called `model.layers.<i>...`, whatever model the decoder is part of, because
    transformers and PEFT name them after the classes around it.
    """
    decoder = _DECODER.fullmatch(name)
    return f"model.{decoder['module']}" if decoder else name


def input_name(parent: str, parts: Mapping[str, int]) -> str:
    """Make the name of a pair of inputs.

    The inputs are for the layers `parts` (name -> fan_out) of the module `parent`.
    """
    joined = "+".join(f"{name}:{fan_out}" for name, fan_out in parts.items())
    return f"{parent}.{joined if len(parts) > 1 else next(iter(parts))}"


def rank_symbol(joined: int) -> str:
    """Return the symbol of the rank dimension of `joined` layers: r, 2r, 3r."""
    return "r" if joined == 1 else f"{joined}r"


def rank_sizes(rank: int) -> dict[str, int]:
    """Compute the sizes of all dimensions that follow from a rank, by their symbols."""
    return {rank_symbol(joined): joined * rank for joined in range(1, MAX_JOINED + 1)}


def is_lora_input(name: str) -> bool:
    """Tell whether an input of a graph is a LoRA input."""
    return _INPUT.fullmatch(name) is not None


def lora_inputs(shapes: Mapping[str, Sequence[Any]]) -> list[LoraInput]:
    """Find the LoRA inputs among an engine's inputs, name -> shape."""
    found = []
    for name, shape in shapes.items():
        match = _INPUT.fullmatch(name)
        if match and match[2] == "A":
            parent, _, joined = match[1].rpartition(".")
            parts = [part.partition(":") for part in joined.split("+")]
            total = int(shapes[f"{match[1]}.lora_B.weight"][1])
            modules = {f"{parent}.{part}": int(size) if size else total for part, _, size in parts}
            found.append(LoraInput(match[1], int(shape[0]), modules))
    return found


def lora_targets(inputs: Sequence[LoraInput]) -> dict[str, tuple[int, int]]:
    """List the linear layers that an adapter may change, with their sizes (K, N)."""
    return {module: (entry.fan_in, fan_out) for entry in inputs for module, fan_out in entry.modules.items()}
