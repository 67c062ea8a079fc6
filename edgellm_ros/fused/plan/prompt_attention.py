# SPDX-License-Identifier: Apache-2.0
"""AttentionForm: tiles of the attention of prompts and patches."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm_ros.fused.plan.launch import WARP, too_little_smem

THREADS = 128  # of a CTA
KV_TILES = (64, 32, 16)  # KV rows of a tile; the largest that fits into smem


@dataclass(frozen=True)
class AttentionForm:
    """Tiles of a CTA, which has `queries` queries.

    warp_tiles: of 16 queries of a warp, which reads keys and values once for all of them; kv_tile: KV rows of
    a tile.
    """

    warp_tiles: int
    kv_tile: int

    @property
    def queries(self) -> int:
        """Number of queries of a CTA."""
        return THREADS // WARP * 16 * self.warp_tiles

    def smem(self, head_dim: int) -> int:
        """Return bytes of a CTA's smem, which are those of `Form`."""
        return 16 * (2 * -(-head_dim // 16) + 1) * (self.queries + 4 * self.kv_tile)


def largest_form(
    warp_tiles: int, head_dim: int, most_shared: int, most_rows: int = KV_TILES[0]
) -> AttentionForm:
    """Return the form with the largest tile of KV rows that fits.

    most_shared: bytes of smem; most_rows: of a tile. EngineError if none fits.
    """
    forms = [AttentionForm(warp_tiles, tile) for tile in KV_TILES if tile <= most_rows]
    for form in forms:
        if form.smem(head_dim) <= most_shared:
            return form
    raise too_little_smem(forms[-1].smem(head_dim), most_shared)
