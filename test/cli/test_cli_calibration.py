# SPDX-License-Identifier: Apache-2.0
"""`edgellm export --calibrate`: prompts from files, the report, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgellm_ros.cli import main
from fixtures.outlier_checkpoint import write_outlier_checkpoint

TEXT = "What do you see?\n\ngo to the red box\n"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_outlier_checkpoint(tmp_path_factory.mktemp("calibration") / "checkpoint")


def export(checkpoint: Path, folder: Path, prompts: Path, *more: str) -> int:
    arguments = ["export", str(checkpoint), str(folder / "engine"), "--calibrate", str(prompts)]
    return main([*arguments, "--quantize", "int4", "--group-size", "32", *more])


@pytest.mark.slow
def test_the_report_has_plain_rounding_beside_the_calibrated_one(checkpoint, tmp_path, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(TEXT)
    assert export(checkpoint, tmp_path, prompts, "--json") == 0
    output = capsys.readouterr()
    report = json.loads(output.out)
    assert report["quantization"]["relative_error"] < 0.7 * report["plain_rounding"]["relative_error"]
    assert "2 requests, " in output.err
    assert "\nplain rounding: logits of" in output.err
    assert "\ncalibrated: logits of" in output.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine", "prompts.txt"]  # nothing temporary


@pytest.mark.slow
def test_lines_of_json_are_prompts_or_requests(checkpoint, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    requests = ["go", {"prompt": "look", "system_prompt": ""}, [{"role": "user", "content": "turn"}]]
    requests[1] = {"prompt": "look", "system": "You are a robot.", "max_tokens": 500}
    prompts.write_text("\n".join(map(json.dumps, requests)))
    assert export(checkpoint, tmp_path, prompts, "--no-report") == 0
    assert f"{prompts}: 3 requests, " in capsys.readouterr().err


BAD = [
    ("prompts.txt", "\n \n", "expected a prompt in each line, found none"),
    ("prompts.txt", "go\n" + "go " * 400, "line 2: the prompt has "),
    ("prompts.jsonl", '"go"\n{"prompt": ', "line 2: not valid JSON"),
    ("prompts.jsonl", '{"prompt": "go", "images": ["missing.png"]}', "line 1.images[0]: "),
    ("prompts.jsonl", '{"promt": "go"}', "line 1: unknown key 'promt'"),
    ("prompts.jsonl", "3", "line 1: expected a list of messages or an object, got 3"),
]


@pytest.mark.parametrize(("name", "text", "message"), BAD)
def test_bad_prompts_end_with_one_line_that_names_file_and_line(
    checkpoint, tmp_path, capsys, name, text, message
):
    prompts = tmp_path / name
    prompts.write_text(text)
    assert export(checkpoint, tmp_path, prompts) == 2
    error = capsys.readouterr().err
    assert f"{prompts}: {message}" in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_file_that_is_missing_is_named(checkpoint, tmp_path, capsys):
    assert export(checkpoint, tmp_path, tmp_path / "missing.txt") == 2
    assert "missing.txt: no such file" in capsys.readouterr().err


def test_calibration_without_rounding_is_refused(checkpoint, tmp_path, capsys):
    arguments = ["export", str(checkpoint), str(tmp_path / "engine"), "--calibrate", "prompts.txt"]
    assert main(arguments) == 2
    assert "add --quantize int4 or int8" in capsys.readouterr().err


def test_prompts_for_the_report_are_read_before_anything_is_written(checkpoint, tmp_path, capsys):
    prompts, missing = tmp_path / "prompts.txt", tmp_path / "missing.txt"
    prompts.write_text(TEXT)
    assert export(checkpoint, tmp_path, prompts, "--prompts", str(missing)) == 2
    assert "missing.txt: no such file" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.txt"]


@pytest.mark.parametrize("options", [[], ["--quantize", "int4", "--no-report"]], ids=["plain", "no report"])
def test_prompts_without_a_report_are_refused(checkpoint, tmp_path, capsys, options):
    arguments = ["export", str(checkpoint), str(tmp_path / "engine"), "--prompts", "prompts.txt", *options]
    assert main(arguments) == 2
    assert "--prompts: there is no report without" in capsys.readouterr().err


def test_a_check_reads_the_prompts_and_says_that_it_does_not_run_them(checkpoint, tmp_path, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(TEXT)
    assert export(checkpoint, tmp_path, prompts, "--check", "--prompts", str(prompts)) == 0
    told = capsys.readouterr().err
    assert f"{prompts}: 2 requests for the calibration, which --check does not run\n" in told
    assert f"{prompts}: 2 requests for the report, which --check does not run\n" in told


def test_a_check_refuses_prompts_that_the_export_would_refuse(checkpoint, tmp_path, capsys):
    assert export(checkpoint, tmp_path, tmp_path / "missing.txt", "--check") == 2
    assert "missing.txt: no such file" in capsys.readouterr().err
