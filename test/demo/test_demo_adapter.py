# SPDX-License-Identifier: Apache-2.0
"""The demo with an adapter of its checkpoint.

The adapter has random weights, so it answers in a way of its own.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fixtures.tiny_adapter import write_adapter

pytest.importorskip("rclpy")
pytest.importorskip("edgellm_ros.msg")

from edgellm_arena.episodes.episode import World, make_episode
from edgellm_arena.speech.person import person_of
from edgellm_ros.multimodal.audio.sound_stream import utterances_in
from edgellm_ros.multimodal.audio.utterance import UtteranceSettings
from edgellm_ros.multimodal.audio.voice_activity import VoiceActivity
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest

pytestmark = [pytest.mark.real_time, pytest.mark.timeout(600)]

EPISODE = make_episode(1000)


@pytest.fixture(scope="module")
def demo(tiny_checkpoint, tmp_path_factory) -> Callable[..., subprocess.Popen]:
    """`demo(arguments...)`: with a checkpoint that has the adapters `wild` and `odd`."""
    root = tmp_path_factory.mktemp("adapted")
    shutil.copytree(tiny_checkpoint, root / "checkpoint")
    for seed, name in enumerate(("wild", "odd")):
        write_adapter(root / "checkpoint" / "lora" / name, tiny_checkpoint, seed=seed, strength=0.8)
    options = ["--checkpoint", root / "checkpoint", "--engine", root / "engine", "--out", root / "out"]

    def start(*arguments: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "edgellm_ros", "demo", "--json", *options, *arguments]
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # as in a terminal
        )

    start.engine = root / "engine"
    return start


@pytest.fixture(scope="module")
def typed(demo) -> tuple[dict, str]:
    """A demo with the adapter `wild`: its summary, and what it told."""
    process = demo("--lora", "wild")
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    return json.loads(stdout.splitlines()[-1]), stderr.decode()


def first_answers(engine: Path, **told: object) -> dict[str, str]:
    """Return the first answers of the base model and the adapter by their names.

    Both answer the command and the first frame in this process. The name of the base model is empty.
    """
    frame = World(EPISODE).camera()
    with LLMInferenceRuntime(engine, drafting="off") as runtime:
        requests = {
            name: LLMGenerationRequest(**{"prompt": "", **told}, images=(frame,), action_samples=1, lora=name)
            for name in ("", "wild")
        }
        return {name: runtime.handle_request(one).text for name, one in requests.items()}


def test_the_robot_answers_with_the_adapter(typed, demo):
    answers = first_answers(demo.engine, prompt=EPISODE.command.text)
    said = typed[1].split("robot: ")[2]  # 1: to the question
    assert said.startswith(answers["wild"])
    assert not said.startswith(answers[""])


def test_the_summary_names_the_adapter(typed):
    assert typed[0]["lora"] == "wild"


def test_spoken_to_it_answers_with_the_adapter_too(typed, demo):
    (heard,) = utterances_in(
        person_of(EPISODE.seed).say(EPISODE.command.text), VoiceActivity(), UtteranceSettings()
    )
    answers = first_answers(demo.engine, audio=(heard.sound,))
    process, told = demo("--lora", "wild", "--spoken"), b""
    while told.count(b"robot: ") < 3:  # the question, the command, and the line after
        line = process.stderr.readline()
        assert line, f"the demo ended: {told}"
        told += line
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    said = told.decode().split("robot: ")[2]
    assert said.startswith(answers["wild"])
    assert not said.startswith(answers[""])


def test_an_unknown_adapter_is_refused_with_the_names_there_are(typed, demo):
    process = demo("--lora", "polite")
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (2, b"")
    assert stderr.decode() == (
        f"edgellm demo: error: --lora 'polite': no such adapter in {demo.engine}/lora, which has odd, wild\n"
    )
