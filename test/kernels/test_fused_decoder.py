# SPDX-License-Identifier: Apache-2.0
"""The fused kernels against NumPy in float64.

Without a GPU they are compiled for the host.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

pytest.importorskip("cuda.core", reason="NVRTC and its bindings are not installed (requirements-test.txt)")


from doubles import fused_on_cpu
from doubles.fused_decoder import fuse
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
from edgellm_ros.fused.weights import FusionWeights
from fixtures.draws import draws
from fixtures.fused_steps import SMALL, Model, changed, check, close, decoders
from fixtures.on_device import put
from fixtures.ptxas_report import ptxas_report
from fixtures.small_tuning import H200, small_tuning


@pytest.fixture(scope="session")
def fused(device):
    """The device, and a function that makes a decoder on it."""
    return decoders(device)


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
            changed(vocab=197, head_columns=200, max_rows=2), [9, 140], id="more columns than tokens"
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


# behind bits and group of a form
FP8, SORTED, OFFSETS = (False, True), (False, False, True), (False, False, False, True)


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
        pytest.param(
            changed(hidden=576, inner=320,
                    quantized=quantized((4, 32, *OFFSETS), (8, 32, *OFFSETS), (8, 16), (4, 64, *OFFSETS))),
            [40], {}, id="offsets, groups of 16, 1 row",
        ),
        pytest.param(
            changed(dtype="bf16", max_rows=8,
                    quantized=quantized((8, 16, *OFFSETS), (4, 128, *OFFSETS), (4, 32, *OFFSETS), (8, 16))),
            [5, 150, 64, 20, 21, 99, 1], {"quantized_repeated_bytes": 0}, id="bf16, offsets, 7 rows",
        ),
        pytest.param(
            changed(vocab=208, hidden=576, head=Quantized(8, 64)), [40], {"quantized_tile": 16},
            id="an LM head, 1 row",
        ),
        pytest.param(
            changed(vocab=208, max_rows=4, head=Quantized(8, 16), quantized=quantized(*[(4, 32)] * 4)),
            [40, 3, 77], {"quantized_repeated_bytes": 0}, id="an LM head in groups of 16, 3 rows",
        ),
        pytest.param(
            changed(quantized=quantized((8, 16, *OFFSETS), (4, 32, *OFFSETS), (4, 32, *OFFSETS), (8, 16)),
                    other_kinds=(quantized(*[(4, 32, *OFFSETS)] * 4), ()), layer_kinds=(1, 0, 2), layers=3),
            [40], {}, id="layers of three kinds, 1 row",
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
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tokens", [1, 3])
def test_states_after_the_last_norm_are_those_of_numpy(fused, tied, tokens):
    device, make = fused
    shape = changed(last_states=True, tied=tied, max_rows=4)
    model = Model(shape, [40], tokens=tokens)
    weights, tensors = model.on_device(device)
    tensors["fused_hidden_states"] = device.empty((1, tokens, shape.hidden), np.uint16)
    make(shape, weights).run(tensors)
    found = device.download(tensors["fused_hidden_states"]).view(np.float16)
    close(found, model.expected().normed, shape)


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
        ("sm_87", 128, 8, quantized((8, 0, *FP8), (8, 32, True), (4, 64, True), (8, 16, *OFFSETS)), 0, False),
        ("sm_90", 256, 16, (), 0, False),
        ("sm_110", 64, 1, quantized((4, 128), (8, 64), (8, 128, *FP8), (4, 64, True)), 0, True),
        ("sm_90", 128, 1, (), 64, False),
        ("sm_80", 128, 16, (), 0, False),
        ("sm_90", 64, 1, quantized(*[(4, 32, *OFFSETS)] * 4), 0, False),
        ("sm_89", 256, 8, (), 0, True),
    ][: draws(4, 7)],
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
