# SPDX-License-Identifier: Apache-2.0
"""ExpertShape: sizes of an action expert that fused kernels are compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm_ros.fused.plan.shape import DTYPES

HEAD_DIMS = (64, 128)
MOST_HIDDEN = 1024  # a warp holds a row
MOST_ACTIONS = 4


@dataclass(frozen=True)
class ExpertShape:
    """Sizes of an action expert; `builder/action/flow_expert.py` shows its layers.

    - dtype: of weights and of the language model's KV caches, "fp16" or "bf16"
    - fp8_cache: whether the caches have E4M3 instead
    - kv_caches: which of the language model's caches each layer reads
    - rotary_dim: R, the first values of a head that are rotated; a pair is (i, i + R/2)
    - capacity: C, the rows of the KV caches
    - horizon: T, steps of a trajectory
    - actions: A, values of a step
    - epsilon: of every RMSNorm
    """

    dtype: str
    kv_caches: tuple[int, ...]
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    rotary_dim: int
    capacity: int
    horizon: int
    actions: int
    epsilon: float = 1e-6
    fp8_cache: bool = False

    @property
    def q_size(self) -> int:
        """Number of query values of a row."""
        return self.heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Number of query, key and value values of a row."""
        return self.q_size + 2 * self.kv_heads * self.head_dim

    def unsupported(self) -> str | None:
        """Return why the kernels do not take this shape; None if they do."""
        for problem, text in (
            (self.dtype not in DTYPES, f"weights are {self.dtype}, not {' or '.join(DTYPES)}"),
            (self.head_dim not in HEAD_DIMS, f"head_dim is {self.head_dim}, not one of {HEAD_DIMS}"),
            (
                self.kv_heads < 1 or self.heads % self.kv_heads != 0,
                f"{self.heads} heads share {self.kv_heads} KV heads",
            ),
            (
                self.rotary_dim % 2 != 0 or not 0 < self.rotary_dim <= self.head_dim,
                f"rotary_dim is {self.rotary_dim} with head_dim {self.head_dim}",
            ),
            (
                self.hidden % 64 != 0 or not 0 < self.hidden <= MOST_HIDDEN,
                f"the hidden size {self.hidden} is not a multiple of 64 up to {MOST_HIDDEN}",
            ),
            (self.inner % 32 != 0, f"the feed-forward size {self.inner} is not a multiple of 32"),
            (
                not 1 <= self.actions <= MOST_ACTIONS,
                f"an action has {self.actions} values, more than {MOST_ACTIONS}",
            ),
        ):
            if problem:
                return text
        return None
