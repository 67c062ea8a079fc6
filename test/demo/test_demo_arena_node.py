# SPDX-License-Identifier: Apache-2.0
"""The arena's node with an edgellm node that is absent or does not do its part."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

pytest.importorskip("rclpy")
pytest.importorskip("edgellm_ros.msg")

from edgellm_ros.msg import ActionChunk

from edgellm_arena.episodes.episode import EPISODE_FAMILIES, EPISODE_SEEDS
from edgellm_arena.ros.arena_link import to_actions, to_image
from edgellm_arena.ros.arena_node import EXECUTIONS as NODE_EXECUTIONS
from edgellm_arena.ros.demo import (
    ARENA_MODULE,
    NODE_MODULE,
    DemoOptions,
    arena_arguments,
    node_arguments,
    resolved,
)
from edgellm_arena.ros.microphone import Microphone
from edgellm_ros.cli.arena_options import FAMILIES
from edgellm_ros.cli.demo import CHUNKING, EPISODES_PER_SEED, EXECUTIONS
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.ros.messaging import to_nanoseconds, to_time
from edgellm_ros.ros.node.settings.parameters import SPECS
from edgellm_ros.ros.processes import Child, own_domain, ros_environment
from edgellm_ros.ros.world_link import LinkError


def ros_args(**parameters) -> list[str]:
    return ["--ros-args", *(word for k, v in parameters.items() for word in ("-p", f"{k}:={json.dumps(v)}"))]


@pytest.fixture
def environment():
    with own_domain() as domain:
        yield ros_environment(domain)


@pytest.fixture
def start(tmp_path, environment):
    children = []

    def starter(module: str, **parameters) -> Child:
        log = tmp_path / f"{module}.log"
        children.append(Child(module, ["-m", module, *ros_args(**parameters)], log, environment))
        return children[-1]

    yield starter
    for child in children:
        child.stop()


def wait_until_idle(pid: int, seconds: float = 60.0) -> None:
    """Wait until a process has loaded rclpy and is idle.

    Idle means that it uses less than a tenth of a processor for a second.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        loaded, before = "rclpy" in Path(f"/proc/{pid}/maps").read_text(), processor_seconds(pid)
        time.sleep(1.0)
        if loaded and processor_seconds(pid) - before < 0.1:
            return
    raise TimeoutError(f"process {pid} was busy for {seconds:g} s")


