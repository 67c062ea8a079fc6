# SPDX-License-Identifier: Apache-2.0
"""PrefillPlan: sizes of the kernels between the products of a prefill."""

from __future__ import annotations

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.fused.plan.fusion import FusionShape
from edgellm_ros.fused.plan.launch import WARP, Launch
from edgellm_ros.fused.plan.prompt_attention import KV_TILES, largest_form
from edgellm_ros.fused.plan.prompt_attention import THREADS as ATTENTION_THREADS
from edgellm_ros.fused.plan.shape import SQUARED_RELU, FusedShape

THREADS = 128
ACTIVATE_ROWS = 2  # rows of a thread of `activate`
ROPE_HEADS = 4  # heads of a warp of `rope_tokens`
SPLIT_ROWS = 256  # fewest KV rows of a split
MOST_SPLITS = 16
# Heads of more values have tiles of fewer KV rows, so that two CTAs fit on an SM: one has too few warps to
# hide the latency of its products. Their KV rows are split for as many CTAs, in shorter parts.
ONE_CTA_PER_SM, WIDE_KV_TILE, WIDE_SPLIT_ROWS = 128, 32, 64


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
        wide = shape.head_dim > ONE_CTA_PER_SM
        self._form = largest_form(1, shape.head_dim, most_shared, WIDE_KV_TILE if wide else KV_TILES[0])
        self._ctas = (2 if wide else 1) * multiprocessors  # that splits are made for
        self._split_rows = WIDE_SPLIT_ROWS if wide else SPLIT_ROWS

    def _units(self, tokens: int) -> int:
        """Return the number of tiles of a sequence's queries, over all KV heads."""
        queries = tokens * (self.shape.heads // self.shape.kv_heads)
        return -(-queries // self._form.queries) * self.shape.kv_heads

    def splits(self, batch: int, tokens: int) -> int:
        """Return into how many parts the KV rows of a tile of queries may be split.

        So many that each SM has its CTAs. The number of filled rows does not matter: one graph does for all.
        """
        return max(1, min(MOST_SPLITS, self._ctas // (batch * self._units(tokens))))

    @property
    def scratch_bytes(self) -> dict[str, int]:
        """Bytes of the attention's scratch, by name."""
        rows = self._ctas * self._form.queries
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
        return Launch("prompt_attention", grid, ATTENTION_THREADS, self._form.smem(self.shape.head_dim))

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
            "KV_TILE": self._form.kv_tile,
            "SPLIT_TILES": -(-self._split_rows // self._form.kv_tile),
            "PROMPT_ATTENTION_SMEM": self._form.smem(shape.head_dim),
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


def check_supported(shape: FusedShape) -> None:
    """Raise EngineError if the kernels do not take the prompts of a shape."""
    for problem, text in (
        (shape.attention_gate and shape.qkv_bias, "queries have gates and biases"),
        (bool(shape.quantized or shape.head), "weights are quantised"),
    ):
        if problem:
            raise EngineError(f"no kernels for prompts: {text}")
    reason = shape.unsupported()
    if reason is not None:
        raise EngineError(f"no kernels for prompts: {reason}")
