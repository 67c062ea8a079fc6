# SPDX-License-Identifier: Apache-2.0
"""The fused kernels against NumPy in float64.

Without a GPU they are compiled for the host.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cuda.core", reason="NVRTC and its bindings are not installed (requirements-test.txt)")


from doubles import fused_on_cpu
from doubles.fused_decoder import JOINED, TYPES, LayerArrays, Step, decode_step, fuse, layer_shapes
from doubles.quantized_weights import QuantizedMatrix
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.fused.cuda import compiler
from edgellm_ros.fused.decoder import FusedDecoder
from edgellm_ros.fused.fusion import StateFusion
from edgellm_ros.fused.plan.decoder import FusedPlan
from edgellm_ros.fused.plan.fusion import FusionShape
from edgellm_ros.fused.plan.product import ProductPlan
from edgellm_ros.fused.plan.quantized import Quantized
from edgellm_ros.fused.plan.shape import FusedShape
from edgellm_ros.fused.sources import expand
from edgellm_ros.fused.weights import FusedLayerWeights, FusedWeights, FusionWeights
from fixtures.on_device import put
from fixtures.ptxas_report import ptxas_report
from fixtures.random_weights import RandomWeights
from fixtures.small_tuning import H200, small_tuning

SMALL = FusedShape(
    "fp16", layers=2, hidden=128, heads=4, kv_heads=2, head_dim=64, inner=192, vocab=200, rotary_dim=64,
    capacity=150, qk_norm=True, max_rows=1,
)  # fmt: skip
CPU_TUNING = small_tuning()
FLOAT8, BITS = np.dtype(ml_dtypes.float8_e4m3fn), {1: np.uint8, 2: np.uint16}
TOLERANCE = {"fp16": 4e-3, "bf16": 3e-2}  # of logits, relative to the largest
FP8_TOLERANCE = 4e-2
OTHER_NEIGHBOURS = {"fp16": 0.03, "bf16": 0.2}  # share of values


def changed(**changes) -> FusedShape:
    return dataclasses.replace(SMALL, **changes)


class Model(RandomWeights):
    """Random weights, caches and inputs of a shape, as arrays and on a device."""

    def __init__(
        self, shape: FusedShape, lengths: list[int], seed: int = 0, tokens: int = 1, tree: bool = False
    ) -> None:
        super().__init__(TYPES[shape.dtype], seed)
        self.shape = shape
        batch, pairs, positions = len(lengths), shape.rotary_dim // 2, 2 * shape.capacity
        self.quantized: dict[int, np.ndarray] = {}  # bytes by id of the matrix
        self.layers = [
            LayerArrays(**{name: self.weight(name, size) for name, size in layer_shapes(shape).items()})
            for _ in range(shape.layers)
        ]
        self.norm = self.weight("norm", (shape.hidden,))
        size = (shape.vocab, shape.hidden) if shape.tied else (shape.hidden, shape.vocab)
        self.lm_head = self.values(size, shape.hidden**-0.5)
        angles = self.random.uniform(-3, 3, (positions, pairs))
        cache = batch, shape.kv_heads, shape.capacity, shape.head_dim
        self.step = Step(
            embeds=self.values((batch, tokens, shape.hidden), 1.0),
            cos=np.cos(angles).astype(np.float32),
            sin=np.sin(angles).astype(np.float32),
            position_ids=self.random.integers(0, positions, (batch, tokens)),
            kv_length=np.array(lengths, np.int64),
            caches=[(self._cache(cache), self._cache(cache)) for _ in range(shape.layers)],
        )
        for keys, values in self.step.caches:  # rows that nothing may read
            for row, length in enumerate(lengths):
                keys[row, :, length - tokens :], values[row, :, length - tokens :] = np.nan, np.nan
        if tree:
            self.step.mask = np.zeros((batch, tokens, shape.capacity), bool)
            for row, length in enumerate(lengths):
                self._grow(self.step.mask[row], length - tokens)

    def _grow(self, mask: np.ndarray, first: int) -> None:
        """Write the mask of a random tree; its nodes do not see some earlier rows either."""
        for node in range(len(mask)):
            mask[node, :first] = self.random.random(first) < 0.9
            if node:
                parent = self.random.integers(0, node) if node != 2 else 0  # not a chain
                mask[node, first:] = mask[parent, first:]
            mask[node, first + node] = True

    def _cache(self, shape: tuple[int, ...]) -> np.ndarray:
        values = self.values(shape, 1.0)
        return values.astype(FLOAT8) if self.shape.fp8_cache else values

    def weight(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        form = self.shape.form(name)
        if form is None:
            return super().weight(name, shape)
        matrix = QuantizedMatrix.random(self.random, form, shape, self.dtype)
        weight = matrix.dequantized()
        self.quantized[id(weight)] = matrix.contents()
        return weight

    def on_device(self, device) -> tuple[FusedWeights, dict]:
        """Return the weights and the tensors of a run."""
        kept = []

        def place(array: np.ndarray):
            stored = self.quantized.get(id(array))
            kept.append(put(device, array.view(np.uint16) if stored is None else stored))
            return kept[-1].pointer

        layers = tuple(
            FusedLayerWeights(
                **{name: place(array) for name, array in vars(layer).items() if isinstance(array, np.ndarray)}
            )
            for layer in self.layers
        )
        weights = FusedWeights(layers, place(self.norm), place(self.lm_head), owners=tuple(kept))
        batch, tokens, hidden = self.step.embeds.shape
        tensors = {
            "inputs_embeds": put(device, self.step.embeds.view(np.uint16)),
            "rope_cos": put(device, self.step.cos),
            "rope_sin": put(device, self.step.sin),
            "position_ids": put(device, self.step.position_ids),
            "kv_length": put(device, self.step.kv_length),
            "logits": device.empty((batch, tokens, self.shape.vocab), np.float32),
        }
        if self.layers[0].lora:
            table = np.array([
                [
                    [(place(each[0]), place(each[1]), each[0].shape[1] // joined) if each else (0, 0, 0)
                     for each in layer.lora[name]]
                    for name, joined in JOINED.items()
                ]
                for layer in self.layers
            ], np.int64)  # fmt: skip
            tensors["lora_table"] = put(device, table)
            weights = dataclasses.replace(weights, owners=tuple(kept))
        if self.step.mask is not None:
            tensors["attention_mask"] = put(device, self.step.mask[:, None])
        for i, (keys, values) in enumerate(self.step.caches):
            tensors[f"key_cache_{i}"] = put(device, keys.view(BITS[keys.itemsize]))
            tensors[f"value_cache_{i}"] = put(device, values.view(BITS[values.itemsize]))
        for i in self.shape.hidden_state_layers:
            tensors[f"hidden_states_{i}"] = device.empty((batch, tokens, hidden), np.uint16)
        return weights, tensors

    def adapt(self, *ranks: int) -> None:
        """Give each sequence an adapter of its own of this rank; 0 = none."""
        for number, layer in enumerate(self.layers):
            lora = {}
            for name, joined in JOINED.items():
                k, n = getattr(layer, name).shape
                q_size, kv_size = self.shape.q_size, self.shape.kv_size
                ends = {"qkv": [q_size, q_size + kv_size], "gate_up": [n // 2]}
                lora[name] = []
                for rank in ranks:
                    a, b = self.values((k, joined * rank), k**-0.5), np.zeros((joined * rank, n), self.dtype)
                    columns = np.split(np.arange(n), ends.get(name, []))
                    for part, own in enumerate(columns):
                        b[part * rank : (part + 1) * rank, own] = self.values((rank, len(own)), 0.5)
                    lora[name].append((a, b) if rank else None)
            self.layers[number] = dataclasses.replace(layer, lora=lora)

    def expected(self):
        """Compute the step in float64; it writes the new rows to the caches."""
        return decode_step(self.shape, self.layers, self.norm, self.lm_head, self.step)


@pytest.fixture(scope="session")
def fused(request, device):
    """The device, and a function that makes a decoder on it.

    Without a GPU the device is the host with 20 multiprocessors.
    """
    if device.memory == "cuda":
        return device, functools.partial(FusedDecoder, device)
    host, compile = fused_on_cpu.FusedDoubleDevice(20), fused_on_cpu.FusedDoubleProgram

    def make(shape, weights, tuning=CPU_TUNING, fusion=None):
        return FusedDecoder(host, shape, weights, compile, tuning, fusion)

    return host, make


def check(
    fused,
    shape: FusedShape,
    lengths: list[int],
    tokens: int = 1,
    tree: bool = False,
    ranks: tuple[int, ...] = (),
    **options,
) -> dict[str, np.ndarray]:
    """Compare a step with float64; return the outputs.

    `ranks`: those of the sequences' adapters.
    """
    device, make = fused
    model = Model(shape, lengths, tokens=tokens, tree=tree)
    if ranks:
        model.adapt(*ranks)
    weights, tensors = model.on_device(device)
    make(shape, weights, **options).run(tensors)
    expected = model.expected()
    outputs = {name: device.download(tensor) for name, tensor in tensors.items()}
    close(outputs["logits"], expected.logits, shape)
    for i, caches in enumerate(model.step.caches):
        for name, cache in zip(("key", "value"), caches, strict=True):
            found = outputs[f"{name}_cache_{i}"].view(cache.dtype)
            for row, length in enumerate(lengths):
                new = slice(length - tokens, length)
                close_rows(found[row, :, new], cache[row, :, new], shape)
                before, after = found[row].copy(), cache[row].copy()
                before[:, new], after[:, new] = 0, 0
                bits = BITS[cache.itemsize]
                np.testing.assert_array_equal(before.view(bits), after.view(bits))
    for layer, states in expected.hidden_states.items():
        close(outputs[f"hidden_states_{layer}"].view(model.dtype), states, shape)
    return outputs


def close(found: np.ndarray, expected: np.ndarray, shape: FusedShape) -> None:
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    error = np.abs(found - expected).max() / np.abs(expected).max()
    tolerance = FP8_TOLERANCE if shape.fp8_cache else TOLERANCE[shape.dtype]
    assert error < tolerance, f"relative error {error:.2g}"


def close_rows(found: np.ndarray, expected: np.ndarray, shape: FusedShape) -> None:
    """Compare new rows of a cache.

    A few values of E4M3 may be rounded to the other neighbour.
    """
    if not shape.fp8_cache:
        close(found, expected, shape)
        return
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    difference, sizes = np.abs(found - expected), np.abs(expected)
    step = np.maximum(sizes, 2**-6) / 8
    assert (difference <= step + TOLERANCE[shape.dtype] * sizes.max()).all()
    assert np.mean(difference > 0) < OTHER_NEIGHBOURS[shape.dtype]


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape, lengths",
    [
        pytest.param(SMALL, [1], id="the first token"),
        pytest.param(SMALL, [150], id="a full cache"),
        pytest.param(
            changed(dtype="bf16", tied=True, max_rows=16),
            [1, 33, 150, 7, 8, 64, 65, 2, 149, 16, 17],
            id="bf16, tied, 11 rows",
        ),
        pytest.param(
            changed(hidden=192, inner=320, vocab=216, heads=2, max_rows=16),
            list(range(3, 147, 9)),
            id="16 rows",
        ),
        pytest.param(
            changed(
                head_dim=128,
                rotary_dim=32,
                rope_interleaved=True,
                heads=7,
                kv_heads=1,
                max_rows=8,
                qkv_bias=True,
                o_bias=True,
                mlp_bias=True,
                qk_norm=False,
                windows=(20, None),
            ),
            [5, 150, 64, 20, 21, 99],
            id="biases, a window, 7 heads per KV head, 6 rows",
        ),
        pytest.param(
            changed(
                head_dim=96,
                rotary_dim=96,
                heads=2,
                kv_heads=2,
                hidden=192,
                inner=320,
                tied=True,
                hidden_state_layers=(1, 2),
                max_rows=2,
            ),
            [77, 16],
            id="heads of 96, hidden states, 2 rows",
        ),
        pytest.param(
            changed(head_dim=256, rotary_dim=64, heads=8, kv_heads=2, hidden=576), [149], id="heads of 256"
        ),
    ],
)
def test_a_step_is_that_of_numpy(fused, shape, lengths):
    check(fused, shape, lengths)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape, lengths, tokens, tree",
    [
        pytest.param(changed(fp8_cache=True), [150], 1, False, id="1 row"),
        pytest.param(
            changed(fp8_cache=True, dtype="bf16", head_dim=96, rotary_dim=96, tied=True, max_rows=8,
                    windows=(20, None)),
            [65, 23], 3, True, id="bf16, heads of 96, a window, 2 trees of 3 tokens",
        ),
        pytest.param(
            changed(fp8_cache=True, dtype="bf16", head_dim=96, rotary_dim=96, max_rows=16,
                    windows=(20, None)),
            [65, 23, 150, 1, 16, 17, 100, 34, 5], 1, False, id="bf16, heads of 96, a window, 9 rows",
        ),
    ],
)  # fmt: skip
def test_a_step_with_an_fp8_cache_is_that_of_numpy(fused, shape, lengths, tokens, tree):
    check(fused, shape, lengths, tokens, tree)


FP8, SORTED = (False, True), (False, False, True)  # behind bits and group of a form


def quantized(qkv, o, gate_up, down) -> tuple[tuple[str, Quantized], ...]:
    forms = {"qkv": qkv, "o": o, "gate_up": gate_up, "down": down}
    return tuple((name, Quantized(*form)) for name, form in forms.items() if form)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape, lengths, tuning",
    [
        pytest.param(
            changed(quantized=quantized((4, 128), (4, 64), (8, 64), (4, 32))), [40],
            {"quantized_repeated_bytes": 0}, id="1 row",
        ),
        pytest.param(
            changed(max_rows=2, o_bias=True, mlp_bias=True, hidden=576, inner=320,
                    quantized=quantized((8, 32, True), (4, 128, True), None, (4, 64))),
            [33, 2], {"quantized_narrow_tile": 16}, id="a product in fp16, 2 rows",
        ),
        pytest.param(
            changed(dtype="bf16", max_rows=8, hidden=576, inner=320,
                    quantized=quantized((4, 64, True), (8, 128), (4, 32, True), (8, 64, True))),
            [5, 150, 64, 20, 21, 99, 1], {"quantized_tile": 16, "quantized_repeated_bytes": 0},
            id="bf16, zero points, 7 rows",
        ),
        pytest.param(
            changed(hidden=192, inner=320,
                    quantized=quantized((8, 64, *FP8), (8, 0, *FP8), (8, 32, *FP8), (4, 64, *SORTED))),
            [40], {}, id="FP8, 1 row",
        ),
        pytest.param(
            changed(dtype="bf16", max_rows=8,
                    quantized=quantized((8, 0, *FP8), (4, 128, *SORTED), (8, 128, *FP8), (8, 32, *FP8))),
            [5, 150, 64, 20, 21], {"quantized_repeated_bytes": 0}, id="FP8 in bf16, 5 rows",
        ),
        pytest.param(
            changed(mlp_bias=True, quantized=quantized(*[(4, 32, True, False, True)] * 4)), [77], {},
            id="sorted inputs, 1 row",
        ),
    ],
)  # fmt: skip
def test_a_step_with_quantised_weights_is_that_of_numpy(fused, shape, lengths, tuning):
    check(fused, shape, lengths, tuning=small_tuning(**tuning))


@pytest.mark.slow
@pytest.mark.parametrize(
    "tuning",
    [
        pytest.param({"tensor_cores": False, "prepares_o": False}, id="without tensor cores"),
        pytest.param(
            {"narrow_tile": 256, "threads": 256, "prepares_o": True}, id="in wide tiles, combine_splits"
        ),
    ],
)
def test_a_step_of_one_row_is_that_of_numpy(fused, tuning):
    shape = changed(tied=True, hidden=320, inner=576)
    check(fused, shape, [150], tuning=small_tuning(**tuning))


@pytest.mark.slow
@pytest.mark.parametrize(
    "tied, x_in_gmem",
    [
        pytest.param(False, True, id="x in global memory"),
        pytest.param(True, True, id="x in global memory, tied"),
        pytest.param(True, False, id="x in shared memory, tied"),
    ],
)
def test_a_step_with_kernels_for_x_is_that_of_numpy(fused, tied, x_in_gmem):
    shape = changed(tied=tied, hidden=192, inner=320, mlp_bias=True, hidden_state_layers=(1, 2), max_rows=16)
    tuning = small_tuning(repeated_bytes=0, x_in_gmem=x_in_gmem)
    check(fused, shape, list(range(6, 150, 13)), tuning=tuning)


@pytest.mark.parametrize(
    "changes, batch, tokens, slots",
    [
        pytest.param({}, 2, 3, 1, id="3 tokens each"),
        pytest.param({"heads": 7, "kv_heads": 1}, 5, 1, 1, id="9 heads of 8 warps"),
        pytest.param({"quantized": (("o", Quantized(4, 64)),)}, 5, 1, 1, id="quantised weights"),
        pytest.param({}, 5, 1, 2, id="two blocks of a product beside it"),
    ],
)
def test_only_the_attention_of_a_batch_of_single_tokens_makes_their_new_rows(changes, batch, tokens, slots):
    shape = changed(max_rows=8)
    assert attention_kernels(shape, 5, 1, 1) == ["batch_attention"]
    others = dataclasses.replace(shape, **changes)
    assert attention_kernels(others, batch, tokens, slots) == ["rope_append_kv", "tree_attention"]


def attention_kernels(shape: FusedShape, batch: int, tokens: int, slots: int) -> list[str]:
    """Return the first layer's kernels between qkv and what follows the attention."""
    device, program = fused_on_cpu.FusedDoubleDevice(5), Recorder()
    weights, tensors = Model(shape, [40] * batch, tokens=tokens).on_device(device)
    FusedDecoder(device, shape, weights, lambda plan: program, small_tuning(slots=slots)).run(tensors)
    names = [launch.name for launch in program.launches]
    return names[
        names.index("qkv") + 1 : min(names.index(name) for name in ("combine_splits", "o") if name in names)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[40], [5, 33, 70], [*range(6, 150, 13)]], ids=["1", "4", "16"])
