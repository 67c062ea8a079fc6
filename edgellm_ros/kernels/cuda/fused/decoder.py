# SPDX-License-Identifier: Apache-2.0
"""FusedDecoder: a decode step of all layers, queued as launches of kernels.

A layer has six kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels.cuda.compiler import EARLY_START, compute_capability
from edgellm_ros.kernels.cuda.fused.fusion import FusedFusion, FusionShape, FusionWeights
from edgellm_ros.kernels.cuda.fused.plan import FusedPlan, FusedTuning, Launch
from edgellm_ros.kernels.cuda.fused.shape import FusedShape
from edgellm_ros.kernels.cuda.fused.weights import FusedLayerWeights, FusedWeights

LORA_TABLE = "lora_table"  # the tensor that has the adapters of the sequences
OLDEST = 80  # compute capability 8.0: asynchronous copies to shared memory, bf16

Compile = Callable[[Any], Any]  # a plan to an object with the method `launch` of `FusedProgram`


@dataclass(frozen=True)
class StateFusion:
    """A draft head's fusion of the residual stream at the inputs of three layers.

    layers: counted from 0; the number of layers is the output of the last.
    """

    layers: tuple[int, ...]
    shape: FusionShape
    weights: FusionWeights


class FusedDecoder:
    """Decode steps of one model on one device.

    A step has one token or several tokens per sequence.

    - device: a `CudaDevice`
    - compile: makes a program of a plan; None = for the device, from the cache of compiled kernels
    - fusion: of a draft head, whose output is `fused_hidden_states`

    `max_rows`: most tokens of a step, of all sequences. They are fewer than the shape's where the device has
    too little shared memory for these. `max_adapted_rows`: the same, of sequences with LoRA adapters; 0 if
    the shape has none.

    EngineError if the device's architecture is older than sm_80 or the shape is not supported.
    """

    def __init__(
        self,
        device: Any,
        shape: FusedShape,
        weights: FusedWeights,
        compile: Compile | None = None,
        tuning: FusedTuning | None = None,
        fusion: StateFusion | None = None,
    ) -> None:
        reason = shape.unsupported()
        if reason is not None:
            raise EngineError(f"the fused kernels do not support this model: {reason}")
        if len(weights.layers) != shape.layers:
            raise ValueError(f"weights of {len(weights.layers)} layers for a shape of {shape.layers}")
        capability = compute_capability(device.arch)
        if capability < OLDEST:
            raise EngineError(f"the fused kernels need compute capability 8.0, the GPU is {device.arch}")
        self._shape, self._weights = shape, weights
        self._tuning = tuning or FusedTuning()
        self._early = self._tuning.early_start and capability >= EARLY_START
        self._device, self._compile = device, compile or compiler_for(device)
        self._variants = self._make_variants(shape)
        self._adapted: dict[int, Variant] | None = None  # compiled when the first adapter is used
        self._adapted_plans = self._make_plans(shape, adapted=True) if shape.lora_rank else {}
        self.max_adapted_rows = min(shape.max_rows, max(self._adapted_plans, default=0))
        self.max_rows = min(shape.max_rows, max(self._variants))
        plans = [variant.plan for variant in self._variants.values()]
        self._scratch = self._make_scratch([*plans, *self._adapted_plans.values()])
        self._fusion = fusion
        self._states: dict[int, Tensor] = {}  # by layer from 0
        if fusion is not None:
            threads = min(256, self._tuning.threads)
            self._fuse = FusedFusion(device, fusion.shape, fusion.weights, self._compile, threads)
            rows = (self.max_rows, shape.hidden)
            self._states = {layer: device.empty(rows, np.uint16) for layer in fusion.layers if layer}

    def _make_plans(self, shape: FusedShape, adapted: bool = False) -> dict[int, FusedPlan]:
        """Plan kernels for a shape, by largest number of rows.

        There are plans up to what the device has room for. adapted: for sequences with LoRA adapters.
        """
        device, plans, rows = self._device, dict[int, FusedPlan](), 1
        while rows < 2 * shape.max_rows:
            sizes = rows, device.multiprocessors, device.most_shared_memory
            try:
                plans[rows] = FusedPlan(shape, *sizes, self._tuning, adapted)
            except EngineError:
                if rows == 1 and not adapted:
                    raise
                break
            rows *= 2
        return plans

    def _make_variants(self, shape: FusedShape) -> dict[int, Variant]:
        """Make kernels for a shape, by largest number of rows."""
        return self._compiled(self._make_plans(shape))

    def _compiled(self, plans: Mapping[int, FusedPlan]) -> dict[int, Variant]:
        return {rows: Variant(plan, self._compile(plan)) for rows, plan in plans.items()}

    def _make_scratch(self, plans: Iterable[FusedPlan]) -> dict[str, Tensor]:
        """Allocate the buffers between the kernels of any of the plans."""
        sizes: dict[str, int] = {}
        for plan in plans:
            for name, nbytes in plan.scratch_bytes().items():
                sizes[name] = max(nbytes, sizes.get(name, 0))
        return {name: self._device.zeros((nbytes,), np.uint8) for name, nbytes in sizes.items()}

    def run(self, tensors: Mapping[str, Tensor]) -> None:
        """Queue one step on the device's stream.

        Only launches kernels, so the step can be recorded. tensors: those of `llm/model.cuda.onnx` or
        `llm/verify.cuda.onnx`, by binding name: inputs_embeds [B,S,H], rope_cos and rope_sin [P,R/2] fp32,
        position_ids [B,S], kv_length [B] (with the new tokens, which are in the last S of these rows),
        key_cache_i and value_cache_i [B,Hkv,C,D], logits [B,S,V] fp32 of all tokens, hidden_states_i [B,S,H];
        attention_mask [B,1,S,C] bool if the tokens of a sequence are a tree, without which they are a chain;
        embedding or lm_head.weight if the weights have no LM head; fused_hidden_states [B,S,Hd] if there is a
        fusion; lora_table [L,4,B,3] if sequences have adapters. Others are ignored. B * S is at most
        `max_rows`, with adapters `max_adapted_rows`. With a mask and a sliding window, a token's position is
        the number of rows before the new ones and of the new rows that it sees.
        """
        for program, launch, arguments in self.launches(tensors):
            program.launch(launch, *arguments)

    def launches(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[Any, Launch, tuple[int, ...]]]:
        """Yield program, kernel and arguments of each launch of a step.

        The first kernel waits for everything before it, on behalf of all.
        """
        shape, (batch, tokens, _) = self._shape, tensors["inputs_embeds"].shape
        rows, most = batch * tokens, self.max_adapted_rows if LORA_TABLE in tensors else self.max_rows
        if not 1 <= rows <= most:
            raise EngineError(f"{batch} sequences of {tokens} tokens, expected 1 to {most} rows")
        variant = self._variant(tensors, rows)
        early = False
        for layer, weights in enumerate(self._weights.layers):
            for name, arguments in self._layer(tensors, layer, weights, rows, tokens).items():
                if variant.plan.has(name):
                    yield variant.program, variant.plan.launch(name, rows, early, tokens), arguments
                    early = self._early
        head = self._weights.lm_head
        head = head or tensors["embedding" if shape.tied else "lm_head.weight"].pointer
        residual, logits = self._scratch["residual"].pointer, tensors["logits"].pointer
        hidden = self._hidden_states(tensors, shape.layers)
        norm, x = self._weights.norm, self._scratch["x"].pointer
        if variant.plan.apart["lm_head"]:
            launch = variant.plan.launch("lm_head_x", rows, self._early)
            yield variant.program, launch, (norm, residual, hidden, x, rows)
        launch = variant.plan.launch("lm_head", rows, self._early)
        yield variant.program, launch, (head, norm, residual, logits, hidden, x, rows)
        if self._fusion is not None:
            yield from self._fusion_launches(self._fusion.layers, tensors, variant, rows)

    def _variant(self, tensors: Mapping[str, Tensor], rows: int) -> Variant:
        """Return the kernels for so many rows.

        Those with adapters are compiled when they are first used.
        """
        if LORA_TABLE not in tensors:
            return variant_for(self._variants, rows)
        if self._adapted is None:
            self._adapted = self._compiled(self._adapted_plans)
        return variant_for(self._adapted, rows)

    def _fusion_launches(
        self, layers: Sequence[int], tensors: Mapping[str, Tensor], variant: Variant, rows: int
    ) -> Iterator[tuple[Any, Launch, tuple[int, ...]]]:
        """Yield the launches that follow a step."""
        last = self._shape.layers
        if last in layers:
            launch = variant.plan.launch("last_state", rows, self._early)
            arguments = self._scratch["residual"].pointer, self._states[last].pointer, rows
            yield variant.program, launch, arguments
        states = [self._state(tensors, layer) for layer in layers]
        out = tensors["fused_hidden_states"].pointer
        yield from self._fuse.launches(states, out, rows, self._early)

    def _state(self, tensors: Mapping[str, Tensor], layer: int) -> int:
        """Return the address of the residual stream at the input of a layer.

        A draft head takes this state.
        """
        if not layer:
            return tensors["inputs_embeds"].pointer
        output = self._hidden_states(tensors, layer) if layer < self._shape.layers else 0
        return output or self._states[layer].pointer

    def _layer(
        self,
        tensors: Mapping[str, Tensor],
        layer: int,
        weights: FusedLayerWeights,
        rows: int,
        tokens: int,
    ) -> dict[str, tuple[int, ...]]:
        """Return the arguments of a layer's kernels, in the order of their launches.

        Those with names in _x are launched only if the plan has a kernel of its own for x.
        """
        plan = self._variant(tensors, rows).plan
        scratch = {name: tensor.pointer for name, tensor in self._scratch.items()}
        residual, qkv, gate_up, x = (scratch[name] for name in ("residual", "qkv", "gate_up", "x"))
        splits = scratch["split_sums"], scratch["split_scales"]
        length = tensors["kv_length"].pointer
        rope = [tensors[name].pointer for name in ("rope_cos", "rope_sin", "position_ids")]
        caches = [tensors[f"{name}_cache_{layer}"].pointer for name in ("key", "value")]
        window = self._shape.window(layer) or 0
        embeds = 0 if layer else tensors["inputs_embeds"].pointer
        hidden = self._state(tensors, layer) if layer in self._states else self._hidden_states(tensors, layer)
        made = qkv, weights.qkv_bias, weights.q_norm, weights.k_norm, *rope, length, *caches
        attention: dict[str, tuple[int, ...]] = {"attention": (*made, *splits, window)}
        most_splits = 0
        if plan.makes_new_rows(tokens):
            queries, most_splits = scratch["queries"], plan.tree_splits(rows, tokens)
            mask = tensors["attention_mask"].pointer if tokens > 1 and "attention_mask" in tensors else 0
            seen = queries, length, *caches, *splits, window, mask, tokens, most_splits
            attention = {"new_rows": (*made, queries, tokens), "tree_attention": seen}
            if plan.attends_in_batch(tokens):
                attention = {"batch_attention": (*made, *splits, window, most_splits)}
        merge = window, tokens, most_splits
        qkv_lora, o_lora, gate_up_lora, down_lora = _adapters(tensors, layer)
        return {
            "qkv_x": (weights.input_norm, embeds, residual, hidden, x, rows, weights.qkv),
            "qkv": (
                weights.qkv, weights.input_norm, embeds, residual, qkv, hidden, x, rows, qkv_lora, tokens,
            ),
            **attention,
            "o_x": (*splits, length, x, *merge, weights.o),
            "o": (
                weights.o, weights.o_bias, *splits, length, residual, x, window, rows, tokens, most_splits,
                o_lora,
            ),
            "gate_up_x": (weights.post_norm, residual, x, rows, weights.gate_up),
            "gate_up": (
                weights.gate_up, weights.post_norm, residual, gate_up, x, rows, gate_up_lora, tokens,
            ),
            "down_x": (weights.gate_up_bias, gate_up, x, weights.down),
            "down": (
                weights.down, weights.down_bias, weights.gate_up_bias, gate_up, residual, x, rows, down_lora,
                tokens,
            ),
        }  # fmt: skip

    def _hidden_states(self, tensors: Mapping[str, Tensor], layer: int) -> int:
        """Return the address of an output of hidden states; 0 if the model has none."""
        if layer not in self._shape.hidden_state_layers:
            return 0
        return tensors[f"hidden_states_{layer}"].pointer


def _adapters(tensors: Mapping[str, Tensor], layer: int) -> Iterator[int]:
    """Yield the addresses of a layer's four parts of `lora_table`; 0 without adapters."""
    table = tensors.get(LORA_TABLE)
    for product in range(4):
        nbytes = 0 if table is None else 8 * table.shape[2] * table.shape[3]
        yield 0 if table is None else table.pointer + (4 * layer + product) * nbytes


@dataclass(frozen=True)
class Variant:
    """The kernels for up to so many rows."""

    plan: FusedPlan
    program: Any


def variant_for(variants: Mapping[int, Variant], rows: int) -> Variant:
    """Return the smallest kernels that take so many rows."""
    return next(each for size, each in variants.items() if size >= rows)


def compiler_for(device: Any) -> Callable[[Any], Any]:
    """Return what makes a program of a plan for a device.

    The program comes from the cache of compiled kernels.
    """
    from edgellm_ros.kernels.cuda.fused.compiler import cached_kernels
    from edgellm_ros.kernels.cuda.fused.program import FusedProgram

    return lambda plan: FusedProgram(device, cached_kernels(device.arch, plan))
