# SPDX-License-Identifier: Apache-2.0
"""Prefills of hybrids in the fused kernels, against NumPy in float64.

NumPy goes from token to token.
Without a GPU the kernels are compiled for the host, and products are NumPy's.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

pytest.importorskip("cuda.core", reason="NVRTC and its bindings are not installed (requirements-test.txt)")

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.fused.cuda import compiler
from edgellm_ros.fused.plan.prefill import PrefillPlan
from edgellm_ros.fused.plan.prompt_mixer import PromptMixerPlan
from edgellm_ros.fused.plan.shape import FusedShape
from edgellm_ros.fused.sources import expand
from fixtures.fused_hybrids import DELTA, LARGE_DELTA, LAYERS, MAMBA, NEMOTRON_4B, QWEN3_5, hybrid
from fixtures.fused_prefills import check_prefill, prefills_on
from fixtures.fused_steps import Model
from fixtures.on_device import put
from fixtures.ptxas_report import ptxas_report

GROUPS = dataclasses.replace(MAMBA, key_heads=4, key_dim=128, conv_bias=False, conv_kernel=3)


@pytest.fixture(scope="session")
def prefills(device):
    """The device, and a function that makes a prefill and its decoder on it."""
    return prefills_on(device)


def run(prefills, shape: FusedShape, valid: list[int], tokens: int, seed: int = 0, **options) -> dict:
    """Run prompts of `valid` tokens, padded to `tokens`; return the states after them.

    Padding differs from seed to seed, the tokens before it do not.
    """
    device, make = prefills
    model = Model(shape, [tokens] * len(valid), tokens=tokens, layers=LAYERS[shape.recurrent.delta_net])
    states = np.random.default_rng(99)
    for each in (array for pair in model.step.recurrent_states for array in pair):
        each[...] = states.standard_normal(each.shape)
    model.step.embeds = np.zeros((len(valid), tokens, shape.hidden), model.dtype)
    others = np.random.default_rng(seed)
    for row, count in enumerate(valid):
        own = np.random.default_rng(row).standard_normal((count, shape.hidden))
        padding = others.standard_normal((tokens - count, shape.hidden))
        model.step.embeds[row] = np.concatenate([own, padding])
    weights, tensors = model.on_device(device)
    tensors["position_ids"] = put(device, np.tile(np.arange(tokens), (len(valid), 1)))
    tensors["valid_tokens"] = put(device, np.array(valid))
    tensors["last_token_ids"] = put(device, np.maximum(np.array(valid)[:, None], 1) - 1)
    tensors["logits"] = device.empty((len(valid), 1, shape.vocab), np.float32)
    make(shape, weights, **options).run(tensors)
    found = {name: device.download(each) for name, each in tensors.items()}
    found["before"] = model.step.recurrent_states
    return found


def present(outputs: dict) -> dict[str, np.ndarray]:
    """Return the states after a run."""
    return {name: array for name, array in outputs.items() if name.startswith("present_")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape, lengths, tokens, options",
    [
        pytest.param(hybrid(DELTA), [40], 40, {}, id="delta net, less than a chunk"),
        pytest.param(hybrid(DELTA), [150], 128, {}, id="delta net, two chunks"),
        pytest.param(hybrid(DELTA), [1], 1, {}, id="delta net, one token"),
        pytest.param(
            hybrid(LARGE_DELTA, max_rows=2), [150, 120], 110, {}, id="delta net of 128 x 128, 2 prompts"
        ),
        pytest.param(hybrid(LARGE_DELTA, dtype="bf16"), [150], 130, {}, id="delta net, bf16"),
        pytest.param(hybrid(DELTA), [150], 140, {"most_tokens": 64}, id="delta net, in three parts"),
        pytest.param(
            hybrid(DELTA, capacity=900), [880], 70, {}, id="delta net, attention in splits with gates"
        ),
        pytest.param(hybrid(MAMBA, dtype="bf16"), [150], 140, {}, id="Mamba2"),
        pytest.param(
            hybrid(MAMBA, dtype="bf16", tied=True, max_rows=2), [150, 120], 100, {}, id="Mamba2, 2 prompts"
        ),
        pytest.param(hybrid(GROUPS, dtype="bf16"), [150], 90, {}, id="Mamba2 of 128 x 80, 4 groups"),
    ],
)  # fmt: skip
def test_a_prefill_is_that_of_numpy(prefills, shape, lengths, tokens, options):
    check_prefill(prefills, shape, lengths, tokens, layers=LAYERS[shape.recurrent.delta_net], **options)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", [DELTA, MAMBA], ids=["delta net", "Mamba2"])
def test_padding_leaves_no_trace(prefills, mixer):
    shape, valid = hybrid(mixer, max_rows=3), [2, 64, 70]
    expected = present(run(prefills, shape, valid, 70))
    for tokens, seed in ((80, 1), (130, 2)):
        padded = present(run(prefills, shape, valid, tokens, seed, most_tokens=512))
        assert padded.keys() == expected.keys()
        for name, states in expected.items():
            np.testing.assert_array_equal(padded[name], states, err_msg=f"{name}, {tokens} tokens")


@pytest.mark.slow
@pytest.mark.parametrize("mixer", [DELTA, MAMBA], ids=["delta net", "Mamba2"])
def test_a_row_without_tokens_keeps_its_states(prefills, mixer):
    outputs = run(prefills, hybrid(mixer, max_rows=2), [0, 20], 20)
    for i, (conv_state, state) in enumerate(outputs["before"]):
        np.testing.assert_array_equal(outputs[f"present_conv_state_{i}"][0], conv_state[0])
        np.testing.assert_array_equal(outputs[f"present_recurrent_state_{i}"][0], state[0])
        assert not np.array_equal(outputs[f"present_recurrent_state_{i}"][1], state[1])


def test_gates_with_biases_are_refused():
    with pytest.raises(EngineError, match="no kernels for prompts: queries have gates and biases"):
        PrefillPlan(hybrid(DELTA, qkv_bias=True), 132, 227 << 10)


def test_a_gpu_with_too_little_shared_memory_is_refused():
    with pytest.raises(EngineError, match="a block needs 59392 of 49152 bytes of shared memory"):
        PromptMixerPlan(hybrid(DELTA), 132, 48 << 10)


@pytest.mark.slow
@pytest.mark.parametrize("arch, multiprocessors", [("sm_80", 108), ("sm_87", 16), ("sm_90", 132)])
@pytest.mark.parametrize("shape", [QWEN3_5, NEMOTRON_4B], ids=["Qwen3.5-0.8B", "Nemotron Nano 4B"])
def test_the_kernels_keep_their_variables_in_registers(shape, arch, multiprocessors):
    plan = PromptMixerPlan(shape, multiprocessors, 163 << 10)
    report = ptxas_report(expand(plan.source), compiler.options(arch, plan))
    frames = dict(re.findall(r"Function properties for (\w+)\n\D*(\d+) bytes stack frame", report))
    assert set(frames) == {"convolve_tokens", "prepare_chunks", "scan_chunks", "gate_tokens"}
    assert set(frames.values()) == {"0"}, frames
    assert set(re.findall(r"(\d+) bytes spill", report)) == {"0"}
