# SPDX-License-Identifier: Apache-2.0
"""ProductCut: how the GEMVs of a step are cut, with a number of stages and CTAs."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm_ros.fused.plan.config import StepConfig
from edgellm_ros.fused.plan.product import ProductPlan, QuantizedProductPlan
from edgellm_ros.fused.plan.quantized import Quantized
from edgellm_ros.fused.plan.shape import FusedShape


@dataclass(frozen=True, kw_only=True)
class ProductCut:
    """Plans GEMVs with the same stages and the same largest number of CTAs."""

    shape: FusedShape
    config: StepConfig
    stages: int
    rows: int
    blocks: int  # most CTAs of a GEMV
    mma: bool  # on tensor cores
    lora_rank: int
    x_in_gmem: bool  # whether prepared x stays in global memory

    def layer(self, name: str, k: int, n: int, all_of_x: bool, ready: bool) -> ProductPlan:
        """Plan a GEMV of a layer by its kernel; ready: whether a prep kernel computes x."""
        config, form = self.config, self.shape.form(name)
        narrow = name in ("o", "down", "out_proj")
        if form is not None:
            tile = config.quantized_tile if name in ("qkv", "in_proj") else config.quantized_wide_tile
            return self._quantized(form, k, n, config.quantized_narrow_tile if narrow else tile, all_of_x)
        narrow_tile = config.x_in_gmem_tile if ready and self.x_in_gmem else config.narrow_tile
        return self._dense(k, n, narrow_tile if narrow else config.tile, all_of_x, ready=ready)

    def head(self, ready: bool) -> ProductPlan:
        """Plan an LM head that is not tied, whose CTAs have whole tiles."""
        shape, config = self.shape, self.config
        if shape.head is not None:
            tile = config.quantized_tile
            return self._quantized(shape.head, shape.hidden, shape.vocab, tile, not ready, whole=True)
        return self._dense(shape.hidden, shape.all_head_columns, config.head_tile, not ready, True, ready)

    def _dense(
        self, k: int, n: int, tile: int, all_of_x: bool, whole: bool = False, ready: bool = False
    ) -> ProductPlan:
        sizes = self.config.threads, self.stages, self.rows, self.blocks, all_of_x
        rank, in_gmem = 0 if whole else self.lora_rank, ready and self.x_in_gmem
        return ProductPlan(
            k, n, tile, *sizes, whole_tiles=whole, mma=self.mma, lora_rank=rank, x_in_gmem=in_gmem
        )

    def _quantized(
        self, form: Quantized, k: int, n: int, tile: int, all_of_x: bool, whole: bool = False
    ) -> ProductPlan:
        threads = self.config.threads
        sizes = min(tile, threads // 2), threads, self.stages, self.rows, self.blocks, all_of_x
        rank = 0 if whole else self.lora_rank
        return QuantizedProductPlan(k, n, *sizes, whole_tiles=whole, mma=self.mma, lora_rank=rank, form=form)
