# SPDX-License-Identifier: Apache-2.0
"""Convolutions over the time of a trajectory, as products of matrices.

cuDNN computes such convolutions slowly: at a batch of one and 4 to 16 steps, a run of the U-Net of LeRobot's
default size in fp16 takes 13 ms on an H200, while its weights could be read in 0.11 ms.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.action.action_layers import repeat
from edgellm_ros.builder.graph.graph import FLOAT
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory import binding_names as names

DOUBLED_KERNEL = 4  # of the convolution that doubles the steps


def taps(steps: int, kernel: int, stride: int = 1) -> np.ndarray:
    """Return which steps a convolution reads.

    The result is bool [steps / stride,kernel,steps]; (t, j, s) is true where weight j of the result's step
    t is for step s. The padding is kernel // 2.
    """
    after = (steps + 2 * (kernel // 2) - kernel) // stride + 1
    read = stride * np.arange(after)[:, None] + np.arange(kernel) - kernel // 2
    return read[..., None] == np.arange(steps)


def doubled_taps(steps: int) -> np.ndarray:
    """Return which steps a transposed convolution reads that doubles the steps.

    The stride is 2 and the padding 1. The result is as that of `taps`, [2 steps,4,steps].
    """
    read = np.arange(2 * steps)[:, None] + 1 - np.arange(DOUBLED_KERNEL)
    return read[..., None] == 2 * np.arange(steps)


class TrajectoryBuilder(ModelBuilder):
    """Writes a graph from trajectories, with convolutions over their time.

    The input `trajectory` [n,T,A] fp32 is its first one.
    """

    def __init__(self, name: str, weights: Weights, precision: str, sizes: Sequence[int]) -> None:
        """Begin a graph; sizes: T and A."""
        super().__init__(name, weights, precision)
        self.trajectory = self.input(names.TRAJECTORY, FLOAT, ["n", *sizes])
        self._samples = self.op("Shape", self.trajectory, start=0, end=1)
        self._copies: dict[str, ir.Value] = {}

    def convolution(self, name: str, x: ir.Value, widths: tuple[int, int], places: np.ndarray) -> ir.Value:
        """Add `convolved_rows` as [n,widths[1],U]."""
        return self.transpose(self.convolved_rows(name, x, widths, places), (0, 2, 1))

    # x -- Transpose -- MatMul (copies) -- MatMul (weight) -- Add (bias) -->
    def convolved_rows(self, name: str, x: ir.Value, widths: tuple[int, int], places: np.ndarray) -> ir.Value:
        """Add a convolution over time, [n,widths[0],T] -> rows [n,U,widths[1]].

        places: [U,kernel,T], of `taps` or `doubled_taps`. The product with them copies each row to where its
        weights are, and zeros where the padding is; it is exact. ONNX Runtime makes it one operator with the
        transposition. The transposed convolution multiplies by twice as many zeros, but reads its weights
        once.
        """
        (before, after), (rows, kernel, steps) = widths, places.shape
        doubled = rows > steps
        copies = self._repeated(places.reshape(rows * kernel, steps))
        with self.module(name):
            weights, full = self.weights, self.full_name("weight")
            weights.require(full, (before, after, kernel) if doubled else (after, before, kernel))
            shape, order = (kernel * before, after), (2, 0, 1) if doubled else (2, 1, 0)
            matrix = self.weight(full, shape, lambda: weights.read(full).transpose(order).reshape(shape))
            x = self.op("MatMul", copies, self.transpose(x, (0, 2, 1)))
            x = self.reshape(x, [-1, rows, kernel * before])
            return self.op("Add", self.op("MatMul", x, matrix), self.tensor("bias", after))

    def _repeated(self, places: np.ndarray) -> ir.Value:
        """Add a matrix for each sample: [n,...].

        ONNX Runtime's CUDA provider would copy addresses from the host for a product of one matrix with n,
        which no CUDA graph can record.
        """
        matrix = self.constant(places[None], self.dtype)
        if str(matrix.name) not in self._copies:
            self._copies[str(matrix.name)] = repeat(self, matrix, self._samples, 3)
        return self._copies[str(matrix.name)]
