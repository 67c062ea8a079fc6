# SPDX-License-Identifier: Apache-2.0
"""FusedDraft: runs of a draft head, as launches of fused kernels.

These are the kernels of `FusedDecoder`, between two of FusedDraft's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels.cuda.fused.decoder import Compile, FusedDecoder, variant_for
from edgellm_ros.kernels.cuda.fused.plan import FusedTuning, Launch
from edgellm_ros.kernels.cuda.fused.shape import FusedShape
from edgellm_ros.kernels.cuda.fused.weights import FusedLayerWeights, FusedWeights


@dataclass(frozen=True)
class FusedDraftShape(FusedShape):
    """Sizes and switches of a draft head with an LM head [H,V] of its own.

    - norm_before_residual: the residual stream begins with the normed states
    - feeds_back_normed_state: the next states are those after the last norm
    - joined: the kernels of the first layer, whose qkv has 2H inputs; False: those of the layers after it
    """

    norm_before_residual: bool = False
    feeds_back_normed_state: bool = False
    joined: bool = True

    def unsupported(self) -> str | None:
        if self.tied:
            return "the LM head is the embedding table"
        return super().unsupported()


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
        tuning: FusedTuning | None = None,
    ) -> None:
        super().__init__(device, shape, weights, compile, tuning)
        self._draft, self._later = shape, self._variants
        if shape.layers > 1:
            self._later = self._make_variants(dataclasses.replace(shape, joined=False))
            variants = [*self._variants.values(), *self._later.values()]
            self._scratch = self._make_scratch(variant.plan for variant in variants)

    def launches(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[Any, Launch, tuple[int, ...]]]:
        """Yield program, kernel and arguments of each launch of a run.

        The first kernel waits for everything before it, on behalf of all. If it started early, beside a small
        kernel, its blocks would not be spread evenly over the multiprocessors.

        tensors: those of `draft/model.cuda.onnx` by binding name: those of `FusedDecoder.run` for B sequences
        of S tokens, hidden_states [B,S,H], last_token_ids [B,N], logits [B,N,V] fp32 of these tokens, and
        next_hidden_states [B,S,H].
        """
        shape, scratch = self._draft, self._scratch
        batch, tokens, _ = tensors["inputs_embeds"].shape
        rows, chosen = batch * tokens, tensors["last_token_ids"].shape[1]
        if not 1 <= max(rows, batch * chosen) <= self.max_rows:
            raise EngineError(f"{batch} sequences of {tokens} tokens, expected 1 to {self.max_rows} in all")
        for layer, weights in enumerate(self._weights.layers):
            variant = variant_for(self._later if layer else self._variants, rows)
            for name, arguments in self._layer(tensors, layer, weights, rows, tokens).items():
                if variant.plan.has(name):
                    early = self._early and (layer > 0 or name != "joined_qkv")
                    yield variant.program, variant.plan.launch(name, rows, early, tokens), arguments
        variant = variant_for(self._variants, batch * chosen)
        states = tensors["next_hidden_states"].pointer
        yield variant.program, variant.plan.launch("draft_head", batch * chosen, self._early), (
            self._weights.lm_head, self._weights.norm, scratch["residual"].pointer,
            tensors["last_token_ids"].pointer, tensors["logits"].pointer, states, batch, tokens, chosen,
            int(shape.feeds_back_normed_state),
        )  # fmt: skip

    def _layer(
        self,
        tensors: Mapping[str, Tensor],
        layer: int,
        weights: FusedLayerWeights,
        rows: int,
        tokens: int,
    ) -> dict[str, tuple[int, ...]]:
        arguments = super()._layer(tensors, layer, weights, rows, tokens)
        if layer:
            return arguments
        embeds, states = tensors["inputs_embeds"].pointer, tensors["hidden_states"].pointer
        residual, qkv = self._scratch["residual"].pointer, self._scratch["qkv"].pointer
        norms = weights.input_norm, weights.state_norm
        begins_normed = int(self._draft.norm_before_residual)
        first = weights.qkv, *norms, embeds, states, residual, qkv, begins_normed, rows
        return {"joined_qkv": first, **{name: arguments[name] for name in list(arguments)[2:]}}

