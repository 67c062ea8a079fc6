# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.gpu_figures`: its commands exist, and their last lines become rows."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from benchmarks import decode, gpu_figures, prompt_lengths, speculation
from benchmarks.gpu_figures import FIGURES
from edgellm_ros.cli import make_parser

ROOT = Path(gpu_figures.__file__).parents[1]
VALUES = {"device": "cuda", "arena": "models/arena", "fp16": "engines/a", "fp32": "engines/b"}


@pytest.mark.parametrize("name", FIGURES)
def test_the_options_of_a_command_exist(name):
    words = [word.format(**VALUES) for word in shlex.split(FIGURES[name].command)]
    module, options = words[1], words[2:]
    modules = decode, prompt_lengths, speculation
    parsers = {module.__name__: module._parse for module in modules}
    parse = parsers.get(module, make_parser().parse_args)
    assert parse(options).device == "cuda"


@pytest.mark.parametrize("name", FIGURES)
def test_the_tables_that_a_command_is_for_exist(name):
    for where in FIGURES[name].where.split("; "):
        file, _, section = where.partition(", ")
        lines = (ROOT / file).read_text().splitlines()
        assert any(line.lstrip("#").strip() == section for line in lines if line.startswith("#"))


@pytest.mark.slow
@pytest.mark.only_on("cpu", reason="one command is enough")
def test_a_run_tells_the_rows_and_keeps_the_last_lines(tmp_path, capsys):
    found = gpu_figures.main(["--device", "cpu", "--only", "plan_fp32", "--out", str(tmp_path)])
    assert found["failed"] == []
    kept = json.loads((tmp_path / "plan_fp32.json").read_text())
    assert kept == found["figures"]["plan_fp32"]
    told = capsys.readouterr().err
    plan_ms = kept["stages"]["total_s"]["median"] * 1e3
    assert f"plan {plan_ms:.2f} ms: {kept['tokens']} tokens, 1 trajectories" in told


def test_a_command_that_fails_is_named_and_the_others_go_on(monkeypatch):
    asked = []

    def run(name, values, out):
        asked.append(name)
        return None if name == "plan_fp16" else {"some": 1}

    monkeypatch.setattr(gpu_figures, "run", run)
    monkeypatch.setattr(gpu_figures, "export_if_needed", lambda *arguments, **options: None)
    found = gpu_figures.main(["--only", "plan_fp16,decode_1.7b"])
    assert asked == ["plan_fp16", "decode_1.7b"]
    assert (found["failed"], found["figures"]) == (["plan_fp16"], {"decode_1.7b": {"some": 1}})


def test_rows_of_batches_and_settings():
    batches = [
        {
            "batch": 8,
            "decode_ms": {"median": 1.5},
            "tokens_per_s": 5333.3,
            "share_of_copy_bandwidth": 0.614,
            "prefill_ms": {"median": 45.0},
        }
    ]
    (row,) = gpu_figures.decode_rows({"batches": batches, "memory_overhead": 0.025})
    assert row.startswith("batch 8: 1.500 ms per step, 5333 tokens/s, 61% of the copy bandwidth, prefill ")
    plan = {"stages": {"total_s": {"median": 0.0034}}, "tokens": 12, "trajectories": 1}
    parts = {"draft": 6e-5, "verify": 9e-5, "accept": 1e-5}
    assert gpu_figures.plan_rows({**plan, "round_s": parts}) == [
        "plan 3.40 ms: 12 tokens, 1 trajectories; total 3.40",
        "a round of drafting: draft 0.0600 ms, verify 0.0900 ms, accept 0.0100 ms",
    ]


@pytest.mark.slow
@pytest.mark.only_on("cpu", reason="one device is enough")
def test_passes_of_prompts_have_the_same_lengths_and_become_a_row():
    shape = "qwen3-0.6b,num_hidden_layers=1,vocab_size=300"
    found = prompt_lengths.main(["--shape", shape, "--prompts", "6", "--lengths", "60,500"])
    assert len(set(found["computed_tokens"])) == found["prompts"] == 6
    sizes = {"max_batch_size": 1, "max_input_len": 564, "max_kv_cache_capacity": 565}
    assert found["changed_from_defaults"] == sizes
    (row,) = gpu_figures.length_rows(found)
    assert row.startswith("prefill of 6 new lengths: median ")


def test_too_few_lengths_for_the_prompts_are_refused(capsys):
    with pytest.raises(SystemExit):
        prompt_lengths.main(["--lengths", "60,65"])
    assert "has too few lengths for --prompts 40: expected LOW and HIGH at least 240 apart" in (
        capsys.readouterr().err
    )


def test_an_unknown_name_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        gpu_figures.main(["--only", "plan_fp8"])
    assert "'plan_fp8', expected paths_arena, " in capsys.readouterr().err