def test_a_step_with_the_sizes_of_the_table_is_that_of_numpy(fused, lengths):
    check(fused, changed(max_rows=16, tied=True, hidden=320, inner=576), lengths, tuning=H200)


@pytest.mark.slow
def test_the_attention_of_few_rows_can_make_their_new_rows_itself(fused):
    shape = changed(max_rows=4, qkv_bias=True, windows=(20, None))
    check(fused, shape, [1, 33, 150], tuning=small_tuning(batch_attention=False))


def test_a_large_model_has_more_steps_of_its_weights_on_their_way():
    sizes = {"head_dim": 128, "inner": 8192, "heads": 16, "kv_heads": 8, "rotary_dim": 128, "max_rows": 8}
    shapes = [changed(hidden=hidden, **sizes) for hidden in (2048, 4096)]
    small, large = (FusedPlan(shape, 8, 132, 227 << 10, H200) for shape in shapes)
    assert small.stages < large.stages == H200.config(shapes[1], 8).stages
    assert max(large.shared.values()) <= 227 << 10


def test_x_that_blocks_would_read_too_often_has_a_kernel_of_its_own():
    shape = FusedShape("fp16", 28, 2048, 16, 8, 128, 6144, 151936, 128, 8192, tied=True, max_rows=16)
    few, many = (FusedPlan(shape, rows, 132, 227 << 10, H200) for rows in (1, 16))
    assert [name for name, prepared in few.prepared.items() if prepared] == ["o"]
    assert all(many.prepared.values())
    assert many.products["qkv"].width < few.products["qkv"].width  # only the CTA's share of x


