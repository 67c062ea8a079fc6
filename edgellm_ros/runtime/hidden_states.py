# SPDX-License-Identifier: Apache-2.0
"""HiddenStates: what the prompts of the last batch became inside the language model, for those who ask."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.tensor import Tensor


class HiddenStates:
    """Owns the buffers that the engine's `hidden_states_i` are written to in a prefill.

    Layer 0 is the input of the language model, with the encoders' rows in place; layer i what its i-th layer
    puts out. Sizes are those of the largest batch of the longest prompts; an engine that was exported
    without hidden states has no buffers.
    """

    def __init__(
        self,
        device: Device,
        layers: Sequence[int],
        *,
        batch: int,
        tokens: int,
        hidden_size: int,
        dtype: np.dtype,
    ) -> None:
        self._buffers = {i: device.empty((batch, tokens, hidden_size), dtype) for i in layers}
        self._last: dict[int, Tensor] = {}

    def outputs(self, batch: int, tokens: int) -> list[Tensor]:
        """Where a prefill writes, [batch, tokens, H] for each layer that the engine puts out."""
        return [buffer.view(batch, tokens, buffer.shape[2]) for buffer in self._buffers.values()]

    def keep(self, inputs_embeds: Tensor) -> None:
        """Offer what a prefill of inputs_embeds [B,S,H] has written."""
        batch, tokens, _ = inputs_embeds.shape
        self._last = {0: inputs_embeds, **dict(zip(self._buffers, self.outputs(batch, tokens), strict=True))}

    def clear(self) -> None:
        """Offer nothing: a new batch begins."""
        self._last = {}

    def layer(self, index: int) -> Tensor | None:
        """[B,S,H] of the last batch; None if nobody asked for it or the engine does not put it out."""
        return self._last.get(index)

    @property
    def prefill_length(self) -> int:
        """S, the longest prompt of the batch; 0 if nobody asked."""
        return self._last[0].shape[1] if self._last else 0
