# SPDX-License-Identifier: Apache-2.0
"""A graph builder that knows a checkpoint: each layer takes its weights from the module that it names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.checkpoint import Weights
from edgellm_ros.builder.graph import FLOAT, Dim, GraphBuilder
from edgellm_ros.builder.lora import TARGETS, add_adapter


class ModelBuilder(GraphBuilder):
    """Writes the graph of one model from the weights of one checkpoint.

    `module` enters a module: tensors and nodes get its name as prefix. Layer methods take a child's name.
    With `lora`, linear layers that adapters are made for have a place for one.
    """

    def __init__(self, name: str, weights: Weights, precision: str, lora: bool = False) -> None:
        super().__init__(name, precision)
        self.weights = weights
        self.lora = lora
        self._prefix: list[str] = []

    @contextmanager
    def module(self, name: str, nodes: str | None = None) -> Iterator[None]:
        """Inside, tensors are `<outer>.<name>.<tensor>`, nodes `/<outer>/<name or nodes>/<operator>`."""
        self._prefix.append(name)
        with self.scope(name if nodes is None else nodes):
            yield
        self._prefix.pop()

    def tensor(self, name: str, *shape: int) -> ir.Value:
        """The tensor `name` of this module as it is; it must have this shape."""
        full = self.full_name(name)
        self.weights.require(full, shape)
        return self.weight(full, shape, lambda: self.weights.read(full))

    def linear(self, name: str, x: ir.Value, fan_in: int, fan_out: int, bias: bool = False) -> ir.Value:
        """Linear layer, x [..., fan_in] -> [..., fan_out]; with a place for an adapter x must be a matrix.

        The checkpoint keeps [fan_out, fan_in], or more dimensions for a convolution that sees each patch
        once; MatMul takes it transposed. Every linear layer is a MatMul of its own, also where several share
        an input: fusing q, k and v, or gate and up, changed prefill and decode on the CPU by less than 3%,
        TensorRT fuses by itself, and so each layer keeps a place for an adapter.
        """
        with self.module(name):
            full = self.full_name("weight")
            stored = self.weights.shape(full)
            if (stored[0], int(np.prod(stored[1:]))) != (fan_out, fan_in):
                self.weights.require(full, (fan_out, fan_in))
            matrix = self.weight(
                full, (fan_in, fan_out), lambda: self.weights.read(full).reshape(fan_out, fan_in).T
            )
            y = self.op("MatMul", x, matrix)
            if bias:
                y = self.op("Add", y, self.tensor("bias", fan_out))
            if self.lora and name in TARGETS:
                y = add_adapter(self, ".".join(self._prefix), x, y, fan_in, fan_out)
            return y

    def conv2d(self, name: str, x: ir.Value, fan_in: int, fan_out: int) -> ir.Value:
        """3 x 3 convolution of stride 2, x [N, fan_in, H, W] -> [N, fan_out, ceil(H/2), ceil(W/2)]."""
        with self.module(name):
            kernel, bias = self.tensor("weight", fan_out, fan_in, 3, 3), self.tensor("bias", fan_out)
            return self.op("Conv", x, kernel, bias, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])

    def rms_norm(self, name: str, x: ir.Value, size: int, epsilon: float) -> ir.Value:
        """Over the last dimension; the mean square is taken in fp32 whatever the type of x."""
        with self.module(name):
            scale = self.tensor("weight", size)
            return self.op("RMSNormalization", x, scale, axis=-1, epsilon=epsilon, stash_type=1)

    def layer_norm(self, name: str, x: ir.Value, size: int, epsilon: float) -> ir.Value:
        """Over the last dimension; mean and variance are taken in fp32 whatever the type of x."""
        with self.module(name):
            scale, shift = self.tensor("weight", size), self.tensor("bias", size)
            return self.op("LayerNormalization", x, scale, shift, axis=-1, epsilon=epsilon, stash_type=1)

    # x --+-- gate_proj --+-- Sigmoid --+
    #     |               +----------- Mul --+
    #     +-- up_proj --------------------- Mul -- down_proj -->
    def swiglu(self, name: str, x: ir.Value, size: int, inner: int) -> ir.Value:
        """Feed-forward block of Llama and Qwen, x [..., size] -> [..., size]."""
        with self.module(name):
            gate = self.linear("gate_proj", x, size, inner)
            up = self.linear("up_proj", x, size, inner)
            silu = self.op("Mul", gate, self.op("Sigmoid", gate))
            return self.linear("down_proj", self.op("Mul", silu, up), inner, size)

    def rope_rows(self, length: int | str, pairs: int) -> tuple[ir.Value, ir.Value]:
        """Inputs rope_cos and rope_sin [B, length, pairs] fp32, one row per token, cast to the graph's dtype.

        The caller makes the rows, so that plain RoPE and mRoPE are the same graph.
        """
        cos, sin = (self.input(name, FLOAT, ["B", length, pairs]) for name in ("rope_cos", "rope_sin"))
        with self.scope("rope"):
            return self.from_fp32(cos), self.from_fp32(sin)

    def caches(
        self, layers: int, kv_heads: int, capacity: int, head_dim: int
    ) -> list[tuple[ir.Value, ir.Value]]:
        """Inputs key_cache_i and value_cache_i [B, kv_heads, capacity, head_dim] in the graph's dtype."""
        shape: list[Dim] = ["B", kv_heads, capacity, head_dim]
        return [
            (
                self.input(f"key_cache_{i}", self.dtype, shape),
                self.input(f"value_cache_{i}", self.dtype, shape),
            )
            for i in range(layers)
        ]

    def full_name(self, name: str) -> str:
        """A tensor of this module as the checkpoint calls it."""
        return ".".join([*self._prefix, name])
