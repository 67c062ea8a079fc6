# SPDX-License-Identifier: Apache-2.0
"""PromptPlan: sizes of the kernel that writes a draft head's KV rows of prompts."""

from __future__ import annotations

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.fused.plan.launch import Launch
from edgellm_ros.fused.plan.shape import FusedDraftShape
from edgellm_ros.fused.plan.small_head import (
    GAP,
    MOST_ROWS,
    THREADS,
    TILE,
    macros,
    sums_bytes,
    unsupported,
)

NAME = "draft_prompt"


class PromptPlan:
    """Sizes that the kernel is compiled with.

    EngineError, with the reason, if it does not take the head.
    """

    source = "prompt.cu"

    def __init__(self, shape: FusedDraftShape, most_shared: int) -> None:
        self.shape = shape
        problem = unsupported(shape)
        for found, text in (
            (shape.head_dim % 32 != 0, f"head_dim is {shape.head_dim}, not a multiple of 32"),
            (
                self.shared_bytes > most_shared,
                f"a block needs {self.shared_bytes} of {most_shared} bytes of shared memory",
            ),
        ):
            problem = problem or (text if found else None)
        if problem is not None:
            raise EngineError(f"no kernel for prompts: {problem}")

    @property
    def shared_bytes(self) -> int:
        """Bytes of a CTA's smem; `Memory` in prompt.cu has the same fields."""
        inputs, size = 2 * self.shape.hidden, self.shape.head_dim
        sums = sums_bytes(inputs, size // TILE)
        return 2 * inputs * size + 2 * MOST_ROWS * (inputs + GAP) + sums + 4 * MOST_ROWS * size

    def launch(self, batch: int, tokens: int, early: bool) -> Launch:
        """Return how the kernel is launched."""
        grid = -(-tokens // MOST_ROWS), 2 * self.shape.kv_heads * batch
        return Launch(NAME, grid, THREADS, self.shared_bytes, early)

    def macros(self) -> list[tuple[str, str]]:
        """Return names and values of the macros that the kernel is compiled with."""
        return macros(self.shape, 1, PROMPT_SMEM=self.shared_bytes)
