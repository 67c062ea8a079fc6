# SPDX-License-Identifier: Apache-2.0
"""HiddenStates: hidden states of the last batch's prompts, stored on request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.tensor import Tensor


class HiddenStates:
    """Owns the buffers of the engine's outputs `hidden_states_i` of a prefill.

    Layer 0 is the input of the language model, encoder rows included; layer i is the output of its i-th
    layer. The buffers have room for the largest batch of the longest runs. An engine that was exported
    without hidden states needs no buffers.
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
        self._tokens = tokens
        self._buffers = {i: device.empty((batch, tokens, hidden_size), dtype) for i in layers}
        self._last: dict[int, Tensor] = {}

    def outputs(self, batch: int, tokens: int, layers: Sequence[int]) -> list[Tensor]:
        """Return a prefill's output tensors [batch, tokens, H] of each of these layers."""
        buffers = [self._buffers[layer] for layer in layers]
        return [buffer.view(batch, tokens, buffer.shape[2]) for buffer in buffers]

    def check(self, lengths: Sequence[int]) -> None:
        """Raise ValueError unless the states of prompts of these lengths can be kept."""
        for index, length in enumerate(lengths):
            if length > self._tokens:
                where = f"request {index}: " if len(lengths) > 1 else ""
                raise ValueError(
                    f"{where}the prompt has {length} tokens; hidden states are kept of at most "
                    f"{self._tokens} (max_input_len)"
                )

    def keep(self, inputs_embeds: Tensor, layers: Sequence[int]) -> None:
        """Keep these layers' states of a prefill until `clear`; inputs_embeds [B,S,H]."""
        batch, tokens, _ = inputs_embeds.shape
        outputs = self.outputs(batch, tokens, layers)
        self._last = {0: inputs_embeds, **dict(zip(layers, outputs, strict=True))}

    def clear(self) -> None:
        """Drop the hidden states: a new batch begins."""
        self._last = {}

    def layer(self, index: int) -> Tensor | None:
        """Return a layer's hidden states [B,S,H]; None if not stored."""
        return self._last.get(index)

    @property
    def prefill_length(self) -> int:
        """Length S of the longest prompt; 0 if no hidden states are stored."""
        return self._last[0].shape[1] if self._last else 0