def test_x_of_adapted_rows_takes_shared_memory():
    shape = FusedShape(
        "fp16", 28, 2048, 16, 8, 128, 6144, 151936, 128, 8192, tied=True, max_rows=16, lora_rank=16
    )
    plain, adapted = (FusedPlan(shape, 8, 132, 227 << 10, H200, each) for each in (False, True))
    product = plain.products["gate_up"]
    assert product.shared_bytes == product.ring + product.sums
    assert not any(product.x_in_gmem for product in adapted.products.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape, lengths, tokens, tree",
    [
        pytest.param(changed(max_rows=8), [5], 5, True, id="the first tokens are a tree"),
        pytest.param(changed(max_rows=8), [150], 8, False, id="a chain fills the cache"),
        pytest.param(
            changed(dtype="bf16", tied=True, max_rows=8, capacity=149), [4, 34, 149, 50], 2, False,
            id="bf16, tied, 4 chains of 2 tokens",
        ),
        pytest.param(
            changed(head_dim=128, rotary_dim=32, rope_interleaved=True, heads=7, kv_heads=1, max_rows=8,
                    qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=False, windows=(20, None)),
            [65, 23], 3, True, id="biases, a window, 7 heads per KV head, 2 trees of 3 tokens",
        ),
        pytest.param(
            changed(head_dim=96, rotary_dim=96, heads=2, kv_heads=2, hidden=192, inner=320, tied=True,
                    hidden_state_layers=(1, 2), max_rows=4, windows=(7, 40)),
            [77], 4, False, id="heads of 96, hidden states, windows, a chain",
        ),
        pytest.param(
            changed(head_dim=256, rotary_dim=64, heads=8, kv_heads=2, hidden=576, max_rows=4, capacity=151),
            [139], 3, True, id="heads of 256, an odd capacity, a tree",
        ),
    ],
)  # fmt: skip
def test_a_step_of_several_tokens_is_that_of_numpy(fused, shape, lengths, tokens, tree):
    check(fused, shape, lengths, tokens, tree)


