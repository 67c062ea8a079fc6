# SPDX-License-Identifier: Apache-2.0
"""The benchmark of policies, with models of a few thousand weights."""

from __future__ import annotations

import pytest

from benchmarks import policy
from benchmarks.pi_shapes import parse_sizes

TINY = (
    "hidden=32,inner=40,layers=2,head_dim=8,expert_hidden=24,expert_inner=36,vision_hidden=16,"
    "vision_inner=24,vision_layers=1,image_size=28,vocab_size=300,horizon=5"
)


def test_the_published_sizes_have_3_2_and_3_4_billion_weights():
    weights = {name: policy._parameters(parse_sizes(name)) for name in ("pi0", "pi05")}
    assert weights["pi0"] == pytest.approx(3.235e9, rel=1e-3)
    assert weights["pi05"] - weights["pi0"] == pytest.approx(0.117e9, rel=0.02)


@pytest.mark.parametrize("kind", ["pi0", "pi05"])
def test_stages_of_a_chunk_are_timed(kind):
    options = ["--shape", f"{kind},{TINY}", "--runs", "2", "--steps", "3", "--cameras", "1", "--no-pytorch"]
    result = policy.main(options)
    assert 0 < result["stages"]["action_s"]["median"] < result["seconds_per_chunk"]["median"]


def test_an_engine_in_8_bits_takes_turns_with_one_in_floats():
    options = ["--shape", f"pi05,{TINY}", "--runs", "1", "--steps", "1", "--cameras", "1", "--no-pytorch"]
    result = policy.main([*options, "--quantize", "int8", "--in-turns"])
    assert result["bytes"] < result["floats"]["bytes"]
    assert 0 < result["change"] < 0.05
    assert result["floats"]["processor_seconds"]["median"] > 0


def test_turns_need_an_engine_in_8_bits(capsys):
    with pytest.raises(SystemExit):
        policy.main(["--in-turns"])
    assert "add --quantize or --cpu-int8" in capsys.readouterr().err


@pytest.mark.parity
def test_our_actions_are_those_of_pytorch():
    pytest.importorskip("torch")
    result = policy.main(["--shape", f"pi05,{TINY}", "--runs", "1", "--no-compile"])
    assert result["difference"] < 1e-4
    assert result["pytorch_eager_seconds"]["median"] > 0


def test_an_unknown_size_is_refused():
    with pytest.raises(ValueError, match=r"expected KEY=NUMBER with a key of hidden, .*, got 'kind=1'"):
        parse_sizes("pi05,kind=1")
