# SPDX-License-Identifier: Apache-2.0
"""The arena over topics with plans that arrive late."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from edgellm_arena.driving.smoothness import jumps
from edgellm_arena.episodes.closed_loop import Plan
from edgellm_arena.episodes.delayed_loop import drive_delayed
from edgellm_arena.episodes.episode import World, make_episode
from edgellm_ros.ros.processes import NODE_MODULE, Child, own_domain, ros_arguments, ros_environment

pytest.importorskip("rclpy")
pytest.importorskip("edgellm_ros.msg")
pytestmark = [pytest.mark.real_time, pytest.mark.timeout(600)]

SEED = 1


def in_process(engine, delay_steps: int) -> tuple[World, list[str], list[float], list[float]]:
    """Drive the same episode without ROS; return the world, texts and jerks.

    Jerks at changes of the plan and jerks within plans are two lists.
    """
    from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
    from edgellm_ros.runtime.request import LLMGenerationRequest

    world, states = World(make_episode(1000 * SEED)), []

    def on_step() -> None:
        states.append((world.history(), world.state.speed))

    on_step()
    with LLMInferenceRuntime(engine, drafting="off") as runtime:

        def think(frame, age):
            history, speed = states[-1 - age]
            request = LLMGenerationRequest(
                prompt=world.episode.command.text, images=(frame,), history=history, speed=speed,
                action_samples=1, noise_seed=world.episode.seed,
            )  # fmt: skip
            response = runtime.handle_request(request)
            return Plan(response.text, None if response.actions is None else response.actions[0])

        driven = drive_delayed(world, think, on_step, delay_steps)
    changes, within = jumps(world.track, driven.drivers)
    return world, [plan.text for plan in driven.plans], changes.jerk.tolist(), within.jerk.tolist()


def test_a_drive_with_late_plans_is_over_topics_as_in_process(arena_engine, tmp_path):
    command = [
        sys.executable, "-m", "edgellm_ros", "demo", "--engine", arena_engine, "--out", tmp_path, "--json",
        "--seed", str(SEED), "--inference-delay", "0.8", "--chunking", "off",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    world, texts, changes, within = in_process(arena_engine, 8)
    assert len(changes) > 2
    assert summary["drives"][0]["outcome"] == world.outcome.value
    assert summary["drives"][0]["time"] == pytest.approx(world.time)
    assert summary["drives"][0]["mean_speed"] == pytest.approx(world.mean_speed(), rel=1e-6)
    assert summary["plans"] == len(texts)
    assert summary["changes"] == len(changes)
    assert summary["jerk_at_changes"]["mean"] == pytest.approx(sum(changes) / len(changes), abs=1e-4)
    assert summary["jerk_within_plans"]["mean"] == pytest.approx(sum(within) / len(within), abs=1e-4)


def test_the_node_sees_the_delay_as_the_age_of_its_frames(arena_engine, tmp_path):
    with own_domain() as domain:
        environment = ros_environment(domain)
        parameters = {
            "engine_dir": str(arena_engine), "autostart": True, "use_sim_time": True, "plan_on": "image",
            "input_reliability": "reliable", "max_input_age": 0.25,
        }  # fmt: skip
        node = Child("node", ["-m", NODE_MODULE, *ros_arguments(parameters)], tmp_path / "node", environment)
        parameters = {"inference_delay": 0.3, "attempts": 1, "resend_after": 1.0}
        arguments = ["-m", "edgellm_arena.ros.main", *ros_arguments(parameters)]
        arena = Child("arena", arguments, tmp_path / "arena", environment)
        try:
            assert arena.process.wait(60) == 1
        finally:
            arena.stop()
            node.stop()
    assert "the camera frame is 0.30 s old, limit 0.25 s" in node.log_tail(40)
