# SPDX-License-Identifier: Apache-2.0
"""`edgellm evaluate`: the same numbers on any number of processes, and refusals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import cv2
import pytest

from edgellm_ros.evaluation.results_file import read_results
from fixtures.made_bags import ARENA, EXPECTED
from fixtures.refusal import assert_refused

pytestmark = pytest.mark.only_on("cpu", reason="the option --device is not given")
FIRST = 20_074  # three short drives
EPISODES = ("--episodes", 3, "--seed", FIRST)


def results_of(path: Path) -> dict[str, object]:
    return {
        item: outcome["result"] for item, outcome in read_results(path / "results.jsonl").finished.items()
    }


def without_measured(summary: dict) -> dict:
    return {name: value for name, value in summary.items() if name != "measured"}


@pytest.fixture(scope="module")
def reference(arena_engine, tmp_path_factory) -> Path:
    """The folder of an evaluation by one process."""
    out = tmp_path_factory.mktemp("reference")
    done = subprocess.run(command(arena_engine, out, "--processes", 1), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


def command(engine: Path, out: Path, *options: object) -> list[str]:
    arguments = ("arena", *EPISODES, "--engine", engine, "--out", out, *options)
    return [sys.executable, "-m", "edgellm_ros", "evaluate", *map(str, arguments)]


def children(pid: int) -> list[int]:
    """Return the workers of a process, which are sessions of their own."""
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in listed if os.getsid(int(child)) == int(child)]


def wait_for(condition, process: subprocess.Popen) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


@pytest.mark.slow
def test_a_killed_worker_and_an_interruption_change_no_number(edgellm, arena_engine, reference, tmp_path):
    out = tmp_path / "out"
    process = subprocess.Popen(
        command(arena_engine, out, "--processes", 2),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # as in a terminal
    )
    wait_for(lambda: children(process.pid), process)
    os.kill(children(process.pid)[0], signal.SIGKILL)
    file = out / "results.jsonl"
    wait_for(lambda: file.exists() and file.read_bytes().count(b"\n") > 1, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    finished = file.read_bytes()
    count = finished.count(b"\n") - 1
    assert f"interrupted after {count} of 3; the same command does the rest\n" in err

    options = ("--engine", arena_engine, "--out", out, "--processes", 1, "--json")
    run = edgellm("evaluate", "arena", *EPISODES, *options)
    assert run.code == 0, run.err
    assert f"{count} of 3 arena results are in {file} already" in run.err
    assert file.read_bytes().startswith(finished)
    assert results_of(out) == results_of(reference)
    expected = json.loads((reference / "summary.json").read_text())
    assert without_measured(run.json) == without_measured(expected)
    assert len(file.read_bytes().splitlines()) == 1 + 3


@pytest.mark.slow
def test_a_finished_evaluation_is_reported_without_playing(edgellm, arena_engine, reference):
    before = (reference / "results.jsonl").read_bytes()
    run = edgellm("evaluate", "arena", *EPISODES, "--engine", arena_engine, "--out", reference)
    assert (run.code, (reference / "results.jsonl").read_bytes()) == (0, before)
    assert "starting" not in run.err
    assert "at the target   3 of 3 (100.0%, 43.9 to 100.0%)" in run.out
    picture = cv2.imread(str(reference / "summary.png"))
    assert picture.shape[1] == 1800


@pytest.mark.slow
def test_without_matplotlib_everything_but_the_picture_is_written(
    edgellm, arena_engine, reference, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    shutil.copytree(reference, out)
    (out / "summary.json").unlink()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run = edgellm("evaluate", "arena", *EPISODES, "--engine", arena_engine, "--out", out)
    assert run.code == 0
    assert "summary.png needs Matplotlib, which is not installed: pip install 'edgellm[charts]'" in run.err
    assert "at the target   3 of 3" in run.out
    assert sorted(path.name for path in out.iterdir()) == ["results.jsonl", "summary.json"]


@pytest.mark.slow
def test_the_summary_counts_the_lines_of_the_file(reference):
    lines = [json.loads(line) for line in (reference / "results.jsonl").read_text().splitlines()[1:]]
    summary = json.loads((reference / "summary.json").read_text())
    assert summary["episodes"] == len(lines) == 3
    assert summary["plans"] == sum(line["result"]["plans"] for line in lines)
    assert summary["successes"]["count"] == sum(line["result"]["outcome"] == "success" for line in lines)
    assert [drive["seed"] for drive in summary["drives"]] == [FIRST, FIRST + 1, FIRST + 2]
    for line in lines:
        assert len(line["measured"]["plan_s"]) == line["result"]["plans"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--seed", 7), f"seed is 7, there {FIRST}"),
        (("--lora", "german"), 'lora is "german", there ""'),
        (("--spoken",), "spoken is true, there false"),
        (("--threads", 2), "threads is 2, there 1"),
    ],
)
def test_results_with_other_options_are_refused(edgellm, arena_engine, reference, options, words):
    before = (reference / "results.jsonl").read_bytes()
    run = edgellm("evaluate", "arena", *EPISODES, "--engine", arena_engine, "--out", reference, *options)
    assert_refused(run, words, "--restart")
    assert (reference / "results.jsonl").read_bytes() == before


@pytest.mark.parametrize("count", ["-1", "0", "many"])
def test_a_number_of_episodes_that_makes_no_sense(edgellm, count, tmp_path):
    run = edgellm("evaluate", "arena", f"--episodes={count}", "--out", tmp_path / "out")
    assert_refused(run, "--episodes", count)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_is_not_there(edgellm, tmp_path):
    options = ("--checkpoint", "/nowhere", "--engine", tmp_path / "engine")
    assert_refused(edgellm("evaluate", "arena", *options, "--out", tmp_path / "out"), "not a checkpoint")


def test_an_engine_that_is_not_there(edgellm, tmp_path):
    run = edgellm("evaluate", "arena", "--engine", "/nowhere", "--out", tmp_path / "out")
    assert_refused(run, "/nowhere/config.json", "not found")


def test_an_adapter_that_is_not_there(edgellm, arena_engine, tmp_path):
    run = edgellm("evaluate", "arena", "--engine", arena_engine, "--lora", "latin", "--out", tmp_path / "out")
    assert_refused(run, "latin")


def test_spoken_commands_for_an_engine_without_ears(edgellm, engine_without_audio, tmp_path):
    options = ("--engine", engine_without_audio, "--spoken", "--out", tmp_path / "out")
    assert_refused(edgellm("evaluate", "arena", *options), "has no audio encoder: leave --spoken out")


def test_a_speech_engine_without_spoken_commands(edgellm, arena_engine, tmp_path):
    options = ("--engine", arena_engine, "--speech-engine", arena_engine, "--out", tmp_path / "out")
    assert_refused(edgellm("evaluate", "arena", *options), "--speech-engine", "expected --spoken too")


def test_a_speech_engine_that_writes_no_transcripts(edgellm, arena_engine, tmp_path):
    options = ("--engine", arena_engine, "--spoken", "--speech-engine", arena_engine)
    run = edgellm("evaluate", "arena", *options, "--out", tmp_path / "out")
    assert_refused(run, str(arena_engine), "writes no transcripts")


def test_without_ray_the_error_says_what_to_install(edgellm, arena_engine, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    run = edgellm("evaluate", "arena", "--engine", arena_engine, "--ray", "--out", tmp_path / "out")
    assert_refused(run, "--ray needs Ray, which is not installed: pip install 'edgellm[ray]'")


@pytest.mark.parametrize("command", [("demo",), ("evaluate", "arena")], ids=" ".join)
def test_without_the_arena_the_error_says_what_to_install(edgellm, tmp_path, monkeypatch, command):
    monkeypatch.setitem(sys.modules, "edgellm_arena", None)
    run = edgellm(*command, "--out", tmp_path / "out")
    assert_refused(
        run, "no Python package edgellm_arena: ", "needs the distribution edgellm-arena: pip install"
    )
    assert not (tmp_path / "out").exists()


def test_bags_without_expected_outputs(edgellm, tmp_path):
    pytest.importorskip("rclpy")
    (tmp_path / "bags").mkdir()
    (tmp_path / "bags" / "drive").symlink_to(ARENA)
    (tmp_path / "expected").mkdir()
    options = ("--expect", tmp_path / "expected", "--out", tmp_path / "out")
    run = edgellm("evaluate", "bags", tmp_path / "bags", *options)
    assert_refused(run, "expected: no expected outputs of drive: `edgellm replay BAG --out ")


def test_a_folder_that_is_a_bag_itself(edgellm, tmp_path):
    pytest.importorskip("rclpy")
    run = edgellm("evaluate", "bags", ARENA, "--expect", EXPECTED, "--out", tmp_path / "out")
    assert_refused(run, "is a bag itself, expected a folder of bags")