def processor_seconds(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@pytest.mark.real_time
def test_it_says_that_no_edgellm_node_is_there(start):
    arena = start(ARENA_MODULE, active_timeout=1.0)
    assert arena.process.wait(20) == 1
    assert "/edgellm is not there after 1 s" in arena.log_tail()


@pytest.mark.real_time
def test_it_says_that_the_edgellm_node_is_not_active(start):
    start(NODE_MODULE)
    arena = start(ARENA_MODULE, active_timeout=6.0)
    assert arena.process.wait(30) == 1
    assert "/edgellm is unconfigured after 6 s" in arena.log_tail()


@pytest.mark.real_time
def test_it_gives_up_on_a_frame_that_is_never_answered(start, arena_engine):
    # On "command" the node plans once, and not on the frames that follow.
    start(NODE_MODULE, engine_dir=str(arena_engine), autostart=True, use_sim_time=True, plan_on="command")
    arena = start(ARENA_MODULE, resend_after=1.5, attempts=2)
    assert arena.process.wait(60) == 1
    assert "no answer from /edgellm to the frame of" in arena.log_tail()
    assert "sent 2 times" in arena.log_tail()


@pytest.mark.real_time
@pytest.mark.parametrize("pause_s", [0.01, 0.02, 0.04])
def test_signals_in_a_row_end_it_with_exit_code_0(start, pause_s):
    """A terminal signals the whole group, a supervisor its child once more."""
    arena = start(ARENA_MODULE, active_timeout=120.0)
    wait_until_idle(arena.process.pid)  # it waits for the edgellm node
    for _ in range(3):
        arena.process.send_signal(signal.SIGINT)
        time.sleep(pause_s)
    assert arena.process.wait(10) == 0
    assert arena.log.read_text() == ""


@pytest.mark.real_time
def test_a_parameter_out_of_range_is_refused(start):
    arena = start(ARENA_MODULE, replan_steps=0)
    assert arena.process.wait(20) != 0
    assert "replan_steps" in arena.log_tail(40)


@pytest.mark.real_time
def test_episodes_that_a_seed_does_not_have_are_refused(start):
    arena = start(ARENA_MODULE, first_episode=990, episodes=11)
    assert arena.process.wait(20) == 1
    assert "first_episode 990 and episodes 11: expected a sum of at most 1000" in arena.log_tail()


@pytest.mark.real_time
def test_a_delay_that_the_node_would_not_see_is_refused(start):
    arena = start(ARENA_MODULE, execution="lock_step", inference_delay=0.5)
    assert arena.process.wait(20) == 1
    assert "inference_delay needs execution async or wait, not lock_step" in arena.log_tail()


class TestArguments:
    def words(self, **fields) -> tuple[list[str], list[str]]:
        options = DemoOptions(1, 1, Path("out"), Path("engine"), Path("checkpoint"), "cpu", 1, **fields)
        return node_arguments(options), arena_arguments(options)

    def test_the_node_takes_frames_that_are_as_late_as_the_delay(self):
        node, arena = self.words(inference_delay=2.5)
        assert "max_input_age:=3.5" in node
        assert "inference_delay:=2.5" in arena

    def test_chunks_are_continued_in_a_drive_with_late_plans(self):
        node, arena = self.words(chunking="frozen")
        assert 'chunking:="frozen"' in node
        assert 'execution:="async"' in arena

    def test_the_follower_keeps_its_own_execution_with_chunking(self):
        node, arena = self.words(chunking="frozen", follower=True)
        assert 'chunking:="frozen"' in node
        assert 'execution:="auto"' in arena

    def test_a_speech_engine_is_told_to_both_nodes(self):
        node, arena = self.words(spoken=True, speech_engine=Path("/engines/speech"))
        assert 'speech_engine_dir:="/engines/speech"' in node
        assert "transcribed:=true" in arena
        node, arena = self.words(spoken=True)
        assert not any("speech_engine_dir" in word for word in node)
        assert "transcribed:=false" in arena

    @pytest.mark.parametrize(
        ("learned", "fields", "expected"),
        [
            (16, {"inference_delay": 0.8}, "trained"),
            (16, {"inference_delay": 0.8, "execution": "async"}, "trained"),
            (16, {"inference_delay": 0.8, "execution": "wait"}, "off"),
            (16, {}, "off"),
            (0, {"inference_delay": 0.8}, "off"),
        ],
    )
    def test_chunking_auto_continues_chunks_while_plans_take_time(self, learned, fields, expected):
        config = SimpleNamespace(action=SimpleNamespace(rtc_max_delay=learned))
        options = DemoOptions(
            1, 1, Path("out"), Path("engine"), Path("checkpoint"), "cpu", 1, chunking="auto", **fields
        )
        assert resolved(options, config).chunking == expected

    def test_chunking_that_is_named_stays(self):
        folders = Path("out"), Path("engine"), Path("checkpoint")
        options = DemoOptions(1, 1, *folders, "cpu", 1, chunking="guided")
        assert resolved(options, SimpleNamespace(action=None)) is options

    def test_the_command_has_the_forms_executions_and_seeds_that_the_nodes_have(self):
        assert SPECS["chunking"].choices == CHUNKING
        assert EXECUTIONS == NODE_EXECUTIONS
        assert FAMILIES == EPISODE_FAMILIES
        assert EPISODES_PER_SEED == EPISODE_SEEDS


class CountingLink:
    """A node whose counters have the values of a script, one for each call."""

    node_name = "edgellm"

    def __init__(self, *script: dict[str, float]):
        self.script, self.needed = list(script), []

    def create_publisher(self, *_) -> SimpleNamespace:
        return SimpleNamespace(publish=lambda message: None)

    def create_client(self, *_) -> None:
        return None

    def call(self, *_) -> SimpleNamespace:
        counts = self.script.pop(0)
        return SimpleNamespace(names=list(counts), values=list(counts.values()))

    def spin_until(self, *_) -> None:
        return None


class TestMicrophone:
    SOUND = Sound(np.zeros(4800, np.float32), 16000)  # three pieces, and the end
    BEFORE: ClassVar = {"audio_received": 7.0, "utterances": 2.0, "transcripts_obeyed": 2.0}
    RECEIVED: ClassVar = {**BEFORE, "audio_received": 11.0, "utterances": 3.0}

    def test_without_a_speech_engine_an_utterance_is_heard(self):
        link = CountingLink(self.BEFORE, {**self.BEFORE, "audio_received": 10.0}, self.RECEIVED)
        assert Microphone(link).record(self.SOUND, lambda: 0) == 1
        assert not link.script

    @pytest.mark.parametrize(
        ("counter", "heard"),
        [("transcripts_obeyed", 1), ("transcripts_refused", 0), ("transcripts_failed", 0)],
    )
    def test_with_a_speech_engine_its_transcript_is_awaited(self, counter, heard):
        ended = {**self.RECEIVED, counter: self.RECEIVED.get(counter, 0.0) + 1}
        link = CountingLink(self.BEFORE, self.RECEIVED, self.RECEIVED, self.RECEIVED, ended)
        assert Microphone(link, transcribed=True).record(self.SOUND, lambda: 0) == heard
        assert not link.script


class TestMessages:
    def chunk(self, **changes) -> ActionChunk:
        chunk = ActionChunk(
            dt=0.1, horizon=2, names=["curvature", "acceleration"], values=[1.0, 2.0, 3.0, 4.0]
        )
        for name, value in changes.items():
            setattr(chunk, name, value)
        return chunk

    def test_columns_are_found_by_name(self):
        assert np.array_equal(to_actions(self.chunk()), [[2, 1], [4, 3]])

    @pytest.mark.parametrize(
        "changes, word",
        [
            ({"names": ["steering", "acceleration"]}, "steering"),
            ({"dt": 0.2}, "0.2"),
            ({"horizon": 3}, "4 values for 3 x 2"),
            ({"values": [1.0, 2.0, 3.0, float("nan")]}, "not finite"),
        ],
    )
    def test_a_chunk_for_another_robot_is_refused(self, changes, word):
        with pytest.raises(LinkError, match=word):
            to_actions(self.chunk(**changes))

    def test_stamps_are_exact(self):
        assert to_nanoseconds(to_time(12_345_678_901)) == 12_345_678_901

    def test_an_image_carries_its_pixels_and_its_time(self):
        frame = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
        message = to_image(1_500_000_000, frame)
        assert (message.height, message.width, message.step, message.encoding) == (2, 3, 9, "rgb8")
        assert bytes(message.data) == frame.tobytes()
        assert to_nanoseconds(message.header.stamp) == 1_500_000_000
