# SPDX-License-Identifier: Apache-2.0
"""FusedDecoder: a decode step of all layers, queued as launches of a few kernels per layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels.cuda.fused.shape import FusedShape
from edgellm_ros.kernels.cuda.fused.weights import FusedWeights


class FusedDecoder:
    """Decode steps of one model on one device, one token per row.

    - device: a `CudaDevice`
    - program: an object with the method `launch` of `CudaProgram`; None = compiled for the device

    EngineError if the device's architecture is older than sm_80 or the shape is not supported.
    """

    def __init__(self, device: Any, shape: FusedShape, weights: FusedWeights, program: Any = None) -> None:
        raise NotImplementedError

    def run(self, tensors: Mapping[str, Tensor]) -> None:
        """Queue one step on the device's stream.

        Only launches kernels, so the step can be recorded. tensors: those of `llm/model.cuda.onnx` for one
        token per row, by binding name: inputs_embeds [B,1,H], rope_cos and rope_sin [P,R/2] fp32,
        position_ids [B,1], kv_length [B] (with the new token), key_cache_i and value_cache_i [B,Hkv,C,D],
        logits [B,1,V] fp32, hidden_states_i [B,1,H]; embedding or lm_head.weight if the weights have no
        LM head. Others are ignored. A batch is at most `shape.max_rows`.
        """
        raise NotImplementedError
