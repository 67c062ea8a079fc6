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
from edgellm_ros.fused.expert_weights import ExpertWeights
from edgellm_ros.fused.params import (
    ExpertAttentionParams,
    ExpertDownParams,
    ExpertFinishParams,
    ExpertGateUpParams,
    ExpertOParams,
    ExpertQkvParams,
    KernelParams,
)
from edgellm_ros.fused.plan.expert import ExpertPlan, ExpertTuning, plan_samples
from edgellm_ros.fused.plan.expert_shape import ExpertShape
from edgellm_ros.fused.plan.launch import OLDEST, Launch
from edgellm_ros.fused.variants import compiler_for
from edgellm_ros.kernels.action_protocol import ConditionedStep
from edgellm_ros.kernels.capability import EARLY_START, compute_capability

Compile = Callable[[ExpertPlan], Any]  # to an object with the method `launch` of `FusedProgram`
Step = tuple[Any, Launch, KernelParams]  # a program, and a launch of one of its kernels


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
        programs: dict[int, tuple[ExpertPlan, Any]] = {}  # by rows of a CTA
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
        input projection plus the embedding of the step's time. first: what was queued before is not an Euler
        step. conditioned: inputs of a step that continues a chunk.
        """
        for program, launch, params in self.launches(tensors, time_row, dt, first, conditioned):
            program.launch(launch, params)

    def launches(
        self,
        tensors: Mapping[str, Tensor],
        time_row: Tensor,
        dt: float,
        first: bool,
        conditioned: ConditionedStep | None = None,
    ) -> Iterator[Step]:
        """Yield program, kernel and parameters of each launch of a step.

        The first kernel of the first step waits for all work before it, on behalf of all kernels.
        """
        samples = tensors["trajectory"].shape[0]
        if not 1 <= samples <= self._max_samples:
            raise EngineError(f"{samples} samples, expected 1 to {self._max_samples}")
        plan, program = self._variants[samples - 1]
        trajectory, rows = tensors["trajectory"].pointer, samples * self._shape.horizon
        residual, qkv = self._residual.pointer, self._qkv.pointer
        attended, inner = self._attended.pointer, self._inner.pointer
        begin = {"trajectory": trajectory, "in_weights": self._weights.in_proj, "time_row": time_row.pointer}
        begin |= {"clean": 0, "clean_time_row": 0}
        previous = factors = 0
        if conditioned is not None:
            clean_time_row = conditioned.clean_time_row.pointer
            begin |= {"clean": conditioned.clean.pointer, "clean_time_row": clean_time_row}
            previous, factors = conditioned.previous.pointer, conditioned.factors.pointer
        for layer, weights in enumerate(self._weights.layers):
            cache = self._shape.kv_caches[layer]
            kernels: dict[str, KernelParams] = {
                "qkv": ExpertQkvParams(
                    weights=weights.qkv,
                    norm=weights.input_norm,
                    q_norm=weights.q_norm,
                    k_norm=weights.k_norm,
                    cos_rows=tensors["rope_cos"].pointer,
                    sin_rows=tensors["rope_sin"].pointer,
                    residual=residual,
                    out=qkv,
                    rows=rows,
                    **(begin if layer == 0 else dict.fromkeys(begin, 0)),
                ),
                "attention": ExpertAttentionParams(
                    qkv=qkv,
                    kv_length=tensors["kv_length"].pointer,
                    keys=tensors[f"key_cache_{cache}"].pointer,
                    values=tensors[f"value_cache_{cache}"].pointer,
                    out=attended,
                ),
                "o": ExpertOParams(weights=weights.o, x=attended, residual=residual, rows=rows),
                "gate_up": ExpertGateUpParams(
                    weights=weights.gate_up, norm=weights.post_norm, residual=residual, out=inner, rows=rows
                ),
                "down": ExpertDownParams(weights=weights.down, x=inner, residual=residual, rows=rows),
            }
            for name, params in kernels.items():
                early = self._early and (layer > 0 or name != "qkv" or not first)
                yield program, plan.launch(name, samples, early), params
        last = ExpertFinishParams(
            weights=self._weights.out_proj,
            bias=self._weights.out_bias,
            norm=self._weights.norm,
            residual=residual,
            trajectory=trajectory,
            step=int(np.float32(dt).view(np.uint32)),
            previous=previous,
            factors=factors,
            rows=rows,
        )
        yield program, plan.launch("finish", samples, self._early), last
