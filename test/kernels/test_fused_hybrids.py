# SPDX-License-Identifier: Apache-2.0
"""What hybrids have in the fused kernels, against NumPy in float64.

Without a GPU the kernels are compiled for the host.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

pytest.importorskip("cuda.core", reason="NVRTC and its bindings are not installed (requirements-test.txt)")


from doubles.fused_recurrent import chain_widths
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.fused.cuda import compiler
from edgellm_ros.fused.plan.decoder import FusedPlan
from edgellm_ros.fused.plan.quantized import Quantized
from edgellm_ros.fused.plan.shape import FusedShape, RecurrentShape
from edgellm_ros.fused.sources import expand
from fixtures.draws import draws
from fixtures.fused_hybrids import (
    DELTA,
    LARGE_DELTA,
    LAYERS,
    MAMBA,
    NEMOTRON_4B,
    QWEN,
    QWEN3_5,
    hybrid,
)
from fixtures.fused_steps import Model, changed, check, close, decoders
from fixtures.ptxas_report import ptxas_report
from fixtures.small_tuning import H200, small_tuning


def check_hybrid(fused, shape: FusedShape, lengths: list[int], tokens: int = 1, **options) -> None:
    """Compare a step of a hybrid with float64."""
    check(fused, shape, lengths, tokens, layers=LAYERS[shape.recurrent.delta_net], **options)


@pytest.fixture(scope="session")
def fused(device):
    """The device, and a function that makes a decoder on it."""
    return decoders(device)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape, lengths",
    [
        pytest.param(hybrid(DELTA), [40], id="delta net, 1 row"),
        pytest.param(hybrid(LARGE_DELTA, dtype="bf16"), [1, 33], id="delta net of 128 x 128, bf16, 2 rows"),
        pytest.param(hybrid(DELTA, hidden=192), [5, 150, 64, 20, 21], id="delta net, 5 rows"),
        pytest.param(hybrid(MAMBA), [40], id="Mamba2, 1 row"),
        pytest.param(hybrid(MAMBA, dtype="bf16", tied=True), [1, 33], id="Mamba2, bf16, 2 rows"),
        pytest.param(
            hybrid(dataclasses.replace(MAMBA, key_heads=4, key_dim=128, conv_bias=False, conv_kernel=3)),
            [5, 150, 64, 20, 21], id="Mamba2 of 128 x 80, 4 groups, 5 rows",
        ),
    ],
)  # fmt: skip
def test_a_step_is_that_of_numpy(fused, shape, lengths):
    check_hybrid(fused, shape, lengths)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape, lengths, tokens",
    [
        pytest.param(hybrid(DELTA), [40, 5], 3, id="delta net, 2 chains of 3 tokens"),
        pytest.param(hybrid(LARGE_DELTA, dtype="bf16"), [8], 8, id="delta net, bf16, 8 tokens"),
        pytest.param(hybrid(MAMBA), [65, 23, 2], 2, id="Mamba2, 3 chains of 2 tokens"),
        pytest.param(hybrid(MAMBA, dtype="bf16", max_rows=5), [150], 5, id="Mamba2, bf16, 5 tokens"),
    ],
)  # fmt: skip
def test_states_and_values_of_chains_are_those_of_numpy(fused, shape, lengths, tokens):
    check_hybrid(fused, shape, lengths, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", [DELTA, MAMBA], ids=["delta net", "Mamba2"])
@pytest.mark.parametrize("x_in_gmem", [False, True], ids=["x in shared memory", "x in global memory"])
def test_a_step_with_kernels_for_x_is_that_of_numpy(fused, mixer, x_in_gmem):
    shape, tuning = hybrid(mixer), small_tuning(repeated_bytes=0, x_in_gmem=x_in_gmem)
    plan = FusedPlan(shape, 4, 20, 227 << 10, tuning)
    assert plan.prepared["in_proj"]
    assert plan.prepared["out_proj"]
    check_hybrid(fused, shape, [33, 150, 7], tuning=tuning)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("mixer", [DELTA, MAMBA], ids=["delta net", "Mamba2"])
def test_a_step_without_tensor_cores_is_that_of_numpy(fused, mixer, rows):
    # Gates make combine_splits necessary, which copies x in chunks of 8 values.
    tuning = small_tuning(tensor_cores=False, prepares_o=False, narrow_tile=64)
    check_hybrid(fused, hybrid(mixer, max_rows=rows), [77, 5][:rows], tuning=tuning)


FP8, SORTED = (False, True), (False, False, True)  # behind bits and group of a form
# in_proj has a multiple of 16 columns
MORE_DELTA = dataclasses.replace(DELTA, heads=8)
MORE_MAMBA = dataclasses.replace(MAMBA, heads=16, value_dim=48)


def quantized(in_proj: tuple, out_proj: tuple, o: tuple = ()) -> tuple[tuple[str, Quantized], ...]:
    """Return forms by kernel; each is what `Quantized` gets, () = none."""
    forms = {"in_proj": in_proj, "out_proj": out_proj, "o": o}
    return tuple((name, Quantized(*form)) for name, form in forms.items() if form)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape, lengths",
    [
        pytest.param(
            hybrid(MORE_DELTA, quantized=quantized((4, 128), (4, 32), (4, 128))), [40],
            id="delta net, INT4, gates and INT4 after them, 1 row",
        ),
        pytest.param(
            hybrid(MORE_DELTA, quantized=quantized((4, 128), (4, 32))), [40], id="delta net, INT4, 1 row"
        ),
        pytest.param(
            hybrid(MORE_MAMBA, quantized=quantized((4, 32, True), (4, 128))), [40], id="Mamba2, INT4, 1 row"
        ),
        pytest.param(
            hybrid(MORE_DELTA, dtype="bf16", quantized=quantized((8, 64, *FP8), (8, 0, *FP8))),
            [40, 3, 150, 2, 9], id="delta net, FP8 in bf16, 5 rows",
        ),
        pytest.param(
            hybrid(MORE_MAMBA, quantized=quantized((4, 32, *SORTED), (4, 64, *SORTED))), [40, 3],
            id="Mamba2, sorted inputs, 2 rows",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("repeated_bytes", [1 << 40, 0], ids=["", "kernels for x"])
def test_a_step_with_quantised_weights_is_that_of_numpy(fused, shape, lengths, repeated_bytes):
    tuning = small_tuning(quantized_repeated_bytes=repeated_bytes, narrow_tile=64)
    for name in ("in_proj", "out_proj"):
        assert FusedPlan(shape, 1, 20, 227 << 10, tuning).prepared[name] == (repeated_bytes == 0)
    check_hybrid(fused, shape, lengths, tuning=tuning)


@pytest.mark.slow
@pytest.mark.parametrize("lengths, tokens", [([77], 1), ([5, 64, 20, 21, 99], 1), ([65, 23], 3)])
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"attention_gate": True, "qkv_bias": True, "rotary_dim": 16}, id="gates"),
        pytest.param({"rotary_dim": 0, "qk_norm": False}, id="no RoPE"),
        pytest.param({"activation": "relu2", "mlp_bias": True}, id="squared ReLU"),
    ],
)
def test_a_step_of_other_attention_or_feed_forward_is_that_of_numpy(fused, changes, lengths, tokens):
    check(fused, changed(max_rows=8, **changes), lengths, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("repeated_bytes", [1 << 40, 0], ids=["", "kernels for x"])
def test_a_step_of_squared_relu_with_quantised_weights_is_that_of_numpy(fused, repeated_bytes):
    forms = ("gate_up", Quantized(4, 64)), ("down", Quantized(4, 64, *SORTED))
    shape = changed(activation="relu2", quantized=forms)
    check(fused, shape, [77], tuning=small_tuning(quantized_repeated_bytes=repeated_bytes))


@pytest.mark.slow
@pytest.mark.parametrize("mixer, tokens", [(DELTA, 1), (MAMBA, 1), (DELTA, 3), (MAMBA, 3)])
def test_states_of_other_sequences_and_of_before_are_not_written(fused, mixer, tokens):
    device, make = fused
    shape = hybrid(mixer)
    model = Model(shape, [40, 9], tokens=tokens, layers=LAYERS[mixer.delta_net])
    weights, tensors = model.on_device(device)
    make(shape, weights).run(tensors)
    for i, states in enumerate(model.step.recurrent_states):
        for name, state in zip(("conv_state", "recurrent_state"), states, strict=True):
            np.testing.assert_array_equal(device.download(tensors[f"{name}_{i}"]), state)
    written = [name for name in tensors if name.startswith(("present_", "chain_"))]
    assert len(written) == 4 + (tokens > 1) * 2 * len(chain_widths(mixer))
    for name in written:
        *_, beyond = device.download(model.outputs[name])
        assert np.isnan(beyond).all(), name


@pytest.mark.slow
@pytest.mark.parametrize("mixer", [LARGE_DELTA, MAMBA], ids=["delta net", "Mamba2"])
def test_steps_of_one_token_give_the_states_of_a_chain(fused, mixer):
    device, make = fused
    shape, layers = hybrid(mixer), LAYERS[mixer.delta_net]
    chain, embeds = Model(shape, [43], tokens=3, layers=layers), []
    weights, tensors = chain.on_device(device)
    decoder = make(shape, weights)
    decoder.run(tensors)
    expected = {name: device.download(each) for name, each in tensors.items() if name.startswith("present_")}
    one = Model(shape, [41], layers=layers)
    one.step.caches, one.step.recurrent_states = chain.step.caches, chain.step.recurrent_states
    for token in range(3):
        embeds = chain.step.embeds[:, token : token + 1]
        one.step.embeds, one.step.kv_length = embeds, np.array([41 + token])
        one.step.position_ids = chain.step.position_ids[:, token : token + 1]
        one.step.cos, one.step.sin = chain.step.cos, chain.step.sin
        _, tensors = one.on_device(device)
        decoder.run(tensors)
        one.step.recurrent_states = [
            tuple(
                device.download(tensors[f"present_{name}_{i}"]) for name in ("conv_state", "recurrent_state")
            )
            for i in range(len(one.step.recurrent_states))
        ]
        one.step.caches = [
            tuple(
                device.download(tensors[f"{name}_cache_{i}"]).view(chain.dtype) for name in ("key", "value")
            )
            for i in range(shape.caches)
        ]
    for name, states in expected.items():
        close(device.download(tensors[name]), states, shape)


def test_a_chain_of_more_tokens_than_mixers_take_is_refused(fused):
    device, make = fused
    shape = hybrid(DELTA, max_rows=16)
    weights, tensors = Model(shape, [40], tokens=9, layers=QWEN).on_device(device)
    with pytest.raises(EngineError, match="recurrent layers: a chain of 9 tokens, more than 8"):
        make(shape, weights).run(tensors)


def mixer_of(**changes) -> dict[str, RecurrentShape]:
    """Return a change of a shape: another mixer than `DELTA`."""
    return {"recurrent": dataclasses.replace(DELTA, **changes)}


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"dtype": "fp32"}, "weights are fp32, not fp16 or bf16"),
        ({"activation": "gelu"}, "the activation is gelu"),
        ({"head_dim": 80}, "head_dim is 80, not one of (64, 96, 128, 256)"),
        ({"heads": 5}, "5 heads share 2 KV heads"),
        ({"heads": 34}, "34 heads share 2 KV heads"),
        ({"rotary_dim": 15}, "rotary_dim is 15 with head_dim 64"),
        ({"rotary_dim": 128}, "rotary_dim is 128 with head_dim 64"),
        ({"hidden": 160}, "the hidden size 160 is not a multiple of 64"),
        ({"inner": 160}, "the feed-forward size 160 is not a multiple of 64"),
        ({"vocab": 203}, "the LM head has 203 columns, not a multiple of 8"),
        ({"lora_rank": 65, "recurrent": None}, "adapters have ranks of up to 65, more than 64"),
        ({"max_rows": 17}, "a step has 17 rows, more than 16"),
        ({"lora_rank": 8}, "layers are recurrent or gated, and sequences have adapters"),
        (mixer_of(key_dim=48), "recurrent layers: key_dim is 48, not a multiple of 32 up to 128"),
        (mixer_of(key_dim=160), "recurrent layers: key_dim is 160, not a multiple of 32 up to 128"),
        (mixer_of(value_dim=24), "recurrent layers: value_dim is 24, not a multiple of 16"),
        (mixer_of(key_heads=3), "recurrent layers: 4 heads share 3 key heads"),
        (mixer_of(heads=6), "recurrent layers: in_proj has 652 columns, not a multiple of 8"),
        ({}, None),
        (
            {**mixer_of(), "quantized": (("in_proj", Quantized(4, 128)),)},
            "recurrent layers: in_proj has 520 columns, not a multiple of 16",
        ),
        ({"quantized": (("out_proj", Quantized(3, 128)),)}, "weights have 3 bits"),
    ],
)
def test_a_shape_without_kernels_has_a_reason(changes, reason):
    assert hybrid(DELTA, **changes).unsupported() == reason


INT4 = tuple((name, Quantized(4, 128)) for name in ("qkv", "o", "gate_up", "down", "in_proj", "out_proj"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape, arch, rows",
    [
        pytest.param(QWEN3_5, "sm_87", 16, id="Qwen3.5-0.8B, 16 rows"),
        pytest.param(dataclasses.replace(QWEN3_5, quantized=INT4), "sm_90", 1, id="in INT4"),
        pytest.param(NEMOTRON_4B, "sm_110", 1, id="Nemotron Nano 4B, 1 row"),
        pytest.param(QWEN3_5, "sm_90", 1, id="Qwen3.5-0.8B, 1 row"),
        pytest.param(NEMOTRON_4B, "sm_90", 8, id="Nemotron Nano 4B, 8 rows"),
        pytest.param(NEMOTRON_4B, "sm_80", 16, id="Nemotron Nano 4B, 16 rows"),
    ][: draws(3, 6)],
)
def test_the_kernels_keep_their_variables_in_registers(shape, arch, rows):
    plan = FusedPlan(shape, rows, 132, 227 << 10, H200)
    report = ptxas_report(expand("decoder.cu"), compiler.options(arch, plan))
    frames = dict(re.findall(r"Function properties for (\w+)\n\D*(\d+) bytes stack frame", report))
    assert {"in_proj", "mix", "prep_out_proj", "out_proj", "combine_splits"} < set(frames)
    assert set(frames.values()) == {"0"}, frames
    assert set(re.findall(r"(\d+) bytes spill", report)) == {"0"}
