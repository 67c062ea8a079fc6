# SPDX-License-Identifier: Apache-2.0
"""The option --decode."""

import json

import pytest

from fixtures.refusal import assert_refused

COMMANDS = {
    "generate": ("--prompt", "stop", "--max-tokens", 4),
    "chat": (),
    "bench": ("--runs", 1, "--warmup", 0, "--max-tokens", 4),
}
UNAVAILABLE = "fused decoding is not available: it needs the device 'cuda', not 'cpu'"


@pytest.mark.parametrize("command", COMMANDS)
def test_fused_decoding_on_a_cpu_is_refused(edgellm, tiny_engine, command):
    told = edgellm(command, tiny_engine, *COMMANDS[command], "--decode", "fused")
    assert_refused(told, UNAVAILABLE)


def test_fused_decoding_of_a_file_of_requests_on_a_cpu_is_refused(edgellm, tiny_engine, tmp_path):
    (tmp_path / "requests.json").write_text(json.dumps([{"prompt": "stop"}]))
    files = ("--requests", tmp_path / "requests.json", "--out", tmp_path / "answers.json")
    assert_refused(edgellm("generate", tiny_engine, *files, "--decode", "fused"), UNAVAILABLE)


def test_an_unknown_value_is_refused_with_the_known_ones(edgellm, tiny_engine):
    told = edgellm("generate", tiny_engine, "--prompt", "stop", "--decode", "gpu")
    assert_refused(told, "auto", "engine", "fused")


def test_bench_reports_the_rows_that_the_kernels_decode(edgellm, tiny_engine):
    told = edgellm("bench", tiny_engine, *COMMANDS["bench"], "--decode", "engine")
    assert told.json["fused_rows"] == 0