@pytest.mark.slow
def test_states_for_a_draft_head_are_those_of_numpy(fused):
    device, make = fused
    shape = changed(hidden_state_layers=(1,), max_rows=4)  # the head takes this state too
    model = Model(shape, [40], tokens=3)
    fc = model.values((3 * shape.hidden, 64), (3 * shape.hidden) ** -0.5)
    weights, tensors = model.on_device(device)
    tensors["fused_hidden_states"] = device.empty((1, 3, 64), np.uint16)
    on_gpu, head = put(device, fc.view(np.uint16)), FusionShape("fp16", shape.hidden, 64, max_rows=4)
    fusion = StateFusion((0, 1, 2), head, FusionWeights(on_gpu.pointer, owners=(on_gpu,)))
    make(shape, weights, fusion=fusion).run(tensors)
    expected = model.expected()
    found = device.download(tensors["fused_hidden_states"]).view(np.float16)
    close(found, fuse(head, expected.stream, fc, None, []), shape)
    states = device.download(tensors["hidden_states_1"]).view(np.float16)
    close(states, expected.hidden_states[1], shape)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape, lengths, ranks, tokens",
    [
        pytest.param(
            changed(lora_rank=64, max_rows=2), [5, 150], (64, 0), 1, id="rank 64 beside the base model"
        ),
        pytest.param(
            changed(lora_rank=24, max_rows=8, dtype="bf16", tied=True), [4, 34, 149], (24, 3, 8), 2,
            id="three ranks, bf16, 3 sequences of 2 tokens",
        ),
        pytest.param(
            changed(lora_rank=8, max_rows=4, head_dim=96, rotary_dim=96, heads=2, kv_heads=2, hidden=192,
                    inner=320, qkv_bias=True, o_bias=True, mlp_bias=True),
            [5, 64, 20, 21], (8, 5, 0, 8), 1, id="biases, columns of two layers in a tile, 4 rows",
        ),
        pytest.param(
            changed(lora_rank=16,
                    quantized=quantized((4, 128, *SORTED), (4, 64), (8, 64, *FP8), (4, 64, *SORTED))),
            [77], (16,), 1, id="quantised weights",
        ),
    ],
)  # fmt: skip
def test_every_sequence_has_its_own_adapter(fused, shape, lengths, ranks, tokens):
    check(fused, shape, lengths, tokens, ranks=ranks)


