# SPDX-License-Identifier: Apache-2.0
"""FusedVision: a vision tower of Qwen3-VL or InternVL in kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.fused.params import (
    ActivateMergedParams,
    BeginPatchesParams,
    BeginTilesParams,
    NormMergedParams,
    NormPatchesParams,
    PatchAttentionParams,
    RopePatchesParams,
)
from edgellm_ros.fused.plan.vision import VisionPlan, VisionShape
from edgellm_ros.fused.products import Matrix, Products
from edgellm_ros.fused.variants import Compile, compiler_for


@dataclass(frozen=True)
class VisionBlockWeights:
    """Addresses of a block's weights, which `FusedVisionBlock` documents; 0 = none."""

    norm1: int
    norm1_bias: int
    qkv: int
    qkv_bias: int
    proj: int
    norm2: int
    norm2_bias: int
    fc1: int
    fc1_bias: int
    fc2: int


@dataclass(frozen=True)
class MergerWeights:
    """Addresses of a merger's weights, which `FusedMerger` documents."""

    norm: int
    norm_bias: int
    first: int
    first_bias: int
    second: int
    second_bias: int


@dataclass(frozen=True)
class VisionWeights:
    """Addresses of all weights, multiples of 16 bytes; 0 = none.

    biases: fp32 [1+2*depth,H], the sums of the biases of the first 0, 1, 2, ... products with `proj` and
    `fc2`, in the order of their runs.
    owners: objects that keep the memory alive.
    """

    patch_embed: int
    patch_embed_bias: int
    positions: int
    biases: int
    blocks: tuple[VisionBlockWeights, ...]
    merger: MergerWeights
    deepstack_mergers: tuple[MergerWeights, ...]
    owners: tuple[Any, ...] = field(default=(), compare=False, repr=False)


class _Run(NamedTuple):
    """An image: its numbers of rows, and the addresses of tensors and scratch."""

    tiles: int  # 1 for a tower without tiles
    tokens: int  # of a tile
    embeddings: int  # rows of embeddings
    tensors: Mapping[str, int]
    scratch: Mapping[str, int]

    @property
    def rows(self) -> int:
        """Return the number of rows of the residual stream."""
        return self.tiles * self.tokens


