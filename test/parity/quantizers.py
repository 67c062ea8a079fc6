# SPDX-License-Identifier: Apache-2.0
"""Quantises layers as the published tools do, in PyTorch.

The functions are written after the packing code of the tools. Each takes a weight [N,K] and returns the
tensors that the tool stores, by suffix, and the weight that they stand for, in fp32.
"""

from __future__ import annotations

import torch

Stored = dict[str, torch.Tensor]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
FP8 = torch.float8_e4m3fn


def to_words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack unsigned values along the last dimension, the first in the lowest bits."""
    each = 32 // bits
    padded = torch.nn.functional.pad(values.long(), (0, -values.shape[-1] % each))
    words = torch.zeros(*padded.shape[:-1], padded.shape[-1] // each, dtype=torch.int64)
    for index in range(each):
        words |= padded[..., index::each] << (bits * index)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def in_groups(weight: torch.Tensor, group: int) -> torch.Tensor:
    return weight.unflatten(1, (-1, weight.shape[1] if group == -1 else group))


def affine(
    weight: torch.Tensor, bits: int, group: int, symmetric: bool, scale_type=torch.float16
) -> tuple[torch.Tensor, ...]:
    """Round to unsigned integers; return them, scales, zero points and rounded weight.

    The integers are [N,K], scales and zero points [N,G]. The rounded weight is what they stand for.
    """
    blocks, top = in_groups(weight, group), 2**bits - 1
    if symmetric:
        scale = blocks.abs().amax(-1) / (2 ** (bits - 1) - 1)
        zero = torch.full_like(scale, 2 ** (bits - 1))
    else:
        low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
        scale = ((high - low) / top).clamp(min=1e-5)
        zero = (-low / scale).round().clamp(0, top)
    scale = scale.clamp(min=1e-5).to(scale_type).float()  # of a column of zeros too
    values = ((blocks / scale[..., None]).round() + zero[..., None]).clamp(0, top)
    rounded = (values - zero[..., None]) * scale[..., None]
    return values.flatten(1), scale.to(scale_type), zero, rounded.flatten(1)


def awq(weight: torch.Tensor, group: int) -> tuple[Stored, torch.Tensor]:
    """AutoAWQ, WQLinear_GEMM: words of 8 outputs."""
    values, scale, zero, rounded = affine(weight, 4, group, symmetric=False)

    def pack(matrix: torch.Tensor) -> torch.Tensor:  # [rows, outputs]
        return to_words(matrix.unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1), 4)

    tensors = {"qweight": pack(values.T), "qzeros": pack(zero.T), "scales": scale.T.contiguous()}
    return tensors, rounded


def gptq(
    weight: torch.Tensor,
    bits: int,
    group: int,
    symmetric: bool,
    order: torch.Tensor | None = None,
    version: int = 1,
) -> tuple[Stored, torch.Tensor]:
    """Pack words of inputs as AutoGPTQ's QuantLinear.pack does.

    order [K]: inputs in the order in which they are quantised.
    """
    inputs = weight.shape[1]
    order = torch.arange(inputs) if order is None else order
    values, scale, zero, rounded = affine(weight[:, order], bits, group, symmetric)
    if version == 1 and not symmetric:  # version 1 cannot store a zero point of 0
        zero = zero.clamp(min=1)
        blocks = in_groups(values, group)
        rounded = ((blocks - zero[..., None]) * scale.float()[..., None]).flatten(1)
    back = order.argsort()
    size = inputs if group == -1 else group
    stored = zero.T - 1 if version == 1 else zero.T
    tensors = {
        "qweight": to_words(values[:, back], bits).T.contiguous(),
        "qzeros": to_words(stored, bits),
        "scales": scale.T.contiguous(),
        "g_idx": (torch.arange(inputs) // size)[back].int(),
    }
    return tensors, rounded[:, back]


def packed(
    weight: torch.Tensor,
    bits: int,
    group: int,
    symmetric: bool,
    order: torch.Tensor | None = None,
    packed_zeros: bool = True,
) -> tuple[Stored, torch.Tensor]:
    """Pack words of inputs in the format pack_quantized of compressed-tensors.

    The words have the integers plus half of their range.
    """
    inputs, half = weight.shape[1], 2 ** (bits - 1)
    index = torch.arange(inputs) if order is None else order
    values, scale, zero, rounded = affine(weight[:, index], bits, group, symmetric, torch.bfloat16)
    back = index.argsort()
    tensors = {
        "weight_packed": to_words(values[:, back], bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric and packed_zeros:
        tensors["weight_zero_point"] = to_words(zero.T, bits).T.contiguous()
    elif not symmetric:
        tensors["weight_zero_point"] = (zero - half).to(torch.int8)
    if order is not None:
        tensors["weight_g_idx"] = (torch.arange(inputs) // group)[back].int()
    return tensors, rounded[:, back]


def int8(weight: torch.Tensor, symmetric: bool = True) -> tuple[Stored, torch.Tensor]:
    """compressed-tensors, int_quantized with a scale for each output."""
    values, scale, zero, rounded = affine(weight, 8, -1, symmetric, torch.bfloat16)
    tensors = {"weight": (values - 128).to(torch.int8), "weight_scale": scale}
    if not symmetric:
        tensors["weight_zero_point"] = (zero - 128).to(torch.int8)
    return tensors, rounded


def fp8(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to FP8 with scales that can be broadcast."""
    values = (weight / scale.float()).clamp(-448, 448).to(FP8)
    return values, values.float() * scale.float()


def fp8_tensor(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    """Model Optimizer's FP8: one scale, and one for the input."""
    scale = weight.abs().max() / 448
    values, rounded = fp8(weight, scale)
    return {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(0.01)}, rounded


def fp8_channel(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    """compressed-tensors, float_quantized with a scale for each output."""
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    values, rounded = fp8(weight, scale)
    return {"weight": values, "weight_scale": scale}, rounded


def fp8_block(weight: torch.Tensor, block: tuple[int, int], name: str) -> tuple[Stored, torch.Tensor]:
    """Round to FP8 with a scale for each block of outputs and inputs.

    The last block of each may be smaller.
    """
    rows, columns = (torch.arange(size) // edge for size, edge in zip(weight.shape, block, strict=True))
    scale = torch.zeros(int(rows[-1]) + 1, int(columns[-1]) + 1)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            scale[i, j] = weight[rows == i][:, columns == j].abs().max() / 448
    values, rounded = fp8(weight, scale[rows][:, columns])
    return {"weight": values, name: scale}, rounded