@pytest.mark.slow
def test_nan_in_one_row_stays_in_that_row(fused):
    device, make = fused
    shape = changed(dtype="bf16", tied=True, max_rows=4)
    model = Model(shape, [1, 33, 150])
    model.step.embeds[1, 0, 7] = np.nan
    weights, tensors = model.on_device(device)
    make(shape, weights).run(tensors)
    logits, expected = device.download(tensors["logits"]), model.expected().logits
    assert np.isnan(logits[1]).all()
    close(logits[[0, 2]], expected[[0, 2]], shape)


@pytest.mark.slow
def test_values_that_overflow_half_precision_give_nan(fused):
    device, make = fused
    model = Model(SMALL, [5])
    model.layers[0].gate_up[...] *= 1000
    weights, tensors = model.on_device(device)
    make(SMALL, weights).run(tensors)
    assert np.isnan(device.download(tensors["logits"])).all()


@pytest.mark.slow
def test_values_that_overflow_before_a_quantised_product_give_nan(fused):
    device, make = fused
    shape = changed(quantized=quantized((4, 128), (4, 64), (8, 64), (4, 32)))
    model = Model(shape, [40])
    model.layers[0].input_norm[...] = 60000
    weights, tensors = model.on_device(device)
    make(shape, weights, tuning=small_tuning(quantized_repeated_bytes=0)).run(tensors)
    assert np.isnan(device.download(tensors["logits"])).all()


