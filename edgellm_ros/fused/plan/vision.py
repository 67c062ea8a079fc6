# SPDX-License-Identifier: Apache-2.0
"""VisionPlan: sizes of the kernels between the products of a vision tower."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.fused.plan.launch import Launch
from edgellm_ros.fused.plan.prefill import THREADS
from edgellm_ros.fused.plan.prompt_attention import THREADS as ATTENTION_THREADS
from edgellm_ros.fused.plan.prompt_attention import largest_form
from edgellm_ros.fused.plan.shape import DTYPES

MOST_HEAD_DIM = 128  # queries of the attention are in registers
MOST_OF_TWO_TILES = 64  # values of a head, for which a warp has registers for twice 16 queries


@dataclass(frozen=True)
class VisionShape:
    """Sizes of a vision tower.

    - dtype: of weights and embeddings, "fp16" or "bf16"
    - patch: values of a patch
    - merged: values of the patches that become a row of embeddings
    - raised: values between the two products of a merger
    - out: values of a row of embeddings
    - deepstack: blocks, counted from 0, after which rows for the language model's first layers are made
    - epsilon, merger_epsilon: of the LayerNorms of a patch, and of those of a row's patches side by side
    - tile: rows of a tile, with its class token; 0 = no tiles, an image has any number of patches
    """

    dtype: str
    depth: int
    hidden: int
    heads: int
    inner: int
    patch: int
    merged: int
    raised: int
    out: int
    deepstack: tuple[int, ...]
    epsilon: float
    merger_epsilon: float
    tile: int = 0

    @property
    def head_dim(self) -> int:
        """Number of values of a head."""
        return self.hidden // self.heads

    @property
    def patches_per_row(self) -> int:
        """Number of patches that become a row of embeddings."""
        return self.merged // self.hidden

    @property
    def tile_rows(self) -> int:
        """Number of rows of embeddings of a tile; 0 = no tiles."""
        return (self.tile - 1) // self.patches_per_row if self.tile else 0

    def unsupported(self) -> str | None:
        """Return why the kernels do not take this tower; None if they do."""
        for problem, text in (
            (self.dtype not in DTYPES, f"weights are {self.dtype}, not {' or '.join(DTYPES)}"),
            (
                self.head_dim % 8 != 0 or self.head_dim > MOST_HEAD_DIM,
                f"heads have {self.head_dim} values, not a multiple of 8 up to {MOST_HEAD_DIM}",
            ),
            (self.inner % 8 != 0, f"the feed-forward size {self.inner} is not a multiple of 8"),
            (self.out % 8 != 0, f"a row has {self.out} values, not a multiple of 8"),
        ):
            if problem:
                return text
        return None


class VisionPlan:
    """Sizes that the kernels are compiled with.

    EngineError, with the reason, if they do not take the tower.
    """

    source = "vision.cu"

    def __init__(self, shape: VisionShape, most_shared: int) -> None:
        reason = shape.unsupported()
        if reason is not None:
            raise EngineError(f"no kernels for this vision tower: {reason}")
        self.shape = shape
        # Tiles have CTAs enough for all SMs, one image may not.
        warp_tiles = 2 if shape.tile and shape.head_dim <= MOST_OF_TWO_TILES else 1
        self._form = largest_form(warp_tiles, shape.head_dim, most_shared)

    def by_row(self, name: str, rows: int) -> Launch:
        """Return how a kernel whose CTAs have one row each is launched."""
        return Launch(name, (rows, 1), THREADS)

    def activate(self, rows: int) -> Launch:
        """Return how `activate_merged` is launched."""
        return Launch("activate_merged", (-(-self.shape.raised // (4 * THREADS)), rows), THREADS)

    def attention(self, tiles: int, tokens: int) -> Launch:
        """Return how `patch_attention` is launched; tokens: of a tile."""
        grid = -(-tokens // self._form.queries) * self.shape.heads, tiles
        return Launch("patch_attention", grid, ATTENTION_THREADS, self._form.smem(self.shape.head_dim))

    def macros(self) -> list[tuple[str, str]]:
        """Return names and values of the macros that the kernels are compiled with."""
        shape = self.shape
        values: dict[str, object] = {
            "BF16": int(shape.dtype == "bf16"),
            "FP8_CACHE": 0,
            "THREADS": THREADS,
            "ATTENTION_THREADS": ATTENTION_THREADS,
            "PDL_TRIGGER_FIRST": 1,
            "MOST_REGISTERS": 0,
            "ATTENDS_TO_ALL": 1,
            "TREES": 0,
            "CAPACITY": 0,
            "HIDDEN": shape.hidden,
            "HEADS": shape.heads,
            "KV_HEADS": shape.heads,
            "HEAD_DIM": shape.head_dim,
            "ATTENTION_GATE": 0,
            "PATCH_SIZE": shape.patch,
            "MERGED": shape.merged,
            "RAISED": shape.raised,
            "EPSILON": f"{float(shape.epsilon)!r}f",
            "MERGER_EPSILON": f"{float(shape.merger_epsilon)!r}f",
            "KV_TILE": self._form.kv_tile,
            "WARP_TILES": self._form.warp_tiles,
            "SPLIT_TILES": 1,
            "PROMPT_ATTENTION_SMEM": self._form.smem(shape.head_dim),
        }
        return [(name, str(value)) for name, value in values.items()]
