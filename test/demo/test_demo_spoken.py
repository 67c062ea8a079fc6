# SPDX-License-Identifier: Apache-2.0
"""The demo in which the robot is spoken to, with a model that hears.

The model has random weights, so the robot only talks.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import wave
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("rclpy")
pytest.importorskip("edgellm_ros.msg")

from edgellm_arena.episodes.closed_loop import Plan, drive
from edgellm_arena.episodes.episode import World, make_episode
from edgellm_arena.ros.demo import summarise
from edgellm_arena.ros.microphone import save_wav
from edgellm_arena.speech.person import person_of
from edgellm_ros.multimodal.audio.sound_stream import utterances_in
from edgellm_ros.multimodal.audio.utterance import UtteranceSettings
from edgellm_ros.multimodal.audio.voice_activity import VoiceActivity
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest

pytestmark = [pytest.mark.real_time, pytest.mark.timeout(600)]

SEED = 1
EPISODE = 1000 * SEED


def demo(checkpoint: Path, out: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [
        *(sys.executable, "-m", "edgellm_ros", "demo", "--json", "--checkpoint", checkpoint),
        *("--engine", out / "engine", "--out", out, *arguments),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def spoken(tiny_checkpoint, tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("spoken")
    done = demo(tiny_checkpoint, out, "--seed", str(SEED), "--spoken", "--voice", "espeak")
    assert done.returncode == 0, done.stderr
    return {"summary": json.loads(done.stdout.splitlines()[-1]), "stderr": done.stderr, "out": out}


def utterance_of(recording: Sound) -> Sound:
    """What the node hears of a recording: the same, however it is cut into pieces."""
    (utterance,) = utterances_in(recording, VoiceActivity(), UtteranceSettings())
    return utterance.sound


def test_the_summary_has_the_keys_of_a_typed_demo_and_what_was_understood(spoken):
    assert set(spoken["summary"]) == {
        *("lora", "episodes", "successes", "collisions", "timeouts", "understood", "simulated_seconds"),
        *("plans", "mean_plan_seconds", "median_plan_seconds", "p99_plan_seconds"),
        *("median_first_words_seconds", "median_part_seconds"),
        *("clipped_actions", "mean_speed", "least_clearance", "failed", "drives", "pictures"),
    }
    assert spoken["summary"]["understood"] == 0  # by a model that never learned


def test_the_time_of_a_plan_splits_into_parts(spoken):
    parts = spoken["summary"]["median_part_seconds"]
    assert list(parts) == ["vision", "audio", "prefill", "decode", "action", "node", "topics"]
    assert all(seconds >= 0 for seconds in parts.values())
    assert min(parts["vision"], parts["prefill"], parts["node"], parts["topics"]) > 0
    assert max(parts.values()) < spoken["summary"]["p99_plan_seconds"]


def test_what_was_said_is_told_with_who_said_it(spoken):
    said = re.findall(r"person: (.*)\n\s+\(spoken by (.*)\)\n", spoken["stderr"])
    person = str(person_of(EPISODE))
    assert said == [("what do you see?", person), (make_episode(EPISODE).command.text, person)]


def test_the_spoken_command_lies_beside_the_picture(spoken):
    with wave.open(str(spoken["out"] / "episode_000.wav")) as wav:
        assert (wav.getframerate(), wav.getnchannels(), wav.getsampwidth()) == (16000, 1, 2)
        samples = np.frombuffer(wav.readframes(wav.getnframes()), "<i2")
    recording = person_of(EPISODE).say(make_episode(EPISODE).command.text)
    assert np.array_equal(samples / np.float32(32768), recording.samples)


def test_what_one_hears_in_the_episode_begins_with_the_command(spoken):
    with wave.open(str(spoken["out"] / "episode_000.wav")) as wav:
        command = wav.readframes(wav.getnframes())
    with wave.open(str(spoken["out"] / "episode_000_sound.wav")) as wav:
        heard = wav.readframes(wav.getnframes())
    assert heard[: len(command)] == command
    assert len(heard) >= len(command) + 2 * 16000 * spoken["summary"]["simulated_seconds"]


def test_over_topics_the_robot_hears_and_answers_exactly_as_in_process(spoken):
    world = World(make_episode(EPISODE))
    sound = utterance_of(person_of(EPISODE).say(world.episode.command.text))
    answers = []
    with LLMInferenceRuntime(spoken["out"] / "engine", drafting="off") as runtime:

        def think(frame):
            request = LLMGenerationRequest(
                "", images=(frame,), audio=(sound,), action_samples=1, noise_seed=world.episode.seed,
            )  # fmt: skip
            response = runtime.handle_request(request)
            answers.append(response.text)
            return Plan(response.text, None if response.actions is None else response.actions[0])

        driven = drive(world, think)
    assert spoken["summary"]["plans"] == len(driven.plans)
    told = spoken["stderr"].split("robot: ")[2:]  # after the answer to the question
    assert len(told) == len(answers)
    for heard, answer in zip(told, answers, strict=True):
        assert heard.startswith(answer)


def test_a_model_that_cannot_hear_is_not_spoken_to(tmp_path):
    from fixtures.tiny_checkpoint import write_tiny_checkpoint

    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint", audio_weights=False)
    done = demo(checkpoint, tmp_path, "--spoken")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        f"edgellm demo: error: {checkpoint} has no audio encoder: leave --spoken out, or name a checkpoint "
        "with one or a --speech-engine"
    )


def test_words_that_a_speech_engine_is_not_sure_of_move_no_robot(tiny_checkpoint, tmp_path):
    from edgellm_ros.builder import export
    from fixtures.qwen3_asr_checkpoint import ORIGINAL, write_qwen3_asr

    export(write_qwen3_asr(tmp_path / "speech", ORIGINAL), tmp_path / "ears")
    done = demo(tiny_checkpoint, tmp_path, "--spoken", "--speech-engine", str(tmp_path / "ears"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["plans"] == 0
    log = (tmp_path / "edgellm_node.log").read_text()
    assert log.count("~/audio: not obeyed: ") == 6  # the question and the command, each said three times


def test_a_recording_of_16_bits_survives_a_file(tmp_path):
    sound = person_of(0).say("stop")
    save_wav(tmp_path / "sound.wav", sound)
    with wave.open(str(tmp_path / "sound.wav")) as wav:
        samples = np.frombuffer(wav.readframes(wav.getnframes()), "<i2")
    assert np.array_equal(samples / np.float32(32768), sound.samples)


def test_a_command_that_is_never_heard_leaves_the_robot_where_it_is(tiny_checkpoint, tmp_path):
    """The node hears only sounds with two seconds of speech; this command is shorter."""
    from edgellm_ros.ros.processes import NODE_MODULE, Child, own_domain, ros_arguments, ros_environment

    subprocess.run(
        [sys.executable, "-m", "edgellm_ros", "export", tiny_checkpoint, tmp_path / "engine"], check=True
    )
    node = {
        "engine_dir": str(tmp_path / "engine"), "autostart": True, "use_sim_time": True, "plan_on": "image",
        "utterance.min_speech": 2.0,
    }  # fmt: skip
    arena = {"seed": SEED, "spoken": True, "events": True, "out": str(tmp_path)}
    with own_domain() as domain:
        environment = ros_environment(domain)
        children = [
            Child("node", ["-m", NODE_MODULE, *ros_arguments(node)], tmp_path / "node.log", environment)
        ]
        arguments = ["-m", "edgellm_arena.ros.main", *ros_arguments(arena)]
        children.append(Child("arena", arguments, tmp_path / "arena.log", environment, pipe=True))
        try:
            events = [json.loads(line) for line in children[1].stdout]
        finally:
            for child in children:
                child.stop()
    assert [event["event"] for event in events] == ["command"] * 3 + ["outcome"]
    assert (events[-1]["outcome"], events[-1]["plans"], events[-1]["understood"]) == ("timeout", 0, False)
    assert (tmp_path / "episode_000.wav").exists()
    assert summarise(events[-1:], spoken=True)["mean_plan_seconds"] == 0