class Recorder:
    """A program that keeps the launches of all plans."""

    def __init__(self, plan=None) -> None:
        self.launches = []

    def launch(self, launch, params) -> None:
        self.launches.append(launch)


@pytest.mark.parametrize("arch, early", [("sm_87", False), ("sm_90", True), ("sm_110", True)])
def test_kernels_after_the_first_start_early_where_the_gpu_can(arch, early):
    device, program = fused_on_cpu.FusedDoubleDevice(5), Recorder()
    device.arch = arch
    model = Model(SMALL, [5])
    weights, tensors = model.on_device(device)
    FusedDecoder(device, SMALL, weights, lambda plan: program).run(tensors)
    layer = ["qkv", "attention", "o", "gate_up", "down"]
    assert [launch.name for launch in program.launches] == [*layer, *layer, "lm_head"]
    assert [launch.early for launch in program.launches] == [False, *[early] * 10]


@pytest.mark.parametrize(
    "rows, multiprocessors, most_shared",
    [(1, 132, 227 << 10), (1, 20, 99 << 10), (8, 16, 163 << 10), (8, 20, 99 << 10), (16, 108, 163 << 10),
     (16, 16, 163 << 10)],
)  # fmt: skip
def test_blocks_fit_into_shared_memory(rows, multiprocessors, most_shared):
    shape = FusedShape("fp16", 36, 4096, 32, 8, 128, 12288, 151936, 128, 8192, max_rows=16)
    plan = FusedPlan(shape, rows, multiprocessors, most_shared, H200)
    assert max(plan.shared.values()) <= most_shared


