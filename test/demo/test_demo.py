# SPDX-License-Identifier: Apache-2.0
"""The demo as people run it: the command, two ROS node processes, their topics."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

from edgellm_arena.episodes.closed_loop import Plan, drive
from edgellm_arena.episodes.episode import World, make_episode
from fixtures.process_state import assert_gone

pytest.importorskip("rclpy")
pytest.importorskip("edgellm_ros.msg")
pytestmark = [pytest.mark.real_time, pytest.mark.timeout(600)]

SEED = 1  # of `make demo`


def demo(engine: Path, out: Path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "edgellm_ros", "demo", "--engine", engine, "--out", out, *arguments]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # as in a terminal
    )


def children_of(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


def wait_for_first_plan(process: subprocess.Popen) -> None:
    for line in process.stderr:
        if " ms " in line:
            return
    pytest.fail("the demo ended before its first plan")


@pytest.fixture(scope="module")
def episode(arena_engine, tmp_path_factory) -> dict:
    """One episode over ROS: the summary, and what was written."""
    out = tmp_path_factory.mktemp("demo")
    process = demo(arena_engine, out, "--seed", str(SEED), "--json")
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    return {"summary": json.loads(stdout.splitlines()[-1]), "stdout": stdout, "stderr": stderr, "out": out}


def test_the_robot_reaches_its_target(episode):
    summary = episode["summary"]
    assert summary["episodes"] == 1
    assert summary["successes"] == 1
    assert summary["collisions"] == 0
    assert summary["lora"] == ""
    assert 0 < summary["mean_plan_seconds"] < 10


def test_the_conversation_is_told_on_standard_error(episode):
    assert episode["stdout"].count("\n") == 1
    said = [line.split(":", 1)[1].strip() for line in episode["stderr"].splitlines() if "person:" in line]
    assert said == ["what do you see?", make_episode(1000 * SEED).command.text]
    assert episode["stderr"].count("robot:") == episode["summary"]["plans"] + 1


def test_there_is_a_picture_of_it(episode):
    (path,) = episode["summary"]["pictures"]
    assert Path(path).parent == episode["out"]
    picture = cv2.imread(path)
    assert min(picture.shape[:2]) > 500


def test_it_is_driven_over_topics_exactly_as_in_process(episode, arena_engine):
    from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
    from edgellm_ros.runtime.request import LLMGenerationRequest

    world = World(make_episode(1000 * SEED))
    with LLMInferenceRuntime(arena_engine, drafting="off") as runtime:

        def think(frame):
            request = LLMGenerationRequest(
                prompt=world.episode.command.text, images=(frame,), history=world.history(),
                speed=world.state.speed, action_samples=1, noise_seed=world.episode.seed,
            )  # fmt: skip
            response = runtime.handle_request(request)
            return Plan(response.text, None if response.actions is None else response.actions[0])

        driven = drive(world, think)
    assert episode["summary"]["plans"] == len(driven.plans)
    picture = json.dumps(episode["summary"]["pictures"])
    assert "episode_000" in picture
    assert episode["summary"]["simulated_seconds"] == pytest.approx(world.time)
    assert episode["summary"]["drives"] == [
        {
            "number": 0,
            "seed": 1000 * SEED,
            "outcome": "success",
            "time": pytest.approx(world.time),
            "mean_speed": pytest.approx(world.mean_speed()),
            "least_clearance": pytest.approx(world.least_clearance()),
        }
    ]
    for plan in driven.plans:
        assert plan.text in episode["stderr"]


@pytest.fixture(scope="module")
def play(arena_engine, tmp_path_factory):
    """`play(arguments...)`: the drives, the picture of the last one, and the text."""

    def play(*arguments: str) -> tuple[list[dict], bytes, str]:
        process = demo(arena_engine, tmp_path_factory.mktemp("demo"), *arguments, "--json")
        stdout, stderr = process.communicate(timeout=240)
        assert process.returncode == 0, stderr
        summary = json.loads(stdout.splitlines()[-1])
        return summary["drives"], Path(summary["pictures"][-1]).read_bytes(), stderr

    return play


@pytest.mark.slow
def test_the_seed_that_an_episode_prints_plays_this_episode_again(play):
    drives, picture, text = play("--seed", "3", "--episodes", "2", "--spoken")
    printed = re.findall(r"episode seed (\d+)", text)
    assert printed == [str(drive["seed"]) for drive in drives]
    again, its_picture, _ = play("--episode-seed", printed[1], "--spoken")
    (repeated,) = again
    for name, value in drives[1].items():
        exact = not isinstance(value, float)
        assert repeated[name] == (value if exact else pytest.approx(value, rel=1e-5)), name
    pixels, its_pixels = (
        cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_COLOR) for file in (picture, its_picture)
    )
    assert np.abs(pixels.astype(int) - its_pixels).mean() < 0.5


def test_an_episode_seed_does_not_go_with_other_episodes(arena_engine, tmp_path):
    process = demo(arena_engine, tmp_path, "--episode-seed", "5", "--episodes", "2")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "--episode-seed names one episode of any seed: expected no others, got --episodes 2" in stderr


def test_ctrl_c_ends_everything(arena_engine, tmp_path):
    process = demo(arena_engine, tmp_path)
    wait_for_first_plan(process)
    children = children_of(process.pid)
    assert len(children) == 2
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in stderr + "".join(log.read_text() for log in tmp_path.glob("*.log"))
    assert_gone(children)


def test_a_node_that_dies_is_reported_with_the_end_of_its_log(arena_engine, tmp_path):
    process = demo(arena_engine, tmp_path)
    wait_for_first_plan(process)
    node, arena = sorted(children_of(process.pid))
    os.kill(node, signal.SIGKILL)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "the edgellm node ended with exit code -9" in stderr
    assert "edgellm_node.log" in stderr
    assert_gone([node, arena])


def test_an_arena_that_dies_is_reported(arena_engine, tmp_path):
    process = demo(arena_engine, tmp_path, "--episodes", "2")
    wait_for_first_plan(process)
    node, arena = sorted(children_of(process.pid))
    os.kill(arena, signal.SIGKILL)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "the arena ended with exit code -9" in stderr
    assert_gone([node, arena])


def test_the_follower_drives_the_robot_to_its_target(arena_engine, tmp_path):
    process = demo(arena_engine, tmp_path, "--seed", str(SEED), "--follower", "--json")
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    assert json.loads(stdout.splitlines()[-1])["successes"] == 1


def test_without_the_followers_commands_the_robot_does_not_drive(arena_engine, tmp_path):
    process = demo(arena_engine, tmp_path, "--follower")
    wait_for_first_plan(process)
    node, follower, arena = sorted(children_of(process.pid))
    os.kill(follower, signal.SIGKILL)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "the follower ended with exit code -9" in stderr
    assert_gone([node, follower, arena])
