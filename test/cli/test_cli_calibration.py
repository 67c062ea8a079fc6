# SPDX-License-Identifier: Apache-2.0
"""`edgellm export --calibrate`: prompts from files, the report, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from edgellm_ros.builder import export as export_engine
from edgellm_ros.cli import main
from edgellm_ros.cli.quantization.cost import logits
from edgellm_ros.cli.quantization.perplexity import CHUNK, MOST_CHUNKS, report_chunks
from edgellm_ros.runtime.text.tokenizer import Tokenizer
from fixtures.gguf_files import write_gguf
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


def test_a_gguf_file_is_calibrated(tmp_path, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("in the other thing\n")
    file = write_gguf(tmp_path / "model.gguf", kind="F16")
    assert export(file, tmp_path, prompts, "--no-report") == 0
    assert f"{prompts}: 1 requests, " in capsys.readouterr().err


WORDS = "turn to the door and wait behind the table"
OF_ITS_OWN = MOST_CHUNKS * CHUNK // 2  # tokens that are predicted


@pytest.mark.slow
@pytest.mark.parametrize("given", ["calibrate", "prompts", "neither"])
def test_the_report_has_the_perplexity_of_the_prompts_text(checkpoint, tmp_path, capsys, given):
    """Those of --prompts, else those of --calibrate, else a text of its own."""
    files = {name: tmp_path / f"{name}.txt" for name in ("calibrate", "prompts")}
    files["calibrate"].write_text(WORDS if given == "calibrate" else TEXT)
    files["prompts"].write_text(WORDS)
    options = {"calibrate": ["calibrate"], "prompts": ["calibrate", "prompts"], "neither": []}[given]
    arguments = [word for name in options for word in (f"--{name}", str(files[name]))]
    engines = [str(tmp_path / name) for name in ("before", "after")]
    assert main(["export", str(checkpoint), engines[0]]) == 0
    capsys.readouterr()
    quantised = ["export", str(checkpoint), engines[1], "--quantize", "int4", "--json", *arguments]
    assert main(quantised) == 0
    found = json.loads(capsys.readouterr().out)["quantization"]
    if given == "neither":
        assert found["predictions"] == OF_ITS_OWN
        return
    for engine, name in zip(engines, ("before", "after"), strict=True):
        tokens = Tokenizer(Path(engine) / "tokenizer.json").encode(WORDS)
        half = len(tokens) // 2
        (rows,) = logits(Path(engine), [tokens])
        chances = np.exp(rows) / np.exp(rows).sum(-1, keepdims=True)
        expected = [chances[place - 1, tokens[place]] for place in range(half, len(tokens))]
        assert found["predictions"] == len(expected)
        assert found[f"perplexity_{name}"] == pytest.approx(np.exp(-np.log(expected).mean()), rel=1e-6)


def test_an_engine_of_a_part_of_the_vocabulary_has_no_perplexity(tiny_checkpoint, tmp_path):
    save_file({"vocab_map": np.arange(270)}, tmp_path / "vocab_map.safetensors")
    export_engine(tiny_checkpoint, tmp_path / "engine", vocab_map=tmp_path / "vocab_map.safetensors")
    assert report_chunks(tmp_path / "engine", WORDS) == []


def test_a_text_without_words_has_no_perplexity(tiny_engine):
    assert report_chunks(tiny_engine, "") == []


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
