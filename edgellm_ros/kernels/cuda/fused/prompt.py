# SPDX-License-Identifier: Apache-2.0
"""FusedPrompt: the KV rows of prompts in the cache of a draft head, as one launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels.cuda.compiler import EARLY_START, compute_capability
from edgellm_ros.kernels.cuda.fused.decoder import OLDEST, Compile, compiler_for
from edgellm_ros.kernels.cuda.fused.draft import FusedDraftShape
from edgellm_ros.kernels.cuda.fused.plan import Launch
from edgellm_ros.kernels.cuda.fused.small_head import (
    GAP,
    MOST_ROWS,
    SOURCE,
    THREADS,
    TILE,
    macros,
    sums_bytes,
    unsupported,
)
from edgellm_ros.kernels.cuda.fused.weights import FusedWeights

NAME = "draft_prompt"
FILES = (SOURCE, "prompt.cu")


class PromptPlan:
    """Sizes that the kernel is compiled with.

    EngineError, with the reason, if it does not take the head.
    """

    files = FILES

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
        """Bytes of a block's shared memory; `Memory` in prompt.cu has the same fields."""
        inputs, size = 2 * self.shape.hidden, self.shape.head_dim
        sums = sums_bytes(inputs, size // TILE)
        return 2 * inputs * size + 2 * MOST_ROWS * (inputs + GAP) + sums + 4 * MOST_ROWS * size

    def launch(self, batch: int, tokens: int, early: bool) -> Launch:
        """Return how the kernel is launched."""
        grid = -(-tokens // MOST_ROWS), 2 * self.shape.kv_heads * batch
        return Launch(NAME, grid, THREADS, self.shared_bytes, early)

    def macros(self) -> list[tuple[str, str]]:
        """Return names and values of the macros that the kernel is compiled with."""
        return macros(self.shape, 1, PROMPT_SHARED=self.shared_bytes)


class FusedPrompt:
    """KV rows of prompts of one head on one device; parameters as of `FusedChain`.

    EngineError, with the reason, if device or head are not supported.
    """

    def __init__(
        self, device: Any, shape: FusedDraftShape, weights: FusedWeights, compile: Compile | None = None
    ) -> None:
        capability = compute_capability(device.arch)
        if capability < OLDEST:
            raise EngineError(f"no kernel for prompts: {device.arch} is older than sm_{OLDEST}")
        self._plan = PromptPlan(shape, device.most_shared_memory)
        self._early, self._weights = capability >= EARLY_START, weights
        self._program = (compile or compiler_for(device))(self._plan)

    def run(
        self,
        embeds: Tensor,
        states: Tensor,
        cos: Tensor,
        sin: Tensor,
        lengths: Tensor,
        caches: Mapping[str, Tensor],
    ) -> None:
        """Queue the write of KV rows; see `PromptRows`."""
        layer = self._weights.layers[0]
        batch, tokens, _ = embeds.shape
        if not batch * tokens:
            return
        self._program.launch(
            self._plan.launch(batch, tokens, self._early),
            layer.qkv, layer.qkv_bias, layer.k_norm, layer.input_norm, layer.state_norm, embeds.pointer,
            states.pointer, cos.pointer, sin.pointer, lengths.pointer,
            caches["key_cache_0"].pointer, caches["value_cache_0"].pointer, tokens,
        )  # fmt: skip
