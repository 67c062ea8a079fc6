# SPDX-License-Identifier: Apache-2.0
"""TokenStates: hidden states of a step's tokens, while copied to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgellm_ros.engine.device import Device, HostCopy
from edgellm_ros.engine.tensor import Tensor


@dataclass(frozen=True, eq=False)
class TokenStates:
    """The hidden states from which the tokens of a step were sampled."""

    layers: tuple[tuple[HostCopy, ...], ...]  # of each layer: [B,M,H] in one or several parts of the batch
    path: HostCopy | None  # int64 [B,N]: the state of each token among the M ones; None: N = M, in order

    def wait(self) -> np.ndarray:
        """Wait for the copies; return the states [L,B,N,H] of L layers.

        May be called once.
        """
        states = np.stack([np.concatenate([part.wait() for part in parts]) for parts in self.layers])
        if self.path is None:
            return states
        path = self.path.wait()
        return states[:, np.arange(len(path))[:, None], path]


def copy_states(device: Device, layers: Sequence[Tensor], path: Tensor | None = None) -> TokenStates:
    """Queue a copy of the states [B,M,H] of each layer to the host.

    path: see `TokenStates`.
    """
    return TokenStates(
        tuple((device.copy_to_host(states),) for states in layers),
        device.copy_to_host(path) if path is not None else None,
    )


def copy_last_states(device: Device, layers: Sequence[Tensor], lengths: Sequence[int]) -> TokenStates:
    """Queue a copy of the states of prompts' last tokens; layers: [B,S,H] each."""
    copies = []
    for states in layers:
        batch, tokens, size = states.shape
        rows = states.view(batch * tokens, 1, size)
        ends = [row * tokens + length for row, length in enumerate(lengths)]
        copies.append(tuple(device.copy_to_host(rows.rows(end - 1, end)) for end in ends))
    return TokenStates(tuple(copies), None)
