# SPDX-License-Identifier: Apache-2.0
"""Configuration of recurrent layers in `config.json` of an engine directory."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

ATTENTION, RECURRENT, MLP = LAYER_TYPES = ("attention", "recurrent", "mlp")
KINDS = MAMBA2, GATED_DELTA_NET = ("mamba2", "gated_delta_net")
ROW = 32  # columns; ONNX Runtime's CUDA kernels take rows of multiples of this as a whole
FEW = (4, 2, 1)  # columns
STRENGTHS = "strengths"  # of the updates of a gated delta net
CHAIN_TOKENS = 8  # most tokens of a verification of drafted tokens


def state_columns(value_dim: int) -> int:
    """Return how many columns of a head's state are side by side in memory.

    All columns are, if rows are whole vectors for ONNX Runtime's CUDA kernels (LinearAttention). Its kernel
    for other sizes has a warp for each column, so that neighbouring threads read neighbouring rows: with few
    columns side by side these are in the same pieces of memory. The state is [key_dim, value_dim].
    """
    if value_dim % ROW == 0:
        return value_dim
    return next(columns for columns in FEW if value_dim % columns == 0)


@dataclass(frozen=True)
class RecurrentConfig:
    """Shape of the recurrent layers and of the state that they carry.

    All layers are of one kind. Each layer has two tensors per sequence: the last inputs of its convolution,
    [conv_dim, conv_kernel - 1], and its state in fp32: [key_dim, value_dim] for each head, stored as
    `state_shape`.
    """

    kind: str  # one of KINDS
    num_layers: int
    num_heads: int
    key_dim: int  # Mamba2: the state size
    value_dim: int  # Mamba2: the head size
    conv_dim: int  # channels of the convolution
    conv_kernel: int

    @property
    def conv_shape(self) -> tuple[int, int]:
        """Return the shape of the convolution's state of one sequence."""
        return self.conv_dim, self.conv_kernel - 1

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Return the shape of the state of one sequence.

        The first axis has the groups of all heads. A group is `state_columns` adjacent columns of one head.
        """
        columns = state_columns(self.value_dim)
        return self.num_heads * self.value_dim // columns, self.key_dim, columns

    @property
    def bytes_per_sequence(self) -> int:
        """Return the memory of one sequence's state, which is fp32 in every precision."""
        return self.num_layers * (prod(self.conv_shape) + prod(self.state_shape)) * 4

    @property
    def chain_widths(self) -> dict[str, int]:
        """Return the values of a token that a verification outputs, by name.

        Each recurrent layer has these outputs. From them the runtime computes the states after accepted
        tokens (`ChainInputs`).
        """
        keys = self.conv_dim - self.num_heads * self.value_dim  # Mamba2: B and C; else queries and keys
        widths = {
            "conv_inputs": self.conv_dim,
            "keys": keys // 2,
            "values": self.num_heads * self.value_dim,
            "decays": self.num_heads,
        }
        return widths if self.kind == MAMBA2 else {**widths, STRENGTHS: self.num_heads}

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        for name in ("num_layers", "num_heads", "key_dim", "value_dim", "conv_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.conv_kernel < 2:
            raise ValueError(f"conv_kernel must be at least 2, got {self.conv_kernel}")
