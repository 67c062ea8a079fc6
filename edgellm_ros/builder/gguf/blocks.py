# SPDX-License-Identifier: Apache-2.0
"""Types of tensors in GGUF files, and what their blocks contain.

A weight is scale * code + minimum, or scale * (code - centre) where a type has no minimum. Codes have 4 or 8
bits; 16 or 32 neighbours share a scale. Source: ggml-org/llama.cpp, ggml/src/ggml-common.h; the sums are in
the order of gguf-py/gguf/quants.py, so that weights are equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

NAMES_OF_TYPES = {
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 29: "IQ1_M",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
# Values of the codes of IQ4_NL and IQ4_XS.
IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


@dataclass(frozen=True, eq=False)
class Codes:
    """Unpacked blocks of N rows of K weights, in groups of K / groups."""

    values: np.ndarray  # [N,K] int8 or uint8
    scales: np.ndarray  # [N,groups] fp32
    minima: np.ndarray | None = None  # [N,groups] fp32; None: weights have a centre

    def weights(self, centre: int) -> np.ndarray:
        """Compute the weights [N,K] in fp32."""
        rows, columns = self.values.shape
        values = self.values.reshape(rows, self.scales.shape[1], -1).astype(np.float32)
        if self.minima is None:
            values = self.scales[:, :, None] * (values - np.float32(centre))
        else:
            values = self.scales[:, :, None] * values + self.minima[:, :, None]
        return values.reshape(rows, columns)


@dataclass(frozen=True, eq=False)
class BlockType:
    """A type of tensors.

    unpack: from bytes [N,blocks,bytes] to codes; None for floats, which have a dtype.
    """

    name: str
    weights: int  # of a block
    bytes: int  # of a block
    unpack: Callable[[np.ndarray], Codes] | None = None
    group: int = 32  # weights that share a scale
    bits: int = 8  # of a code around the centre
    centre: int = 0
    has_minima: bool = False
    dtype: str = "F32"  # name of floats in safetensors files


def _halves(data: np.ndarray, at: int, count: int = 1) -> np.ndarray:
    """Read numbers of 16 bits from byte `at` of each block as fp32, [N,blocks,count]."""
    part = np.ascontiguousarray(data[..., at : at + 2 * count])
    return part.view(np.float16).astype(np.float32)


def _nibbles(data: np.ndarray) -> np.ndarray:
    """Split bytes [...,n]: the n lower halves, then the n upper ones."""
    return np.concatenate([data & 15, data >> 4], axis=-1)


def _fifth_bits(data: np.ndarray) -> np.ndarray:
    """Spread the 32 bits of 4 bytes [...,4] to [...,32], as 0 or 16."""
    return np.unpackbits(data, axis=-1, bitorder="little") << 4


def _rows(values: np.ndarray) -> np.ndarray:
    """Join the blocks of each row: [N,blocks,...] to [N,all]."""
    return values.reshape(values.shape[0], -1)


def _q4_0(data: np.ndarray) -> Codes:
    return Codes(_rows(_nibbles(data[..., 2:])), _rows(_halves(data, 0)))


def _q4_1(data: np.ndarray) -> Codes:
    return Codes(_rows(_nibbles(data[..., 4:])), _rows(_halves(data, 0)), _rows(_halves(data, 2)))


def _q5_0(data: np.ndarray) -> Codes:
    codes = _nibbles(data[..., 6:]) | _fifth_bits(data[..., 2:6])
    return Codes(_rows(codes), _rows(_halves(data, 0)))


def _q5_1(data: np.ndarray) -> Codes:
    codes = _nibbles(data[..., 8:]) | _fifth_bits(data[..., 4:8])
    return Codes(_rows(codes), _rows(_halves(data, 0)), _rows(_halves(data, 2)))


def _q8_0(data: np.ndarray) -> Codes:
    codes = np.ascontiguousarray(data[..., 2:]).view(np.int8)
    return Codes(_rows(codes), _rows(_halves(data, 0)))


def _six_bits(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unpack 8 scales and 8 minima of 6 bits from 12 bytes: [N,blocks,8] fp32 each."""
    low, middle, high = data[..., :4], data[..., 4:8], data[..., 8:]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=-1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=-1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _in_fours(data: np.ndarray) -> np.ndarray:
    """Split 128 bytes of each block into 256 codes.

    Of 32 bytes the lower halves come first.
    """
    return _nibbles(data.reshape(*data.shape[:2], 4, 32))


