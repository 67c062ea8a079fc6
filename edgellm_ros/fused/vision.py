# SPDX-License-Identifier: Apache-2.0
"""FusedVision: a vision tower of Qwen3-VL in kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.fused.params import (
    ActivateMergedParams,
    AddBiasParams,
    BeginPatchesParams,
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
    """Addresses of a block's weights, which `FusedVisionBlock` documents."""

    norm1: int
    norm1_bias: int
    qkv: int
    qkv_bias: int
    proj: int
    proj_bias: int
    norm2: int
    norm2_bias: int
    fc1: int
    fc1_bias: int
    fc2: int
    fc2_bias: int


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
    """Addresses of all weights, multiples of 16 bytes.

    owners: objects that keep the memory alive.
    """

    patch_embed: int
    patch_embed_bias: int
    position_grid: int
    blocks: tuple[VisionBlockWeights, ...]
    merger: MergerWeights
    deepstack_mergers: tuple[MergerWeights, ...]
    owners: tuple[Any, ...] = field(default=(), compare=False, repr=False)


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
        self._most_patches = 0
        # The latest is the largest. A recorded run has the addresses of the one that it was recorded with.
        self._scratch: list[dict[str, Tensor]] = []

    def run(self, tensors: Mapping[str, Tensor]) -> None:
        """Queue one image on the device's stream.

        Only launches kernels, so it can be recorded, if an image of that size has run before. tensors: those
        of `visual/model.onnx`, by binding name: pixel_values [P,C] fp32; rope_cos and rope_sin [P,D/2] fp32;
        pos_embed_index [4,P] int64 and pos_embed_weight [4,P] fp32; image_embeds and deepstack_embeds_i
        [R,H].
        """
        shape, weights, multiply = self._shape, self._weights, self._products.multiply
        patches, _ = tensors["pixel_values"].shape
        scratch, pointers = self._buffers(patches), {name: each.pointer for name, each in tensors.items()}
        residual, x, hidden = scratch["residual"], scratch["x"], shape.hidden
        begin = BeginPatchesParams(
            pixels=pointers["pixel_values"],
            bias=weights.patch_embed_bias,
            grid=weights.position_grid,
            index=pointers["pos_embed_index"],
            weight=pointers["pos_embed_weight"],
            x=x,
            residual=residual,
            patches=patches,
        )
        self._by_row("begin_patches", patches, begin)
        multiply(x, Matrix(weights.patch_embed, shape.patch, hidden), residual, patches, adds=True)
        bias = 0
        for number, block in enumerate(weights.blocks):
            self._block(block, bias, patches, scratch, pointers)
            bias = block.fc2_bias
            if number in shape.deepstack:
                level = shape.deepstack.index(number)
                merger, rows = weights.deepstack_mergers[level], patches // shape.patches_per_row
                norm = {"norm": merger.norm, "shift": merger.norm_bias, "bias": bias}
                self._by_row("norm_merged", rows, NormMergedParams(**norm, residual=residual, x=x))
                self._merge(merger, rows, scratch, pointers[f"deepstack_embeds_{level}"])
        merger = weights.merger
        self._norm(merger.norm, merger.norm_bias, bias, patches, scratch)
        self._merge(merger, patches // shape.patches_per_row, scratch, pointers["image_embeds"])

    def _block(
        self,
        weights: VisionBlockWeights,
        bias: int,
        patches: int,
        scratch: Mapping[str, int],
        pointers: Mapping[str, int],
    ) -> None:
        """Run a block; bias: of the product before it, which the residual stream lacks."""
        shape, plan, multiply = self._shape, self._plan, self._products.multiply
        residual, x, qkv, inner = (scratch[name] for name in ("residual", "x", "qkv", "inner"))
        hidden = shape.hidden
        self._norm(weights.norm1, weights.norm1_bias, bias, patches, scratch)
        multiply(x, Matrix(weights.qkv, hidden, 3 * hidden), qkv, patches)
        angles = {"cos_rows": pointers["rope_cos"], "sin_rows": pointers["rope_sin"]}
        self._by_row("rope_patches", patches, RopePatchesParams(qkv=qkv, bias=weights.qkv_bias, **angles))
        attention = PatchAttentionParams(qkv=qkv, out=x, patches=patches)
        self._program.launch(plan.attention(patches), attention)
        multiply(x, Matrix(weights.proj, hidden, hidden), residual, patches, adds=True)
        self._norm(weights.norm2, weights.norm2_bias, weights.proj_bias, patches, scratch)
        raising = Matrix(weights.fc1, hidden, shape.inner)
        multiply(x, raising, inner, patches, gelu_bias=weights.fc1_bias)
        multiply(inner, Matrix(weights.fc2, shape.inner, hidden), residual, patches, adds=True)

    def _merge(self, weights: MergerWeights, rows: int, scratch: Mapping[str, int], out: int) -> None:
        """Run a merger, from x to rows of embeddings."""
        shape, plan, multiply = self._shape, self._plan, self._products.multiply
        x, inner, merged = scratch["x"], scratch["inner"], shape.merged
        multiply(x, Matrix(weights.first, merged, merged), inner, rows)
        activate = plan.by_quad("activate_merged", rows, merged)
        self._program.launch(activate, ActivateMergedParams(values=inner, bias=weights.first_bias))
        multiply(inner, Matrix(weights.second, merged, shape.out), out, rows)
        add = plan.by_quad("add_bias", rows, shape.out)
        self._program.launch(add, AddBiasParams(values=out, bias=weights.second_bias))

    def _norm(self, norm: int, shift: int, bias: int, patches: int, scratch: Mapping[str, int]) -> None:
        """Add a bias to the residual stream, and norm it to x."""
        params = NormPatchesParams(
            norm=norm, shift=shift, bias=bias, residual=scratch["residual"], x=scratch["x"]
        )
        self._by_row("norm_patches", patches, params)

    def _by_row(self, name: str, rows: int, params: Any) -> None:
        self._program.launch(self._plan.by_row(name, rows), params)

    def _buffers(self, patches: int) -> dict[str, int]:
        """Return the addresses of buffers for so many patches.

        Larger ones are made for a larger image.
        """
        if patches > self._most_patches:
            shape = self._shape
            most = max(patches, 3 * self._most_patches // 2)
            sizes = {
                "residual": 4 * most * shape.hidden,
                "x": 2 * most * max(shape.hidden, shape.patch),
                "qkv": 6 * most * shape.hidden,
                "inner": 2 * most * max(shape.inner, shape.hidden),
            }
            made = {name: self._device.zeros((nbytes,), np.uint8) for name, nbytes in sizes.items()}
            self._scratch.append(made)
            self._most_patches = most
        return {name: tensor.pointer for name, tensor in self._scratch[-1].items()}
