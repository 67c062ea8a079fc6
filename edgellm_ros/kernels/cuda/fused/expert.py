# SPDX-License-Identifier: Apache-2.0
"""FusedExpert: Euler steps of an action expert, queued as launches of kernels.

A layer has five kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels.cuda.fused.decoder import EARLY_START, OLDEST, compiler_for, compute_capability
from edgellm_ros.kernels.cuda.fused.expert_plan import ExpertPlan, ExpertTuning, plan_samples
from edgellm_ros.kernels.cuda.fused.expert_shape import ExpertShape
from edgellm_ros.kernels.cuda.fused.expert_weights import ExpertWeights
from edgellm_ros.kernels.cuda.fused.plan import Launch
from edgellm_ros.kernels.protocol import ConditionedStep

Compile = Callable[[ExpertPlan], Any]  # to an object with the method `launch` of `FusedProgram`
Step = tuple[Any, Launch, tuple[int, ...]]  # program, kernel, arguments


class FusedExpert:
    """Euler steps of one action expert on one device.

    A step is computed for all samples of a sequence at once.

    - device: a `CudaDevice`
    - max_samples: the most samples of a run
    - compile: makes a program of a plan; None = for the device, from the cache of compiled kernels

    EngineError if the device's architecture is older than sm_80 or the shape is not supported.
    """

    def __init__(
        self,
        device: Any,
        shape: ExpertShape,
        weights: ExpertWeights,
        max_samples: int,
        compile: Compile | None = None,
        tuning: ExpertTuning | None = None,
    ) -> None:
        reason = shape.unsupported()
        if reason is not None:
            raise EngineError(f"the fused kernels do not support this action expert: {reason}")
        if len(weights.layers) != len(shape.kv_caches):
            raise ValueError(f"weights of {len(weights.layers)} layers for {len(shape.kv_caches)} KV caches")
        capability = compute_capability(device.arch)
        if capability < OLDEST:
            raise EngineError(f"the fused kernels need compute capability 8.0, the GPU is {device.arch}")
        tuning = tuning or ExpertTuning()
        compile = compile or compiler_for(device)
        self._shape, self._weights, self._max_samples = shape, weights, max_samples
        self._early = tuning.early_start and capability >= EARLY_START
        programs: dict[int, tuple[ExpertPlan, Any]] = {}  # by rows of a block
        self._variants = []  # by number of samples, from 1
        for samples in range(1, max_samples + 1):
            plan = plan_samples(shape, samples, device.multiprocessors, device.most_shared_memory, tuning)
            if plan.row_tile not in programs:
                programs[plan.row_tile] = plan, compile(plan)
            self._variants.append(programs[plan.row_tile])
        rows, dtype = max_samples * shape.horizon, np.uint16
        self._residual = device.empty((rows, shape.hidden), np.float32)
        self._qkv = device.empty((rows, shape.qkv_size), dtype)
        self._attended = device.empty((rows, shape.q_size), dtype)
        self._inner = device.empty((rows, shape.inner), dtype)

    def step(
        self,
        tensors: Mapping[str, Tensor],
        time_row: Tensor,
        dt: float,
        first: bool,
        conditioned: ConditionedStep | None = None,
    ) -> None:
        """Queue one Euler step on the device's stream: trajectory += dt * velocity.

        Only launches kernels, so the step can be recorded. tensors: those of `action/model.cuda.onnx`, by
        binding name: trajectory [n,T,A] fp32, rope_cos and rope_sin [1,T,R/2] fp32, kv_length [1],
        key_cache_i and value_cache_i [1,Hkv,C,D]; others are ignored. time_row [H] fp32: the bias of the
        input projection plus the embedding of the step's time. first: anything but an Euler step was queued
        before. conditioned: the step continues a chunk.
        """
        for program, launch, arguments in self.launches(tensors, time_row, dt, first, conditioned):
            program.launch(launch, *arguments)

    def launches(
        self,
        tensors: Mapping[str, Tensor],
        time_row: Tensor,
        dt: float,
        first: bool,
        conditioned: ConditionedStep | None = None,
    ) -> Iterator[Step]:
        """Yield program, kernel and arguments of each launch of a step.

        The first kernel of the first step waits for everything before it, on behalf of all.
        """
        samples = tensors["trajectory"].shape[0]
        if not 1 <= samples <= self._max_samples:
            raise EngineError(f"{samples} samples, expected 1 to {self._max_samples}")
        plan, program = self._variants[samples - 1]
        trajectory, rows = tensors["trajectory"].pointer, samples * self._shape.horizon
        rope = tensors["rope_cos"].pointer, tensors["rope_sin"].pointer
        residual, qkv = self._residual.pointer, self._qkv.pointer
        attended, inner = self._attended.pointer, self._inner.pointer
        clean, condition = (0, 0), (0, 0)
        if conditioned is not None:
            clean = conditioned.clean.pointer, conditioned.clean_time_row.pointer
            condition = conditioned.previous.pointer, conditioned.factors.pointer
        for layer, weights in enumerate(self._weights.layers):
            cache = self._shape.kv_caches[layer]
            begin: tuple[int, ...] = (0, 0, 0, 0, 0)
            if layer == 0:
                begin = trajectory, self._weights.in_proj, time_row.pointer, *clean
            norms = weights.input_norm, weights.q_norm, weights.k_norm
            keys, values = (tensors[f"{name}_cache_{cache}"].pointer for name in ("key", "value"))
            kernels = {
                "qkv": (weights.qkv, *norms, *rope, residual, qkv, *begin, rows),
                "attention": (qkv, tensors["kv_length"].pointer, keys, values, attended),
                "o": (weights.o, attended, residual, rows),
                "gate_up": (weights.gate_up, weights.post_norm, residual, inner, rows),
                "down": (weights.down, inner, residual, rows),
            }
            for name, arguments in kernels.items():
                early = self._early and (layer > 0 or name != "qkv" or not first)
                yield program, plan.launch(name, samples, early), arguments
        last = self._weights.out_proj, self._weights.out_bias, self._weights.norm
        bits = int(np.float32(dt).view(np.uint32))
        launch = plan.launch("finish", samples, self._early)
        yield program, launch, (*last, residual, trajectory, bits, *condition, rows)
