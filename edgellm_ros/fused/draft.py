# SPDX-License-Identifier: Apache-2.0
"""FusedDraft: runs of a draft head, as launches of fused kernels.

The kernels of `FusedDecoder` run between two of FusedDraft's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.fused.decoder import FusedDecoder
from edgellm_ros.fused.fusion import FusedFusion
from edgellm_ros.fused.params import DraftHeadParams, JoinedQkvParams, KernelParams
from edgellm_ros.fused.plan.decoder import FusedPlan
from edgellm_ros.fused.plan.fusion import FusionShape
from edgellm_ros.fused.plan.shape import FusedDraftShape
from edgellm_ros.fused.plan.tuning import Tuning
from edgellm_ros.fused.variants import Compile, Step, compile_variants, make_plans, make_scratch, variant_for
from edgellm_ros.fused.weights import FusedWeights, FusionWeights


@dataclass(frozen=True)
class Projection:
    """What makes one row of an embedding and a state, for an MTP head."""

    shape: FusionShape
    weights: FusionWeights
    state_first: bool  # the state is before the embedding


class FusedDraft(FusedDecoder):
    """Runs of one draft head on one device.

    Parameters, errors and `max_rows` are as of `FusedDecoder`. projection: of an MTP head.
    """

    def __init__(
        self,
        device: Any,
        shape: FusedDraftShape,
        weights: FusedWeights,
        compile: Compile | None = None,
        tuning: Tuning | None = None,
        projection: Projection | None = None,
    ) -> None:
        super().__init__(device, shape, weights, compile, tuning)
        (self._first,) = self._variants
        self._draft, self._later, self._projection = shape, self._first, projection
        if projection is not None:
            sizes, threads = projection.shape, self._tuning.fusion_threads
            self._project = FusedFusion(device, sizes, projection.weights, self._compile, threads)
            self._projected = device.empty((self.max_rows, shape.hidden), np.uint16)
            return
        if shape.layers > 1:
            plans = make_plans(device, dataclasses.replace(shape, joined=False), self._tuning)
            (self._later,) = compile_variants(self._compile, plans)
            variants = [*self._first.values(), *self._later.values()]
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
        first = self._projection is None
        if self._projection is not None:
            yield from self._projection_launches(self._projection, tensors, rows)
            tensors = {**tensors, "inputs_embeds": self._projected}
        for layer in range(len(self._weights.layers)):
            variant = variant_for(self._later if layer else self._first, rows)
            for name, params in self._layer(variant.plan, tensors, layer, rows, tokens).items():
                if variant.plan.has(name):
                    early, first = self.starts_early and not first, False
                    yield variant.program, variant.plan.launch(name, rows, early, tokens), params
        variant = variant_for(self._first, batch * chosen)
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

    def _projection_launches(
        self, projection: Projection, tensors: Mapping[str, Tensor], rows: int
    ) -> Iterator[Step]:
        """Yield the launches that make the rows of the first layer."""
        pair = [tensors[name].pointer for name in ("inputs_embeds", "hidden_states")]
        if projection.state_first:
            pair.reverse()
        yield from self._project.launches(pair, self._projected.pointer, rows, self.starts_early, first=True)

    def _layer(
        self, plan: FusedPlan, tensors: Mapping[str, Tensor], layer: int, rows: int, tokens: int
    ) -> dict[str, KernelParams]:
        params, weights = super()._layer(plan, tensors, layer, rows, tokens), self._weights.layers[layer]
        if layer or self._projection is not None:
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
