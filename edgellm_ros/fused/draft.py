# SPDX-License-Identifier: Apache-2.0
"""FusedDraft: runs of a draft head, as launches of fused kernels.

The kernels of `FusedDecoder` run between two of FusedDraft's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.fused.decoder import FusedDecoder
from edgellm_ros.fused.params import DraftHeadParams, JoinedQkvParams, KernelParams
from edgellm_ros.fused.plan.shape import FusedDraftShape
from edgellm_ros.fused.plan.tuning import Tuning
from edgellm_ros.fused.variants import Compile, Step, make_plans, make_scratch, variant_for
from edgellm_ros.fused.weights import FusedWeights


class FusedDraft(FusedDecoder):
    """Runs of one draft head on one device.

    Parameters, errors and `max_rows` are as of `FusedDecoder`.
    """

    def __init__(
        self,
        device: Any,
        shape: FusedDraftShape,
        weights: FusedWeights,
        compile: Compile | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        super().__init__(device, shape, weights, compile, tuning)
        self._draft, self._later = shape, self._variants
        if shape.layers > 1:
            self._later = self._compiled(
                make_plans(device, dataclasses.replace(shape, joined=False), self._tuning)
            )
            variants = [*self._variants.values(), *self._later.values()]
            self._scratch = make_scratch(device, (variant.plan for variant in variants))

    def launches(self, tensors: Mapping[str, Tensor]) -> Iterator[Step]:
        """Yield program, kernel and parameters of each launch of a run.

        The first kernel does not start early: it waits for all work before it, on behalf of all kernels, and
        beside a small kernel its CTAs would not be spread evenly over the SMs.

        tensors: those of `draft/model.cuda.onnx` by binding name: those of `FusedDecoder.run` for B sequences
        of S tokens, hidden_states [B,S,H], last_token_ids [B,N], logits [B,N,V] fp32 of these tokens, and
        next_hidden_states [B,S,H].
        """
        shape, scratch = self._draft, self._scratch
        batch, tokens, _ = tensors["inputs_embeds"].shape
        rows, chosen = batch * tokens, tensors["last_token_ids"].shape[1]
        if not 1 <= max(rows, batch * chosen) <= self.max_rows:
            raise EngineError(f"{batch} sequences of {tokens} tokens, expected 1 to {self.max_rows} in all")
        for layer in range(len(self._weights.layers)):
            variant = variant_for(self._later if layer else self._variants, rows)
            for name, params in self._layer(tensors, layer, rows, tokens).items():
                if variant.plan.has(name):
                    early = self.starts_early and (layer > 0 or name != "joined_qkv")
                    yield variant.program, variant.plan.launch(name, rows, early, tokens), params
        variant = variant_for(self._variants, batch * chosen)
        states = tensors["next_hidden_states"].pointer
        params = DraftHeadParams(
            weights=self._weights.lm_head,
            norm=self._weights.norm,
            residual=scratch["residual"].pointer,
            last_token_ids=tensors["last_token_ids"].pointer,
            logits=tensors["logits"].pointer,
            states=states,
            batch=batch,
            tokens=tokens,
            chosen=chosen,
            normed_states=int(shape.feeds_back_normed_state),
        )
        launch = variant.plan.launch("draft_head", batch * chosen, self.starts_early)
        yield variant.program, launch, params

    def _layer(
        self, tensors: Mapping[str, Tensor], layer: int, rows: int, tokens: int
    ) -> dict[str, KernelParams]:
        params, weights = super()._layer(tensors, layer, rows, tokens), self._weights.layers[layer]
        if layer:
            return params
        first = JoinedQkvParams(
            weights=weights.qkv,
            embed_norm=weights.input_norm,
            state_norm=weights.state_norm,
            embeds=tensors["inputs_embeds"].pointer,
            states=tensors["hidden_states"].pointer,
            residual=self._scratch["residual"].pointer,
            partials=self._scratch["qkv"].pointer,
            begins_normed=int(self._draft.norm_before_residual),
            rows=rows,
        )
        return {"joined_qkv": first, **{name: params[name] for name in list(params)[2:]}}
