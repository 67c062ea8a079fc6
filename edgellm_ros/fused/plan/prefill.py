# SPDX-License-Identifier: Apache-2.0
"""PrefillPlan: sizes of the kernels between the products of a prefill."""

from __future__ import annotations

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.fused.plan.fusion import FusionShape
from edgellm_ros.fused.plan.launch import WARP, Launch, too_little_smem
from edgellm_ros.fused.plan.shape import SQUARED_RELU, FusedShape

THREADS = 128
ATTENTION_THREADS = 128
QUERY_TILE = ATTENTION_THREADS // WARP * 16  # queries of a CTA
ACTIVATE_ROWS = 2  # rows of a thread of `activate`
ROPE_HEADS = 4  # heads of a warp of `rope_tokens`
KV_TILES = (64, 32, 16)  # KV rows of a tile; the largest that fits into smem
SPLIT_TILES = 4  # fewest tiles of a split
MOST_SPLITS = 16


class PrefillPlan:
    """Sizes that the kernels are compiled with.

    - fusion: of a draft head; None = there is none
    - trees: whether the tokens of a sequence are a tree with a mask; False: they follow each other

    EngineError, with the reason, if they do not take the shape.
    """

    source = "prefill.cu"

    def __init__(
        self,
        shape: FusedShape,
        multiprocessors: int,
        most_shared: int,
        fusion: FusionShape | None = None,
        trees: bool = False,
    ) -> None:
        check_supported(shape)
        self._fusion, self._trees = fusion, trees
        self.shape, self._multiprocessors = shape, multiprocessors
        fitting = (tile for tile in KV_TILES if self._smem(tile) <= most_shared)
        self._kv_tile = next(fitting, 0)
        if not self._kv_tile:
            raise too_little_smem(self._smem(KV_TILES[-1]), most_shared)

    def _smem(self, kv_tile: int) -> int:
        """Return bytes of a CTA's smem."""
        return attention_smem(self.shape.head_dim, kv_tile)

    def _units(self, tokens: int) -> int:
        """Return the number of tiles of a sequence's queries, over all KV heads."""
        queries = tokens * (self.shape.heads // self.shape.kv_heads)
        return -(-queries // QUERY_TILE) * self.shape.kv_heads

    def splits(self, batch: int, tokens: int) -> int:
        """Return into how many parts the KV rows of a tile of queries may be split.

        So many that each SM has a CTA. The number of filled rows does not matter, so one graph does for all.
        """
        return max(1, min(MOST_SPLITS, self._multiprocessors // (batch * self._units(tokens))))

    @property
    def scratch_bytes(self) -> dict[str, int]:
        """Bytes of the attention's scratch, by name."""
        rows = self._multiprocessors * QUERY_TILE
        return {"sums": 4 * rows * self.shape.head_dim, "scales": 8 * rows}

    def by_row(self, name: str, rows: int) -> Launch:
        """Return how a kernel whose CTAs have one row each is launched."""
        return Launch(name, (rows, 1), THREADS)

    def rope(self, rows: int) -> Launch:
        """Return how `rope_tokens` is launched."""
        heads, each = self.shape.heads + 2 * self.shape.kv_heads, ROPE_HEADS * THREADS // WARP
        return Launch("rope_tokens", (-(-heads // each), rows), THREADS)

    def attention(self, batch: int, tokens: int) -> Launch:
        """Return how `prompt_attention` is launched."""
        grid = self._units(tokens) * self.splits(batch, tokens), batch
        return Launch("prompt_attention", grid, ATTENTION_THREADS, self._smem(self._kv_tile))

    def combine(self, batch: int, tokens: int) -> Launch:
        """Return how `combine_prompt` is launched."""
        return Launch("combine_prompt", (-(-tokens * self.shape.heads // (THREADS // WARP)), batch), THREADS)

    def activate(self, rows: int) -> Launch:
        """Return how `activate` is launched."""
        grid = -(-self.shape.inner // (8 * THREADS)), -(-rows // ACTIVATE_ROWS)
        return Launch("activate", grid, THREADS)

    def macros(self) -> list[tuple[str, str]]:
        """Return names and values of the macros that the kernels are compiled with."""
        shape = self.shape
        values: dict[str, object] = {
            "BF16": int(shape.dtype == "bf16"),
            "FP8_CACHE": int(shape.fp8_cache),
            "THREADS": THREADS,
            "ATTENTION_THREADS": ATTENTION_THREADS,
            "PDL_TRIGGER_FIRST": 1,
            "MOST_REGISTERS": 0,
            "HIDDEN": shape.hidden,
            "HEADS": shape.heads,
            "KV_HEADS": shape.kv_heads,
            "HEAD_DIM": shape.head_dim,
            "INNER": shape.inner,
            "ROTARY_DIM": shape.rotary_dim,
            "CAPACITY": shape.capacity,
            "QK_NORM": int(shape.qk_norm),
            "QKV_BIAS": int(shape.qkv_bias),
            "MLP_BIAS": int(shape.mlp_bias),
            "SQUARED_RELU": int(shape.activation == SQUARED_RELU),
            "TREES": int(self._trees),
            "ATTENDS_TO_ALL": 0,
            "ROPE_HEADS": ROPE_HEADS,
            "ACTIVATE_ROWS": ACTIVATE_ROWS,
            "KV_TILE": self._kv_tile,
            "WARP_TILES": 1,
            "SPLIT_TILES": SPLIT_TILES,
            "PROMPT_ATTENTION_SMEM": self._smem(self._kv_tile),
        }
        values |= shape.macros() | {"FUSED_SIZE": 0}
        if self._fusion is not None:
            values |= {
                "FUSED_SIZE": self._fusion.fused_size,
                "FUSION_EPSILON": f"{float(self._fusion.epsilon)!r}f",
                "STATE_NORMS": int(self._fusion.state_norms),
                "JOINED_NORM": int(self._fusion.joined_norm),
            }
        return [(name, str(value)) for name, value in values.items()]


def attention_smem(head_dim: int, kv_tile: int, queries: int = QUERY_TILE) -> int:
    """Return bytes of a CTA's smem, which are those of `PromptTiles`."""
    return 16 * (2 * -(-head_dim // 16) + 1) * (queries + 4 * kv_tile)


def check_supported(shape: FusedShape) -> None:
    """Raise EngineError if the kernels do not take the prompts of a shape."""
    for problem, text in (
        (shape.attention_gate and shape.qkv_bias, "queries have gates and biases"),
        (bool(shape.quantized), "weights are quantised"),
    ):
        if problem:
            raise EngineError(f"no kernels for prompts: {text}")
    reason = shape.unsupported()
    if reason is not None:
        raise EngineError(f"no kernels for prompts: {reason}")