@pytest.mark.parametrize(
    "k, n, tile, blocks", [(1024, 4096, 64, 132), (640, 256, 128, 132), (896, 1000, 64, 7)]
)
def test_the_blocks_of_a_product_share_its_steps_evenly(k, n, tile, blocks):
    plan = ProductPlan(k, n, tile, 512, 8, 1, blocks, True)
    bounds = [block * plan.units // plan.blocks for block in range(plan.blocks + 1)]
    shares = np.diff(bounds)
    assert 1 <= shares.min() <= shares.max() <= shares.min() + 1
    owner = np.repeat(np.arange(plan.blocks), shares)  # the CTA of each work unit
    parts = [len(set(owner[i * plan.steps : (i + 1) * plan.steps])) for i in range(plan.tiles)]
    assert plan.partials == max(parts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch, head_dim, rows, forms, lora_rank, fp8_cache",
    [
        ("sm_80", 128, 16, (), 0, False),
        ("sm_87", 128, 8, quantized((8, 0, *FP8), (8, 32, True), (4, 64, True), None), 0, False),
        ("sm_90", 256, 16, (), 0, False),
        ("sm_89", 256, 8, (), 0, True),
        ("sm_110", 64, 1, quantized((4, 128), (8, 64), (8, 128, *FP8), (4, 64, True)), 0, True),
        ("sm_90", 128, 1, (), 64, False),
    ],
)
def test_the_kernels_keep_their_variables_in_registers(arch, head_dim, rows, forms, lora_rank, fp8_cache):
    sizes = {"hidden": 2048, "inner": 6144, "vocab": 151936, "max_rows": rows, "lora_rank": lora_rank}
    shape = changed(head_dim=head_dim, tied=True, quantized=forms, fp8_cache=fp8_cache, **sizes)
    repeated_bytes = 0 if rows == 16 else 1 << 40
    tuning = H200.changed(lambda step: {"repeated_bytes": repeated_bytes})
    plan = FusedPlan(shape, rows, 20, 227 << 10, tuning, adapted=lora_rank > 0)
    report = ptxas_report(expand("decoder.cu"), compiler.options(arch, plan))
    frames = dict(re.findall(r"Function properties for (\w+)\n\D*(\d+) bytes stack frame", report))
    attention = {"rope_append_kv", "tree_attention"} if rows > 1 else {"attention"}
    if plan.attends_in_batch(1):
        attention |= {"batch_attention"}
    assert {"qkv", *attention, "o", "gate_up", "down", "lm_head"} < set(frames)
    assert set(frames.values()) == {"0"}


@pytest.mark.slow
@pytest.mark.parametrize("head_dim, dtype", [(128, "fp16"), (64, "bf16")])
def test_the_attention_of_a_batch_leaves_registers_for_the_kernels_beside_it(head_dim, dtype):
    sizes = {"hidden": 2560, "inner": 9728, "head_dim": head_dim, "rotary_dim": head_dim}
    shape = changed(max_rows=8, dtype=dtype, tied=True, **sizes)
    plan = FusedPlan(shape, 8, 132, 227 << 10, H200)
    assert plan.attends_in_batch(1)
    report = ptxas_report(expand("decoder.cu"), compiler.options("sm_90", plan))
    found = re.findall(r"entry function '(\w+)'[\s\S]*?Used (\d+) registers", report)
    registers = {name: -(-int(count) // 8) * 8 for name, count in found}  # eights of a thread
    beside = (
        registers["batch_attention"] + registers["combine_splits"] + max(registers["qkv"], registers["o"])
    )
    assert beside * 256 <= 64 << 10


def test_a_shape_that_the_kernels_do_not_take_is_refused(fused):
    _, make = fused
    with pytest.raises(EngineError, match="head_dim is 80"):
        make(changed(head_dim=80), None)