class FusedVision:
    """A vision tower on one device.

    - products: computes products with weights
    - compile: makes a program of a plan; None = for the device, from the cache of compiled kernels

    EngineError, with the reason, if the kernels do not take the tower.
    """

    def __init__(
        self,
        device: Any,
        shape: VisionShape,
        weights: VisionWeights,
        products: Products,
        compile: Compile | None = None,
    ) -> None:
        self._plan = VisionPlan(shape, device.most_shared_memory)
        self._device, self._shape, self._weights, self._products = device, shape, weights, products
        self._program = (compile or compiler_for(device))(self._plan)
        self._most_rows = 0
        # The latest is the largest. A recorded run has the addresses of the one that it was recorded with.
        self._scratch: list[dict[str, Tensor]] = []

    def run(self, tensors: Mapping[str, Tensor]) -> None:
        """Queue one image on the device's stream.

        Only launches kernels, so it can be recorded, if an image of that size has run before. tensors: those
        of `visual/model.onnx`, by binding name. Of a tower without tiles pixel_values [P,C] fp32; rope_cos
        and rope_sin [P,D/2] fp32; pos_embed_index [4,P] int64 and pos_embed_weight [4,P] fp32; image_embeds
        and deepstack_embeds_i [R,H]. With tiles pixel_values [T,P,C] fp32 and image_embeds [R,H].
        """
        shape, weights, pixels = self._shape, self._weights, tensors["pixel_values"].shape
        tiles, tokens = (pixels[0], shape.tile) if shape.tile else (1, pixels[0])
        embeddings = tiles * shape.tile_rows if shape.tile else tokens // shape.patches_per_row
        pointers = {name: each.pointer for name, each in tensors.items()}
        run = _Run(tiles, tokens, embeddings, pointers, self._buffers(tiles * tokens))
        self._begin(run)
        for number, block in enumerate(weights.blocks):
            self._block(block, 2 * number, run)
            if number in shape.deepstack:
                level = shape.deepstack.index(number)
                merger = weights.deepstack_mergers[level]
                self._norm_merged(merger, 2 * number + 2, run)
                self._merge(merger, run, pointers[f"deepstack_embeds_{level}"])
        merger, added = weights.merger, 2 * len(weights.blocks)
        if shape.tile:
            self._norm_merged(merger, added, run)
        else:
            self._norm(merger.norm, merger.norm_bias, added, run)
        self._merge(merger, run, pointers["image_embeds"])

    def _begin(self, run: _Run) -> None:
        """Begin the residual stream: positions and patch embeddings."""
        shape, weights, tensors = self._shape, self._weights, run.tensors
        x, residual = run.scratch["x"], run.scratch["residual"]
        written = {"x": x, "residual": residual, "pixels": tensors["pixel_values"]}
        if shape.tile:
            tiles = BeginTilesParams(positions=weights.positions, tokens=run.tokens, **written)
            self._by_row("begin_tiles", run.rows, tiles)
        else:
            patches = BeginPatchesParams(
                bias=weights.patch_embed_bias,
                grid=weights.positions,
                index=tensors["pos_embed_index"],
                weight=tensors["pos_embed_weight"],
                patches=run.rows,
                **written,
            )
            self._by_row("begin_patches", run.rows, patches)
        matrix = Matrix(weights.patch_embed, shape.patch, shape.hidden)
        self._products.multiply(x, matrix, residual, run.rows, adds=True)

    def _block(self, weights: VisionBlockWeights, added: int, run: _Run) -> None:
        """Run a block.

        added: number of products that the residual stream has without their biases.
        """
        shape, multiply, rows = self._shape, self._products.multiply, run.rows
        residual, x, inner = (run.scratch[name] for name in ("residual", "x", "inner"))
        hidden = shape.hidden
        self._norm(weights.norm1, weights.norm1_bias, added, run)
        self._attend(weights, run)
        multiply(x, Matrix(weights.proj, hidden, hidden), residual, rows, adds=True)
        self._norm(weights.norm2, weights.norm2_bias, added + 1, run)
        multiply(x, Matrix(weights.fc1, hidden, shape.inner), inner, rows, bias=weights.fc1_bias, gelu=True)
        multiply(inner, Matrix(weights.fc2, shape.inner, hidden), residual, rows, adds=True)

    def _attend(self, weights: VisionBlockWeights, run: _Run) -> None:
        """Run the attention of a block, from x to x."""
        shape, multiply, rows = self._shape, self._products.multiply, run.rows
        x, qkv, tensors = run.scratch["x"], run.scratch["qkv"], run.tensors
        matrix = Matrix(weights.qkv, shape.hidden, 3 * shape.hidden)
        if shape.tile:
            multiply(x, matrix, qkv, rows, bias=weights.qkv_bias)
        else:
            multiply(x, matrix, qkv, rows)
            angles = {"cos_rows": tensors["rope_cos"], "sin_rows": tensors["rope_sin"]}
            self._by_row("rope_patches", rows, RopePatchesParams(qkv=qkv, bias=weights.qkv_bias, **angles))
        attention = PatchAttentionParams(qkv=qkv, out=x, tokens=run.tokens)
        self._program.launch(self._plan.attention(run.tiles, run.tokens), attention)

    def _merge(self, weights: MergerWeights, run: _Run, out: int) -> None:
        """Run a merger, from x to rows of embeddings."""
        shape, multiply, rows = self._shape, self._products.multiply, run.embeddings
        x, inner = run.scratch["x"], run.scratch["inner"]
        multiply(x, Matrix(weights.first, shape.merged, shape.raised), inner, rows)
        activate = ActivateMergedParams(values=inner, bias=weights.first_bias)
        self._program.launch(self._plan.activate(rows), activate)
        multiply(inner, Matrix(weights.second, shape.raised, shape.out), out, rows, bias=weights.second_bias)

    def _norm(self, norm: int, shift: int, added: int, run: _Run) -> None:
        """Norm the residual stream with the biases of so many products, to x."""
        residual, x, bias = run.scratch["residual"], run.scratch["x"], self._biases(added)
        params = NormPatchesParams(norm=norm, shift=shift, bias=bias, residual=residual, x=x)
        self._by_row("norm_patches", run.rows, params)

    def _norm_merged(self, weights: MergerWeights, added: int, run: _Run) -> None:
        """Norm the patches of each row of embeddings to x, side by side, as `_norm` does."""
        params = NormMergedParams(
            norm=weights.norm,
            shift=weights.norm_bias,
            bias=self._biases(added),
            residual=run.scratch["residual"],
            x=run.scratch["x"],
            tile_rows=self._shape.tile_rows,
        )
        self._by_row("norm_merged", run.embeddings, params)

    def _biases(self, added: int) -> int:
        """Return the address of the sum of the biases of so many products."""
        return self._weights.biases + 4 * self._shape.hidden * added

    def _by_row(self, name: str, rows: int, params: Any) -> None:
        self._program.launch(self._plan.by_row(name, rows), params)

    def _buffers(self, rows: int) -> dict[str, int]:
        """Return the addresses of buffers for so many rows of the residual stream.

        Larger ones are made for a larger image.
        """
        if rows > self._most_rows:
            shape = self._shape
            most = max(rows, 3 * self._most_rows // 2)
            merger = -(-shape.raised // shape.patches_per_row)  # values per row, between its products
            sizes = {
                "residual": 4 * most * shape.hidden,
                "x": 2 * most * max(shape.hidden, shape.patch),
                "qkv": 6 * most * shape.hidden,
                "inner": 2 * most * max(shape.inner, merger),
            }
            made = {name: self._device.zeros((nbytes,), np.uint8) for name, nbytes in sizes.items()}
            self._scratch.append(made)
            self._most_rows = most
        return {name: tensor.pointer for name, tensor in self._scratch[-1].items()}
