# SPDX-License-Identifier: Apache-2.0
"""FusedPrompt: the KV rows of prompts in the cache of a draft head, as one launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels.cuda.compiler import EARLY_START, compute_capability
from edgellm_ros.kernels.cuda.fused.chain import GAP, MOST_ROWS, THREADS, TILE, TILE_SUMS, largest_divisor
from edgellm_ros.kernels.cuda.fused.decoder import OLDEST, Compile, compiler_for
from edgellm_ros.kernels.cuda.fused.draft import FusedDraftShape
from edgellm_ros.kernels.cuda.fused.plan import WARP, Launch
from edgellm_ros.kernels.cuda.fused.weights import FusedWeights

NAME = "draft_prompt"
FILES = ("small.cuh", "prompt.cu")


class PromptPlan:
    """Sizes that the kernel is compiled with. EngineError, with the reason, if it does not take the head."""

    files = FILES

    def __init__(self, shape: FusedDraftShape, most_shared: int) -> None:
        self.shape = shape
        problem = shape.unsupported()
        for found, text in (
            (shape.layers != 1, f"the head has {shape.layers} layers"),
            (shape.head_dim % 32 != 0, f"head_dim is {shape.head_dim}, not a multiple of 32"),
            (shape.interleaved, "pairs of rotated values are neighbours"),
            (shape.fp8_cache, "the KV cache has 8 bits"),
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
        tiles, warps = size // TILE, THREADS // WARP
        sums = TILE_SUMS * tiles * largest_divisor(inputs // 16, max(1, warps // tiles))
        return 2 * inputs * size + 2 * MOST_ROWS * (inputs + GAP) + sums + 4 * MOST_ROWS * size

    def launch(self, batch: int, tokens: int, early: bool) -> Launch:
        """Return how the kernel is launched."""
        grid = -(-tokens // MOST_ROWS), 2 * self.shape.kv_heads * batch
        return Launch(NAME, grid, THREADS, self.shared_bytes, early)

    def macros(self) -> list[tuple[str, str]]:
        """Return names and values of the macros that the kernel is compiled with."""
        shape = self.shape
        values = {
            "BF16": int(shape.dtype == "bf16"),
            "THREADS": THREADS,
            "TRIGGER_FIRST": 1,
            "CLUSTER": 1,
            "PROMPT_SHARED": self.shared_bytes,
            "HIDDEN": shape.hidden,
            "HEADS": shape.heads,
            "KV_HEADS": shape.kv_heads,
            "HEAD_DIM": shape.head_dim,
            "ROTARY_DIM": shape.rotary_dim,
            "CAPACITY": shape.capacity,
            "EPSILON": f"{float(shape.epsilon)!r}f",
            "QK_NORM": int(shape.qk_norm),
            "QKV_BIAS": int(shape.qkv_bias),
        }
        return [(name, str(value)) for name, value in values.items()]


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
