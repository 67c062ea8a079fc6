# SPDX-License-Identifier: Apache-2.0
"""PromptMixer: the recurrent mixers of a prefill, between their products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.fused.params import (
    ConvolveTokensParams,
    GateTokensParams,
    PrepareChunksParams,
    ScanChunksParams,
)
from edgellm_ros.fused.plan.prompt_mixer import PromptMixerPlan
from edgellm_ros.fused.plan.shape import FusedShape
from edgellm_ros.fused.products import Matrix, Products
from edgellm_ros.fused.prompt_part import PromptPart
from edgellm_ros.fused.variants import Compile
from edgellm_ros.fused.weights import FusedLayerWeights


class PromptMixer:
    """Recurrent mixers, and the states between the parts of a long prompt.

    - products: computes products with weights
    - rows: most tokens of a part, over all sequences
    - layers: number of layers with a mixer
    - compile: makes a program of a plan

    EngineError, with the reason, if the kernels do not take the shape.
    """

    def __init__(
        self, device: Any, shape: FusedShape, products: Products, rows: int, layers: int, compile: Compile
    ) -> None:
        mixer = shape.recurrent
        assert mixer is not None
        self._products, self._hidden, self._mixer = products, shape.hidden, mixer
        self._plan = PromptMixerPlan(shape, device.multiprocessors, device.most_shared_memory)
        self._program = compile(self._plan)
        self._conv_bytes = 4 * mixer.channels * (mixer.conv_kernel - 1)
        sizes = {**self._plan.scratch_bytes(rows), "between": layers * self._conv_bytes}
        self._scratch = {name: device.zeros((nbytes,), np.uint8) for name, nbytes in sizes.items()}

    def run(self, part: PromptPart, weights: FusedLayerWeights, number: int, x: int) -> Matrix:
        """Run a mixer up to the product after it, whose matrix is returned.

        number: of the layer's states; x: [rows,H], then the product's input [rows,values].
        """
        mixer, multiply = self._mixer, self._products.multiply
        launch = self._program.launch
        scratch = {name: tensor.pointer for name, tensor in self._scratch.items()}
        plan, tensors, tokens = self._plan, part.tensors, {"tokens": part.tokens}
        projected, convolved = scratch["projected"], scratch["convolved"]
        valid = {"valid_tokens": tensors["valid_tokens"].pointer, "first": part.first}
        multiply(x, Matrix(weights.in_proj, self._hidden, mixer.in_size), projected, part.rows)
        past, following = self._conv_states(tensors, part, number)
        convolve = ConvolveTokensParams(
            projected=projected,
            taps=weights.taps,
            conv_bias=weights.conv_bias,
            conv_states=past,
            next_conv_states=following,
            convolved=convolved,
            **valid,
            **tokens,
        )
        launch(plan.convolve(part.batch, part.tokens), convolve)
        prepare = PrepareChunksParams(
            projected=projected,
            convolved=convolved,
            decay=weights.decay,
            dt_bias=weights.dt_bias,
            operands=scratch["operands"],
            **valid,
            **tokens,
        )
        launch(plan.prepare(part.batch, part.tokens), prepare)
        present = tensors[f"present_recurrent_state_{number}"].pointer
        scan = ScanChunksParams(
            operands=scratch["operands"],
            states=present if part.first else tensors[f"recurrent_state_{number}"].pointer,
            next_states=present,
            y=scratch["y"],
            **tokens,
        )
        launch(plan.scan(part.batch), scan)
        gate = GateTokensParams(
            projected=projected,
            convolved=convolved,
            y=scratch["y"],
            norm=weights.mixer_norm,
            skip=weights.skip,
            x=x,
        )
        launch(plan.gate(part.rows), gate)
        return Matrix(weights.out_proj, mixer.values, self._hidden)

    def _conv_states(self, tensors: Mapping[str, Tensor], part: PromptPart, number: int) -> tuple[int, int]:
        """Return the addresses of a convolution's last inputs before and after a part.

        Its CTAs read and write them in any order, so two buffers take turns; the last part writes the output.
        """
        present = tensors[f"present_conv_state_{number}"].pointer
        between = self._scratch["between"].pointer + number * self._conv_bytes
        turns = present, between
        following = turns[part.parts_behind % 2]
        if not part.first:
            return tensors[f"conv_state_{number}"].pointer, following
        return turns[(part.parts_behind + 1) % 2], following
