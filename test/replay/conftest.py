# SPDX-License-Identifier: Apache-2.0
"""Replays with the demo's engine, and beside a node that runs already."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edgellm_ros.replay.bag import BagMessage
from fixtures.made_bags import ROOT, copy_bag
from fixtures.replay_run import TIMEOUT_S, ReplayRun, finish, start

SHORT = (13.6e9, 16.0e9)  # the part of the bag in which the robot starts to drive, on two commands


@pytest.fixture
def replay(arena_engine, tmp_path):
    """`replay(bag, arguments...)` replays with the demo's engine unless one is named.

    The function writes to tmp_path/out unless `out` names another folder.
    """

    def run(bag: Path, *arguments: object, out: str = "out") -> ReplayRun:
        engine = () if "--engine" in arguments else ("--engine", arena_engine)
        return finish(start(bag, "--out", tmp_path / out, "--json", *engine, *arguments))

    return run


@pytest.fixture(scope="module")
def short(tmp_path_factory) -> Path:
    """A few seconds of the shipped bag, without sound."""

    def is_in(message: BagMessage) -> bool:
        return SHORT[0] < message.time < SHORT[1] and message.topic.name != "/edgellm/audio"

    return copy_bag(tmp_path_factory.mktemp("short") / "bag", keep=is_in)


@pytest.fixture
def run_beside(short, arena_engine, tmp_path):
    """Function that runs scripts/replay_node beside a node with changed parameters.

    The function returns the outcome of the script.
    """
    from edgellm_ros.ros.processes import NODE_MODULE, Child, own_domain, ros_arguments, ros_environment
    from edgellm_ros.ros.replay.replay import Replay, ReplayOptions

    def run(*more: object, bag: Path = short, engine: Path = arena_engine, **changes: object) -> ReplayRun:
        with Replay(ReplayOptions(bag, tmp_path / "out", engine, "cpu", {})) as replay:
            arguments = ["-m", NODE_MODULE, *ros_arguments({**replay.start_parameters, **changes})]
        with own_domain() as domain:
            environment = ros_environment(domain)
            node = Child("edgellm node", arguments, tmp_path / "node.log", environment)
            try:
                words = [bag, "--out", tmp_path / "out", "--engine", engine, "--json", *more]
                command = [ROOT / "scripts" / "replay_node", *words, "--ros-args", "-r", "__node:=player"]
                done = subprocess.run(
                    [sys.executable, *map(str, command)],
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=TIMEOUT_S,
                )
            finally:
                node.stop()
        return ReplayRun(done.returncode, done.stdout, done.stderr)

    return run
