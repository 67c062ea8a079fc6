# SPDX-License-Identifier: Apache-2.0
"""A decoder with random weights, whose steps in the fused kernels are timed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from edgellm_ros.engine.device import on_device
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.fused.decoder import FusedDecoder
from edgellm_ros.fused.description.decoder import FUSED_FILE, FusedModel
from edgellm_ros.fused.loading.availability import described
from edgellm_ros.fused.loading.device_weights import fused_shape
from edgellm_ros.fused.plan.decoder import FusedPlan
from edgellm_ros.fused.plan.quantized import ALIGNMENT, Quantized
from edgellm_ros.fused.plan.shape import FusedShape
from edgellm_ros.fused.plan.tuning import DENSE, QUANTIZED, TunedStep, Tuning
from edgellm_ros.fused.variants import Compile, compiler_for
from edgellm_ros.fused.weights import FusedLayerWeights, FusedWeights

LARGEST = 4096  # hidden size that stands for rows of the table without a limit
MATRICES = ("qkv", "o", "gate_up", "down")
ROWS_OF_ENGINES = 1, 4, 8, 16


@dataclass(frozen=True)
class Conditions:
    """What is measured, and how often."""

    layers: int
    vocab: int
    context: int
    steps: int
    turns: int
    tied: bool = True  # the LM head has the weights of the embedding


def shape_of(step: TunedStep, conditions: Conditions) -> FusedShape:
    """Return the shape that stands for a row of the table."""
    hidden = (step.hidden or LARGEST) // 64 * 64
    heads = max(1, hidden // 256 * 2)
    forms = tuple((name, Quantized(4, 128)) for name in MATRICES) if step.weights == QUANTIZED else ()
    return FusedShape(
        dtype="fp16",
        layers=conditions.layers,
        hidden=hidden,
        heads=heads,
        kv_heads=next(count for count in (8, 4, 2, 1) if heads % count == 0),
        head_dim=128,
        inner=hidden * 3,
        vocab=conditions.vocab,
        rotary_dim=128,
        capacity=conditions.context + 64,
        qk_norm=True,
        tied=conditions.tied,
        max_rows=step.rows,
        quantized=forms,
    )


def engine_steps(
    engine: Path, tuning: Tuning, rows: tuple[int, ...] = ROWS_OF_ENGINES
) -> dict[TunedStep, FusedShape]:
    """Return rows of the table for an engine directory's decoder, and their shapes.

    Each row is for up to so many rows of a step and the decoder's hidden size, and has the sizes that the
    table has for it now.
    """
    config = EngineConfig.load(engine)
    model = FusedModel.load(described(engine, FUSED_FILE, config, "the engine"))
    shapes = [replace(fused_shape(config, model, count, adapts=False), max_rows=count) for count in rows]
    return {
        TunedStep(
            QUANTIZED if shape.quantized else DENSE,
            shape.max_rows,
            -(-shape.hidden // 64) * 64,
            tuning.config(shape, shape.max_rows),
        ): shape
        for shape in shapes
    }


def with_steps(tuning: Tuning, added: list[TunedStep]) -> Tuning:
    """Return a table with more rows.

    Each is placed before those of its weights that hold for more, and replaces a row of the same limits.
    """
    limits = {(step.weights, step.rows, step.hidden) for step in added}
    steps = [step for step in tuning.steps if (step.weights, step.rows, step.hidden) not in limits]
    for step in added:
        follows = (
            step.weights == other.weights
            and (step.rows, step.hidden or LARGEST + 1) <= (other.rows, other.hidden or LARGEST + 1)
            for other in steps
        )
        steps.insert(list(follows).index(True), step)
    return replace(tuning, steps=tuple(steps))


class Decoder:
    """Random weights and inputs of a shape on a device, whose steps are measured.

    - trees: the rows of a step are the tokens of one sequence, a verification; else one of each sequence
    - compile: makes a program of a plan; None = for the device
    """

    def __init__(
        self,
        device: Any,
        shape: FusedShape,
        conditions: Conditions,
        compile: Compile | None = None,
        trees: bool = False,
    ) -> None:
        self._device, self._shape, self._conditions = device, shape, conditions
        self._tokens = shape.max_rows if trees else 1
        self._make = compile or compiler_for(device)
        self._random = np.random.default_rng(0)
        self._kept: list[Tensor] = []  # what the weights' addresses are of
        table = self._values(shape.vocab, shape.hidden)
        layers = tuple(self._layer() for _ in range(shape.layers))
        self._weights = FusedWeights(layers, self._values(shape.hidden).pointer, table.pointer)
        self._tensors = dict(self._inputs())

    def seconds(self, tuning: Tuning) -> float | None:
        """Return the time of a step; None if the device has no room for its kernels."""
        try:
            decoder = FusedDecoder(self._device, self._shape, self._weights, self._compile, tuning)
            if decoder.max_rows < self._shape.max_rows:
                return None
            graph = self._device.capture(lambda: decoder.run(self._tensors))
        except EngineError:
            return None
        for _ in range(3):
            graph.launch(self._device.stream)
        begin = self._device.mark()
        for _ in range(self._conditions.steps):
            graph.launch(self._device.stream)
        return self._device.mark().seconds_since(begin) / self._conditions.steps

    def program(self, tuning: Tuning) -> object:
        """Return what tells the kernels of a step apart; None if they do not fit."""
        plan = self._plan(tuning)
        return None if plan is None else (plan.macros(), plan.shared, plan.blocks, plan.prepared)

    def prepare(self, tunings: Sequence[Tuning]) -> None:
        """Compile the kernels of several tables in threads, for `seconds`."""
        plans = {str(plan.macros()): plan for plan in map(self._plan, tunings) if plan is not None}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for made in [pool.submit(self._make, plan) for plan in plans.values()]:
                with contextlib.suppress(EngineError):  # `seconds` has no time for it either
                    made.result()

    def _plan(self, tuning: Tuning) -> FusedPlan | None:
        device, rows = self._device, 1 << (self._shape.max_rows - 1).bit_length()
        try:
            return FusedPlan(self._shape, rows, device.multiprocessors, device.most_shared_memory, tuning)
        except EngineError:
            return None

    def _compile(self, plan: FusedPlan) -> Any:
        """Make the program of a plan; None for fewer rows than the steps have."""
        return self._make(plan) if plan.rows >= self._shape.max_rows else None

    def _values(self, *shape: int) -> Tensor:
        """Return random fp16 values; large tensors repeat 2**20 of them."""
        count = int(np.prod(shape))
        block = (self._random.standard_normal(min(count, 1 << 20)) * 0.02).astype(np.float16)
        tensor = on_device(self._device, np.resize(block, shape).view(np.uint16))
        self._kept.append(tensor)
        return tensor

    def _matrix(self, name: str, k: int, n: int) -> int:
        form = self._shape.form(name)
        if form is None:
            return self._values(k, n).pointer
        nbytes = sum(-(-part // ALIGNMENT) * ALIGNMENT for part in form.parts(k, n))
        return self._values(nbytes // 2).pointer

    def _layer(self) -> FusedLayerWeights:
        shape = self._shape
        return FusedLayerWeights(
            input_norm=self._values(shape.hidden).pointer,
            qkv=self._matrix("qkv", shape.hidden, shape.qkv_size),
            o=self._matrix("o", shape.q_size, shape.hidden),
            post_norm=self._values(shape.hidden).pointer,
            gate_up=self._matrix("gate_up", shape.hidden, 2 * shape.inner),
            down=self._matrix("down", shape.inner, shape.hidden),
            q_norm=self._values(shape.head_dim).pointer,
            k_norm=self._values(shape.head_dim).pointer,
        )

    def _inputs(self) -> Iterator[tuple[str, Tensor]]:
        shape, device, tokens = self._shape, self._device, self._tokens
        context, batch = self._conditions.context, self._shape.max_rows // tokens
        angles = np.arange(shape.capacity)[:, None] * np.logspace(0, -4, shape.rotary_dim // 2)[None]
        yield "rope_cos", on_device(device, np.cos(angles).astype(np.float32))
        yield "rope_sin", on_device(device, np.sin(angles).astype(np.float32))
        yield "position_ids", on_device(device, np.tile(context + np.arange(tokens), (batch, 1)))
        yield "kv_length", on_device(device, np.full(batch, context + tokens, np.int64))
        if tokens > 1:
            visible = np.arange(shape.capacity) <= context + np.arange(tokens)[:, None]
            yield "attention_mask", on_device(device, np.tile(visible, (batch, 1, 1, 1)))
        yield "inputs_embeds", self._values(batch, tokens, shape.hidden)
        yield "logits", device.empty((batch, tokens, shape.vocab), np.float32)
        for i in range(shape.layers):
            for kind in ("key", "value"):
                yield f"{kind}_cache_{i}", self._values(batch, shape.kv_heads, shape.capacity, shape.head_dim)
