# SPDX-License-Identifier: Apache-2.0
"""FusedPrompt: the KV rows of prompts in the cache of a draft head, as one launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.fused.params import DraftPromptParams
from edgellm_ros.fused.plan.launch import OLDEST
from edgellm_ros.fused.plan.prompt import PromptPlan
from edgellm_ros.fused.plan.shape import FusedDraftShape
from edgellm_ros.fused.variants import Compile, compiler_for
from edgellm_ros.fused.weights import FusedWeights
from edgellm_ros.kernels.capability import EARLY_START, compute_capability


class FusedPrompt:
    """KV rows of prompts of one head on one device; parameters as of `FusedChain`.

    EngineError, with the reason, if device or head are not supported.
    """

    def __init__(
        self, device: Any, shape: FusedDraftShape, weights: FusedWeights, compile: Compile | None = None
    ) -> None:
        capability = compute_capability(device.arch)
        if capability < OLDEST:
            raise EngineError(f"no kernel for prompts: {device.arch} is older than sm_{OLDEST}")
        self._plan = PromptPlan(shape, device.most_shared_memory)
        self._early, self._weights = capability >= EARLY_START, weights
        self._program = (compile or compiler_for(device))(self._plan)

    def run(
        self,
        embeds: Tensor,
        states: Tensor,
        cos: Tensor,
        sin: Tensor,
        lengths: Tensor,
        caches: Mapping[str, Tensor],
    ) -> None:
        """Queue the write of KV rows; see `PromptRows`."""
        layer = self._weights.layers[0]
        batch, tokens, _ = embeds.shape
        if not batch * tokens:
            return
        params = DraftPromptParams(
            qkv=layer.qkv,
            qkv_bias=layer.qkv_bias,
            k_norm=layer.k_norm,
            embed_norm=layer.input_norm,
            state_norm=layer.state_norm,
            embeds=embeds.pointer,
            states=states.pointer,
            cos_table=cos.pointer,
            sin_table=sin.pointer,
            lengths=lengths.pointer,
            key_cache=caches["key_cache_0"].pointer,
            value_cache=caches["value_cache_0"].pointer,
            tokens=tokens,
        )
        self._program.launch(self._plan.launch(batch, tokens, self._early), params)