def _q4_k(data: np.ndarray) -> Codes:
    scales, minima = _six_bits(data[..., 4:16])
    return Codes(
        _rows(_in_fours(data[..., 16:])),
        _rows(_halves(data, 0) * scales),
        _rows(-(_halves(data, 2) * minima)),
    )


def _q5_k(data: np.ndarray) -> Codes:
    scales, minima = _six_bits(data[..., 4:16])
    bits = np.unpackbits(data[..., 16:48, None], axis=-1, bitorder="little")  # [N,blocks,32,8]
    high = np.moveaxis(bits, -1, -2).reshape(*data.shape[:2], 4, 64)
    codes = _in_fours(data[..., 48:]) | (high << 4)
    return Codes(_rows(codes), _rows(_halves(data, 0) * scales), _rows(-(_halves(data, 2) * minima)))


def _q6_k(data: np.ndarray) -> Codes:
    low = data[..., :128].reshape(*data.shape[:2], 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=-2)  # [N,blocks,2,2,64]
    high = data[..., 128:192].reshape(*data.shape[:2], 2, 1, 32)
    high = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=-2)
    codes = _rows(low) | _rows(high) << 4
    scales = np.ascontiguousarray(data[..., 192:208]).view(np.int8).astype(np.float32)
    return Codes(codes, _rows(_halves(data, 208) * scales))


def _q3_k(data: np.ndarray) -> Codes:
    bits = np.unpackbits(data[..., :32, None], axis=-1, bitorder="little")  # [N,blocks,32,8]
    high = np.moveaxis(bits, -1, -2)  # 8 runs of 32
    low = data[..., 32:96].reshape(*data.shape[:2], 2, 1, 32)
    low = np.concatenate([low >> shift & 3 for shift in (0, 2, 4, 6)], axis=-2)
    codes = _rows(low) | _rows(high) << 2
    packed = data[..., 96:108]
    lower, upper = packed[..., :8], packed[..., 8:]
    small = np.concatenate([lower & 15, lower >> 4], axis=-1)
    large = np.concatenate([upper >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)
    scales = (small | large << 4).astype(np.float32) - 32
    return Codes(codes, _rows(_halves(data, 108) * scales))


def _q2_k(data: np.ndarray) -> Codes:
    scales, codes = data[..., :16], data[..., 16:80].reshape(*data.shape[:2], 2, 1, 32)
    codes = np.concatenate([codes >> shift & 3 for shift in (0, 2, 4, 6)], axis=-2)
    return Codes(
        _rows(codes),
        _rows(_halves(data, 80) * (scales & 15).astype(np.float32)),
        _rows(-(_halves(data, 82) * (scales >> 4).astype(np.float32))),
    )


def _iq4_nl(data: np.ndarray) -> Codes:
    return Codes(_rows(IQ4_VALUES[_nibbles(data[..., 2:])]), _rows(_halves(data, 0)))


def _iq4_xs(data: np.ndarray) -> Codes:
    high = np.ascontiguousarray(data[..., 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = data[..., 4:8]
    low = np.stack([low & 15, low >> 4], axis=-1).reshape(*data.shape[:2], 8)
    scales = (low | high.astype(np.uint8) << 4).astype(np.float32) - 32
    codes = _nibbles(data[..., 8:].reshape(*data.shape[:2], 8, 16))
    return Codes(_rows(IQ4_VALUES[codes]), _rows(_halves(data, 0) * scales))


TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2, dtype="F16"),
    30: BlockType("BF16", 1, 2, dtype="BF16"),
    2: BlockType("Q4_0", 32, 18, _q4_0, bits=4, centre=8),
    3: BlockType("Q4_1", 32, 20, _q4_1, bits=4, centre=8, has_minima=True),
    6: BlockType("Q5_0", 32, 22, _q5_0, centre=16),
    7: BlockType("Q5_1", 32, 24, _q5_1, centre=16, has_minima=True),
    8: BlockType("Q8_0", 32, 34, _q8_0),
    10: BlockType("Q2_K", 256, 84, _q2_k, group=16, bits=4, centre=2, has_minima=True),
    11: BlockType("Q3_K", 256, 110, _q3_k, group=16, bits=4, centre=4),
    12: BlockType("Q4_K", 256, 144, _q4_k, bits=4, centre=8, has_minima=True),
    13: BlockType("Q5_K", 256, 176, _q5_k, centre=16, has_minima=True),
    14: BlockType("Q6_K", 256, 210, _q6_k, group=16, centre=32),
    20: BlockType("IQ4_NL", 32, 18, _iq4_nl),
    23: BlockType("IQ4_XS", 256, 136, _iq4_xs),
}
