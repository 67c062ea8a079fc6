# SPDX-License-Identifier: Apache-2.0
"""Prefills of the fused kernels against NumPy in float64.

Without a GPU the kernels are compiled for the host, and products are NumPy's.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

pytest.importorskip("cuda.core", reason="NVRTC and its bindings are not installed (requirements-test.txt)")

from doubles.fused_decoder import TYPES
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.fused.cuda import compiler
from edgellm_ros.fused.plan.prefill import PrefillPlan
from edgellm_ros.fused.plan.prompt_attention import AttentionForm
from edgellm_ros.fused.plan.quantized import Quantized
from edgellm_ros.fused.prefill import FusedPrefill, FusedVerification
from edgellm_ros.fused.sources import expand
from fixtures.fused_prefills import check_prefill, prefills_on
from fixtures.fused_steps import Model, changed, close
from fixtures.on_device import put
from fixtures.ptxas_report import ptxas_report


@pytest.fixture(scope="session")
def prefills(device):
    """The device, and a function that makes a prefill and its decoder on it."""
    return prefills_on(device)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape, lengths, tokens, options",
    [
        pytest.param(changed(), [100], 100, {}, id="a first prompt"),
        pytest.param(changed(), [1], 1, {}, id="one token"),
        pytest.param(changed(capacity=900), [880], 70, {}, id="after a long prefix, in splits"),
        pytest.param(
            changed(dtype="bf16", tied=True, max_rows=4), [33, 150, 40], 33, {}, id="bf16, tied, 3 prompts"
        ),
        pytest.param(
            changed(head_dim=128, rotary_dim=32, rope_interleaved=True, heads=7, kv_heads=1, qkv_bias=True,
                    o_bias=True, mlp_bias=True, qk_norm=False, windows=(20, None)),
            [150], 90, {}, id="biases, a window, 7 heads per KV head",
        ),
        pytest.param(
            changed(head_dim=96, rotary_dim=96, heads=2, hidden=192, inner=320, hidden_state_layers=(1, 2)),
            [77], 60, {"deepstack": 2}, id="heads of 96, hidden states, deepstack",
        ),
        pytest.param(
            changed(head_dim=256, rotary_dim=64, heads=8, kv_heads=2, hidden=576), [149], 80, {},
            id="heads of 256",
        ),
        pytest.param(changed(fp8_cache=True, windows=(None, 30)), [150], 80, {}, id="an FP8 cache"),
        pytest.param(changed(rotary_dim=0, activation="relu2"), [60], 60, {}, id="no RoPE, squared ReLU"),
        pytest.param(
            changed(hidden_state_layers=(2,), o_bias=True, mlp_bias=True), [150], 110, {"most_tokens": 48},
            id="in three parts",
        ),
    ],
)  # fmt: skip
def test_a_prefill_is_that_of_numpy(prefills, shape, lengths, tokens, options):
    check_prefill(prefills, shape, lengths, tokens, **options)


@pytest.mark.slow
def test_a_prefill_has_the_same_bits_after_another(prefills):
    shape, tokens = changed(capacity=900), 70
    device, make = prefills
    model = Model(shape, [880], tokens=tokens)
    weights, tensors = model.on_device(device)
    tensors["last_token_ids"] = put(device, np.array([[tokens - 1]]))
    prefill, logits = make(shape, weights), []
    for _ in range(3):
        tensors["logits"] = device.empty((1, 1, shape.vocab), np.float32)
        prefill.run(tensors)
        logits.append(device.download(tensors["logits"]))
    assert np.array_equal(logits[0], logits[1])
    assert np.array_equal(logits[0], logits[2])


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape, lengths, tokens, tree",
    [
        pytest.param(changed(max_rows=16), [150, 40], 17, True, id="two trees"),
        pytest.param(changed(max_rows=16), [33, 90, 40], 8, False, id="three chains"),
        pytest.param(
            changed(windows=(20, None), dtype="bf16", tied=True, hidden_state_layers=(1, 2), capacity=900),
            [880, 62], 12, True, id="trees with a window, bf16, tied, hidden states, in splits",
        ),
        pytest.param(
            changed(head_dim=96, rotary_dim=96, heads=2, hidden=192, vocab=197, head_columns=200,
                    mlp_bias=True, o_bias=True),
            [77], 20, True, id="biases, more columns than tokens",
        ),
    ],
)  # fmt: skip
def test_a_verification_is_that_of_numpy(prefills, shape, lengths, tokens, tree):
    device, make = prefills
    model = Model(shape, lengths, tokens=tokens, tree=tree)
    weights, tensors = model.on_device(device)
    make(shape, weights, kind=FusedVerification, trees=tree).run(tensors)
    expected = model.expected()
    close(device.download(tensors["logits"]), expected.logits, shape)
    for layer, states in expected.hidden_states.items():
        close(device.download(tensors[f"hidden_states_{layer}"]).view(TYPES[shape.dtype]), states, shape)


@pytest.mark.parametrize("kind", [FusedPrefill, FusedVerification])
def test_states_after_the_last_norm_are_those_of_numpy(prefills, kind):
    device, make = prefills
    model = Model(changed(last_states=True), [40], tokens=33)
    weights, tensors = model.on_device(device)
    tensors["fused_hidden_states"] = device.empty((1, 33, model.shape.hidden), np.uint16)
    tensors["last_token_ids"] = put(device, np.array([[32]]))
    if kind is FusedPrefill:
        tensors["logits"] = device.empty((1, 1, model.shape.vocab), np.float32)
    make(model.shape, weights, kind=kind).run(tensors)
    found = device.download(tensors["fused_hidden_states"]).view(np.float16)
    close(found, model.expected().normed, model.shape)


def test_a_verification_of_too_many_tokens_is_refused(prefills):
    device, make = prefills
    model = Model(changed(max_rows=2), [40], tokens=40)
    weights, tensors = model.on_device(device)
    with pytest.raises(EngineError, match="1 sequences of 40 tokens, expected at most 32 in all"):
        make(model.shape, weights, most_tokens=32, kind=FusedVerification).run(tensors)


def test_several_prompts_that_are_too_long_are_refused(prefills):
    device, make = prefills
    model = Model(changed(max_rows=2), [40, 40], tokens=40)
    weights, tensors = model.on_device(device)
    with pytest.raises(EngineError, match="2 prompts of 40 tokens, expected at most 64 in all"):
        make(model.shape, weights, most_tokens=64).run(tensors)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"attention_gate": True, "qkv_bias": True}, "queries have gates and biases"),
        ({"quantized": (("qkv", Quantized(4, 32)),)}, "weights are quantised"),
        ({"head_dim": 80}, "head_dim is 80"),
    ],
)
def test_a_shape_that_is_not_taken_has_a_reason(changes, reason):
    shape = dataclasses.replace(changed(), **changes)
    with pytest.raises(EngineError, match=reason):
        PrefillPlan(shape, 132, 227 << 10)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_splits_of_a_prefill_have_room_in_the_scratch(head_dim):
    plan = PrefillPlan(changed(head_dim=head_dim, rotary_dim=64), 16, 99 << 10)
    for batch in (1, 2, 7, 16):
        for tokens in (1, 16, 100, 500, 4000):
            splits = plan.splits(batch, tokens)
            places = plan.attention(batch, tokens).grid[0] * batch
            assert splits == 1 or 8 * AttentionForm(1, 64).queries * places <= plan.scratch_bytes["scales"]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_87", "sm_90"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_the_kernels_keep_their_variables_in_registers(head_dim, arch):
    shape = changed(head_dim=head_dim, heads=12, hidden=1536, inner=8960, windows=(100, None))
    plan = PrefillPlan(shape, 132, 163 << 10)
    report = ptxas_report(expand(plan.source), compiler.options(arch, plan))
    assert set(re.findall(r"(\d+) bytes stack frame", report)) == {"0"}
    assert set(re.findall(r"(\d+) bytes spill", report)) == {"0"}
