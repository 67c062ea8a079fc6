# SPDX-License-Identifier: Apache-2.0
"""A graph builder for model layers that takes weights from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.graph.graph import FLOAT, KV_CACHE_DTYPES, Dim, GraphBuilder
from edgellm_ros.builder.graph.lora import TARGETS, add_lora_inputs
from edgellm_ros.builder.graph.product import quantized_product
from edgellm_ros.builder.quantization.matrix import QuantizedMatrix, join
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.engine_directory.adapters.lora_inputs import engine_module

Cache = tuple[ir.Value, ir.Value]  # keys and values of one layer


class ModelBuilder(GraphBuilder):
    """Writes the graph of one model from the weights of one checkpoint.

    `module` enters a module: tensors and nodes get its name as prefix. Layer methods take a child's name.
    With `lora`, the linear layers in `lora.TARGETS` get LoRA inputs. onnxruntime: the graph is for ONNX
    Runtime alone. flat: linear layers read matrices [T,K]. kv_cache: type of the KV cache, as in
    `LLMOptions`.
    """

    def __init__(
        self,
        name: str,
        weights: Weights,
        precision: str,
        lora: bool = False,
        onnxruntime: bool = False,
        kv_cache: str | None = None,
        *,
        flat: bool = False,
    ) -> None:
        super().__init__(name, precision)
        self.cache_dtype = KV_CACHE_DTYPES[kv_cache or precision]
        self.weights = weights
        self.lora = lora
        self.onnxruntime = onnxruntime
        self.flat = flat
        self.linear_inputs: dict[str, ir.Value] = {}  # what each linear layer multiplies, by its full name
        self._prefix: list[str] = []

    @contextmanager
    def module(self, name: str, nodes: str | None = None) -> Iterator[None]:
        """Enter a module.

        Inside, tensors are `<outer>.<name>.<tensor>`, nodes `/<outer>/<name or nodes>/<operator>`.
        """
        self._prefix.append(name)
        with self.scope(name if nodes is None else nodes):
            yield
        self._prefix.pop()

    @contextmanager
    def tensors_of(self, weights: Weights) -> Iterator[None]:
        """Take the tensors of modules inside from another checkpoint."""
        outer, self.weights = self.weights, weights
        yield
        self.weights = outer

    def tensor(self, name: str, *shape: int) -> ir.Value:
        """Add the tensor `name` of this module unchanged; it must have this shape."""
        full, weights = self.full_name(name), self.weights
        weights.require(full, shape)
        return self.weight(full, shape, lambda: weights.read(full))

    def linear(self, name: str, x: ir.Value, fan_in: int, fan_out: int, bias: bool = False) -> ir.Value:
        """Add a linear layer, x [..., fan_in] -> [..., fan_out].

        With LoRA inputs, x must be 2-D.
        """
        with self.scope(name):
            y = self._products(name, {name: fan_out}, x, fan_in)
            if bias:
                y = self.op("Add", y, self.tensor(f"{name}.bias", fan_out))
            return self._with_lora({name: fan_out}, x, y, fan_in)

    # x -- MatMul [first | second | ...] -- Split --+-- first -->
    #                                               +-- second -->
    def linears(
        self, name: str, parts: Mapping[str, int], x: ir.Value, fan_in: int, bias: bool = False
    ) -> Sequence[ir.Value]:
        """Add linear layers that read the same x [..., fan_in], as one product.

        parts: name -> fan_out; `name` names the product. On a GPU a decode step of Qwen3-1.7B takes 0.91 of
        the time that it takes with one product each (H200, fp16, batch 1, ONNX Runtime 1.31). On two cores
        the arena's prompt of 103 tokens takes 1.05, because the parts are copied, and a decode step as long
        as before; TensorRT joins the products by itself.
        """
        return self.split(self.joined_linears(name, parts, x, fan_in, bias), list(parts.values()), axis=-1)

    def joined_linears(
        self, name: str, parts: Mapping[str, int], x: ir.Value, fan_in: int, bias: bool = False
    ) -> ir.Value:
        """Add `linears` without the split: [..., fan_in] -> [..., sum of fan_outs]."""
        with self.scope(name):
            y = self._products(name, parts, x, fan_in)
            y = self.op("Add", y, self._joined_biases(name, parts)) if bias else y
            return self._with_lora(parts, x, y, fan_in)

    def _products(self, name: str, parts: Mapping[str, int], x: ir.Value, fan_in: int) -> ir.Value:
        """Add x times the weights of layers (name -> fan_out), side by side.

        Neighbours whose weights are stored alike are one product; `name` names it if it has all of them.
        """
        runs: list[tuple[dict[str, int], QuantizedMatrix | None]] = []
        for part, fan_out in parts.items():
            self.linear_inputs[self.full_name(part)] = x
            matrix = self._quantized(part, fan_in, fan_out)
            before, last = runs[-1] if runs else ({}, None)
            joined = join([last, matrix]) if last is not None and matrix is not None else None
            if runs and (joined is not None or (last is None and matrix is None)):
                runs[-1] = ({**before, part: fan_out}, joined)
            else:
                runs.append(({part: fan_out}, matrix))
        results = []
        for run, matrix in runs:
            full = self.full_name(name if len(runs) == 1 else "-".join(run))
            if matrix is None:
                results.append(self.op("MatMul", x, self._joined_matrix(full, run, fan_in)))
            else:
                results.append(quantized_product(self, full, x, matrix, self.onnxruntime, self.flat))
        return results[0] if len(results) == 1 else self.op("Concat", *results, axis=-1)

    def _joined_matrix(self, name: str, parts: Mapping[str, int], fan_in: int) -> ir.Value:
        """Add the weights of layers side by side as one weight, [fan_in, sum of fan_outs]."""
        reads = [self._matrix(self.full_name(f"{part}.weight"), fan_in, size) for part, size in parts.items()]

        def read() -> np.ndarray:
            return reads[0]() if len(reads) == 1 else np.concatenate([each() for each in reads], axis=1)

        return self.weight(f"{name}.weight", (fan_in, sum(parts.values())), read)

    def _quantized(self, name: str, fan_in: int, fan_out: int) -> QuantizedMatrix | None:
        """Return the weight of a quantised layer; None if the layer is not quantised."""
        matrix = self.weights.matrix(self.full_name(name))
        if matrix is not None:
            self.weights.require(self.full_name(f"{name}.weight"), (fan_out, fan_in))
        return matrix

    def _matrix(self, full: str, fan_in: int, fan_out: int) -> Callable[[], np.ndarray]:
        """Make a function that reads a weight as MatMul takes it, [fan_in, fan_out].

        The checkpoint has [fan_out, fan_in], or more dimensions for a convolution whose stride is its size.
        """
        weights = self.weights
        stored = weights.shape(full)
        if (stored[0], int(np.prod(stored[1:]))) != (fan_out, fan_in):
            weights.require(full, (fan_out, fan_in))
        return lambda: weights.read(full).reshape(fan_out, fan_in).T

    def _joined_biases(self, name: str, parts: Mapping[str, int]) -> ir.Value:
        names, weights = [self.full_name(f"{part}.bias") for part in parts], self.weights
        for full, size in zip(names, parts.values(), strict=True):
            weights.require(full, (size,))
        return self.weight(
            self.full_name(f"{name}.bias"),
            (sum(parts.values()),),
            lambda: np.concatenate([weights.read(full) for full in names]),
        )

    def _with_lora(self, parts: Mapping[str, int], x: ir.Value, y: ir.Value, fan_in: int) -> ir.Value:
        """Add LoRA inputs for layers (name -> fan_out), if the graph has any."""
        if not self.lora or not set(parts) <= TARGETS:
            return y
        return add_lora_inputs(self, engine_module(".".join(self._prefix)), parts, x, y, fan_in)

    def conv2d(self, name: str, x: ir.Value, fan_in: int, fan_out: int) -> ir.Value:
        """Add a 3 x 3 convolution of stride 2.

        x [N, fan_in, H, W] -> [N, fan_out, ceil(H/2), ceil(W/2)].
        """
        with self.module(name):
            kernel, bias = self.tensor("weight", fan_out, fan_in, 3, 3), self.tensor("bias", fan_out)
            return self.op("Conv", x, kernel, bias, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])

    def rms_norm(self, name: str, x: ir.Value, size: int, epsilon: float) -> ir.Value:
        """Add an RMSNorm over the last dimension; the mean square is computed in fp32."""
        with self.module(name):
            scale = self.tensor("weight", size)
            return self.op("RMSNormalization", x, scale, axis=-1, epsilon=epsilon, stash_type=1)

    def layer_norm(self, name: str, x: ir.Value, size: int, epsilon: float) -> ir.Value:
        """Add a LayerNorm over the last dimension; mean and variance are computed in fp32."""
        with self.module(name):
            scale, shift = self.tensor("weight", size), self.tensor("bias", size)
            return self.op("LayerNormalization", x, scale, shift, axis=-1, epsilon=epsilon, stash_type=1)

    # x -- gate_up_proj --+-- gate --+-- Sigmoid --+
    #                     |          +----------- Mul --+
    #                     +-- up -------------------- Mul -- down_proj -->
    def swiglu(self, name: str, x: ir.Value, size: int, inner: int, bias: bool = False) -> ir.Value:
        """Add the feed-forward block of Llama and Qwen, x [..., size] -> [..., size]."""
        with self.module(name):
            gate, up = self.linears("gate_up_proj", {"gate_proj": inner, "up_proj": inner}, x, size, bias)
            silu = self.op("Mul", gate, self.op("Sigmoid", gate))
            return self.linear("down_proj", self.op("Mul", silu, up), inner, size, bias)

    def rope_rows(self, length: int | str, pairs: int) -> tuple[ir.Value, ir.Value]:
        """Add inputs rope_cos and rope_sin [B, length, pairs] fp32.

        Returns them in the graph's dtype. One row per token. The runtime computes the rows, so that plain
        RoPE and mRoPE are the same graph.
        """
        cos, sin = (
            self.input(name, FLOAT, ["B", length, pairs]) for name in (names.ROPE_COS, names.ROPE_SIN)
        )
        with self.scope("rope"):
            return self.from_fp32(cos), self.from_fp32(sin)

    def caches(self, layers: Iterable[int], kv_heads: int, capacity: int, head_dim: int) -> list[Cache]:
        """Add inputs key_cache_i and value_cache_i for each layer i.

        Each is [B, kv_heads, capacity, head_dim].
        """
        shape: list[Dim] = ["B", kv_heads, capacity, head_dim]
        return [
            (
                self.input(names.key_cache(i), self.cache_dtype, shape),
                self.input(names.value_cache(i), self.cache_dtype, shape),
            )
            for i in layers
        ]

    # k -- TensorScatter (key_cache) ---- present_key ----+
    # v -- TensorScatter (value_cache) -- present_value --+
    # q --------------------------------------------- Attention (mask) -->
    def cached_attention(
        self,
        q: ir.Value,
        k: ir.Value,
        v: ir.Value,
        cache: Cache,
        write_index: ir.Value,
        mask: ir.Value,
        scale: float,
    ) -> tuple[ir.Value, Cache]:
        """Write new keys and values to the cache and attend to it.

        q [B,heads,S,D]; k, v [B,Hkv,S,D]; cache [B,Hkv,C,D] each; write_index [B]; mask [B,1,S,C]. Returns
        [B,heads,S,D] and the updated cache.
        """
        keys, present_keys = self.written_cache(cache[0], k, write_index)
        values, present_values = self.written_cache(cache[1], v, write_index)
        return self.op("Attention", q, keys, values, mask, scale=scale), (present_keys, present_values)

    # new -- Cast (FP8) -- Cast --+
    # cache ------- Cast -- TensorScatter --+-- Cast (FP8) -- present
    #                                       +-- rows to attend to -->
    def written_cache(
        self, cache: ir.Value, new: ir.Value, write_index: ir.Value
    ) -> tuple[ir.Value, ir.Value]:
        """Write new rows [B,Hkv,S,D] to a cache.

        Returns the rows to attend to, and the updated cache. Both are one value if the cache has the graph's
        type. Of an FP8 cache the rows are in the graph's type, and the new ones are rounded too, so that a
        token attends to the same values in the run that writes them and later. TensorScatter lacks FP8, in
        ONNX Runtime (1.31) and in TensorRT (RTX 1.7.1).
        """
        if self.cache_dtype == self.dtype:
            written = self.op("TensorScatter", cache, new, write_index, axis=-2, mode="linear")
            return written, written
        rounded = self.op("Cast", self.op("Cast", new, to=int(self.cache_dtype)), to=int(self.dtype))
        rows = self.op("Cast", cache, to=int(self.dtype))
        rows.type, rows.shape = ir.TensorType(self.dtype), cache.shape
        written = self.op("TensorScatter", rows, rounded, write_index, axis=-2, mode="linear")
        return written, self.op("Cast", written, to=int(self.cache_dtype))

    def rows(self, x: ir.Value, index: ir.Value, size: int) -> ir.Value:
        """Select rows: x [B,S,size], index [B,N] -> [B,N,size].

        Not GatherND: ONNX Runtime's CUDA kernel copies from host memory that a CUDA graph would find
        overwritten.
        """
        with self.scope("rows"):
            index = self.op("Unsqueeze", index, self.constant([-1]))
            index = self.op("Expand", index, self.constant([1, 1, size]))
            return self.op("GatherElements", x, index, axis=1)

    def full_name(self, name: str) -> str:
        """Return the checkpoint's name of a tensor of this module."""
        return ".".join([*self._prefix, name])
