# SPDX-License-Identifier: Apache-2.0
"""FusedDecoder: a decode step of all layers, queued as launches of five kernels per layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels.cuda.fused.plan import FusedPlan, FusedTuning, Launch
from edgellm_ros.kernels.cuda.fused.shape import FusedShape
from edgellm_ros.kernels.cuda.fused.weights import FusedLayerWeights, FusedWeights

OLDEST = 80  # compute capability 8.0: asynchronous copies to shared memory, bf16
EARLY_START = 90  # compute capability from which a kernel may start before the one before it has ended

Compile = Callable[[FusedPlan], Any]  # to an object with the method `launch` of `FusedProgram`


class FusedDecoder:
    """Decode steps of one model on one device, one token per row.

    - device: a `CudaDevice`
    - compile: makes a program of a plan; None = for the device, from the cache of compiled kernels

    EngineError if the device's architecture is older than sm_80 or the shape is not supported.
    """

    def __init__(
        self,
        device: Any,
        shape: FusedShape,
        weights: FusedWeights,
        compile: Compile | None = None,
        tuning: FusedTuning | None = None,
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
        compile = compile or _compiler(device)
        self._variants: dict[int, _Variant] = {}  # by number of rows
        rows = 1
        while rows < 2 * shape.max_rows:
            plan = FusedPlan(shape, rows, device.multiprocessors, device.most_shared_memory, self._tuning)
            self._variants[rows] = _Variant(plan, compile(plan))
            rows *= 2
        form, size = shape.form("gate_up"), 2 * shape.hidden * shape.inner
        gate_up = 2 * size if form is None else size * form.bits // 8
        self._prefetched = min(self._tuning.prefetched_bytes, gate_up // 16 * 16)
        sizes: dict[str, int] = {}
        for variant in self._variants.values():
            for name, nbytes in variant.plan.scratch_bytes().items():
                sizes[name] = max(nbytes, sizes.get(name, 0))
        self._scratch = {name: device.empty((nbytes,), np.uint8) for name, nbytes in sizes.items()}

    def run(self, tensors: Mapping[str, Tensor]) -> None:
        """Queue one step on the device's stream.

        Only launches kernels, so the step can be recorded. tensors: those of `llm/model.cuda.onnx` for one
        token per row, by binding name: inputs_embeds [B,1,H], rope_cos and rope_sin [P,R/2] fp32,
        position_ids [B,1], kv_length [B] (with the new token), key_cache_i and value_cache_i [B,Hkv,C,D],
        logits [B,1,V] fp32, hidden_states_i [B,1,H]; embedding or lm_head.weight if the weights have no
        LM head. Others are ignored. A batch is at most `shape.max_rows`.
        """
        for program, launch, arguments in self.launches(tensors):
            program.launch(launch, *arguments)

    def launches(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[Any, Launch, tuple[int, ...]]]:
        """Yield program, kernel and arguments of each launch of a step.

        The first kernel waits for everything before it, on behalf of all.
        """
        shape, rows = self._shape, tensors["inputs_embeds"].shape[0]
        if not 1 <= rows <= shape.max_rows:
            raise EngineError(f"a batch of {rows}, expected 1 to {shape.max_rows}")
        variant = next(each for size, each in self._variants.items() if size >= rows)
        for layer, weights in enumerate(self._weights.layers):
            for name, arguments in self._layer(tensors, layer, weights, rows).items():
                early = self._early and (layer > 0 or name != "qkv")
                yield variant.program, variant.plan.launch(name, rows, early), arguments
        head = self._weights.lm_head
        head = head or tensors["embedding" if shape.tied else "lm_head.weight"].pointer
        residual, logits = self._scratch["residual"].pointer, tensors["logits"].pointer
        hidden = self._hidden_states(tensors, shape.layers)
        launch = variant.plan.launch("lm_head", rows, self._early)
        yield variant.program, launch, (head, self._weights.norm, residual, logits, hidden, rows)

    def _layer(
        self, tensors: Mapping[str, Tensor], layer: int, weights: FusedLayerWeights, rows: int
    ) -> dict[str, tuple[int, ...]]:
        """Return the arguments of a layer's kernels, in the order of their launches."""
        scratch = {name: tensor.pointer for name, tensor in self._scratch.items()}
        residual, qkv, gate_up = scratch["residual"], scratch["qkv"], scratch["gate_up"]
        splits = scratch["split_sums"], scratch["split_scales"]
        length = tensors["kv_length"].pointer
        rope = (tensors[name].pointer for name in ("rope_cos", "rope_sin", "position_ids"))
        caches = (tensors[f"{name}_cache_{layer}"].pointer for name in ("key", "value"))
        window = self._shape.window(layer) or 0
        embeds = 0 if layer else tensors["inputs_embeds"].pointer
        hidden = self._hidden_states(tensors, layer)
        return {
            "qkv": (weights.qkv, weights.input_norm, embeds, residual, qkv, hidden, rows),
            "attention": (
                qkv, weights.qkv_bias, weights.q_norm, weights.k_norm, *rope, length, *caches,
                *splits, window, weights.gate_up, self._prefetched,
            ),
            "o": (weights.o, weights.o_bias, *splits, length, residual, window, rows),
            "gate_up": (weights.gate_up, weights.post_norm, residual, gate_up, rows),
            "down": (weights.down, weights.down_bias, weights.gate_up_bias, gate_up, residual, rows),
        }  # fmt: skip

    def _hidden_states(self, tensors: Mapping[str, Tensor], layer: int) -> int:
        """Return the address of an output of hidden states; 0 if the model has no such output."""
        if layer not in self._shape.hidden_state_layers:
            return 0
        return tensors[f"hidden_states_{layer}"].pointer


class _Variant:
    """The kernels for up to so many rows."""

    def __init__(self, plan: FusedPlan, program: Any) -> None:
        self.plan, self.program = plan, program


def compute_capability(arch: str) -> int:
    """Return 90 for "sm_90"."""
    return int("".join(filter(str.isdigit, arch)))


def _compiler(device: Any) -> Compile:
    from edgellm_ros.kernels.cuda.fused.compiler import cached_kernels
    from edgellm_ros.kernels.cuda.fused.program import FusedProgram

    return lambda plan: FusedProgram(device, cached_kernels(device.arch, plan))
