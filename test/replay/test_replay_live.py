# SPDX-License-Identifier: Apache-2.0
"""`edgellm replay` as people run it: the command, the node's process, real topics."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir
import pytest
from safetensors.numpy import load_file, save_file

from edgellm_ros.builder import export
from edgellm_ros.builder.export_cache import ARENA_CHECKPOINT
from edgellm_ros.replay.bag import Bag, BagMessage
from edgellm_ros.replay.inputs import COMPRESSED
from fixtures.made_bags import ARENA, EXPECTED, copy_bag, make, string, write_bag
from fixtures.process_state import assert_gone
from fixtures.replay_run import ReplayRun, finish, start
from fixtures.tiny_adapter import write_adapter

pytest.importorskip("rclpy")
pytest.importorskip("edgellm_ros.msg")
pytestmark = [pytest.mark.real_time, pytest.mark.timeout(600)]

FRAMES = (14_500_000_000, 15_300_000_000)  # the stamps of the short bag's frames


@pytest.fixture(scope="module")
def expected(short, arena_engine, tmp_path_factory) -> Path:
    """What the node makes of it."""
    out = tmp_path_factory.mktemp("expected") / "bag"
    run = finish(start(short, "--out", out, "--engine", arena_engine))
    assert run.code == 0, run.err
    return out


def files(bag: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in bag.iterdir()}


def stamps(bag: Path, topic: str) -> list[int]:
    with Bag(bag) as opened:
        return [message.time for message in opened.messages([topic])]


@pytest.fixture
def busy_computer() -> Iterator[None]:
    """Twice as many processes that only compute as there are cores."""
    burners = [multiprocessing.get_context("fork").Process(target=burn) for _ in range(2 * os.cpu_count())]
    for burner in burners:
        burner.start()
    yield
    for burner in burners:
        burner.kill()
        burner.join()


def burn() -> None:
    while True:
        pass


class TestShippedBag:
    def test_gives_the_outputs_that_are_shipped_with_it(self, replay):
        """After a change of the demo's checkpoint, `make expected` makes them again."""
        run = replay(ARENA, "--expect", EXPECTED)
        assert run.code == 0, run.err
        assert run.json["comparison"]["first"] is None
        assert run.json["comparison"]["engine_files"] == []
        assert run.json["comparison"]["messages"] > 150
        assert run.json["became"]["plans_completed"] >= 8

    def test_is_small(self):
        sizes = [path.stat().st_size for bag in (ARENA, EXPECTED) for path in bag.iterdir()]
        assert sum(sizes) < 1.5e6


class TestDeterminism:
    def test_a_second_replay_on_a_busy_computer_gives_the_same_files(
        self, replay, short, expected, busy_computer, tmp_path
    ):
        assert replay(short, "--expect", expected).code == 0
        assert files(tmp_path / "out") == files(expected)

    def test_another_storage_and_other_topics_give_the_same_files(self, replay, short, expected, tmp_path):
        names = {"/edgellm/image": "/camera/image_raw", "/edgellm/odom": "/odom"}
        other = copy_bag(tmp_path / "bag", rename=names, storage="SQLITE3", source=short)
        remappings = ("--remap", "/camera/image_raw:=~/image", "--remap", "/odom:=~/odom")
        run = replay(other, *remappings)
        assert run.code == 0
        assert "deprecated" not in run.err  # rcl takes FROM:=TO for a rule of its own, if it sees it
        assert files(tmp_path / "out") == files(expected)


class TestDifferences:
    def test_another_noise_seed(self, replay, short, expected):
        run = replay(short, "--expect", expected, "--noise-seed", 5)
        assert run.code == 1
        assert run.first == {
            "topic": "~/action_chunk", "stamp": FRAMES[0], "field": "noise_seed", "expected": "0", "got": "5",
        }  # fmt: skip
        assert "  topic     ~/action_chunk\n  stamp     14.500000000\n" in run.err

    def test_an_altered_weight(self, replay, short, expected, arena_engine, tmp_path):
        engine = Path(shutil.copytree(arena_engine, tmp_path / "engine"))
        model = onnx_ir.load(engine / "action" / "model.onnx")
        weight = model.graph.initializers["out_proj.weight"].const_value
        data = np.memmap(engine / "action" / "model.onnx.data", np.float32, "r+", weight.offset, weight.shape)
        data[0, 0] += 1
        data.flush()
        run = replay(short, "--expect", expected, "--engine", engine)
        assert run.code == 1
        first = run.first
        assert (first["topic"], first["stamp"]) == ("~/action_chunk", FRAMES[0])
        assert first["field"].startswith("values[")
        assert run.json["comparison"]["engine_files"] == ["action/model.onnx.data"]

    def test_a_dropped_frame(self, replay, short, expected, tmp_path):
        def others(message: BagMessage) -> bool:
            return not (message.topic.name == "/edgellm/image" and message.time == FRAMES[1])

        run = replay(copy_bag(tmp_path / "bag", keep=others, source=short), "--expect", expected)
        assert run.code == 1
        assert (run.first["topic"], run.first["stamp"]) == ("~/image", FRAMES[1])
        assert run.first["got"] == "nothing"
        assert run.json["became"]["plans_completed"] == 2  # the command was answered to the frame before


class TestNode:
    def test_parameters_come_from_a_file_and_a_replay_keeps_its_own(self, replay, short, tmp_path):
        """On "image", the first frame's command stands: the second command is no news."""
        params = tmp_path / "params.yaml"
        values = "plan_on: image, action_samples: 3, plan_timeout: 0.01, use_sim_time: false"
        values += f", prefix_cache_file: {tmp_path / 'prefixes'}"
        params.write_text(f"edgellm: {{ros__parameters: {{{values}}}}}")
        run = replay(short, "--params", params)
        assert run.code == 0, run.err
        assert stamps(tmp_path / "out", "/edgellm/generation") == list(FRAMES)
        assert stamps(tmp_path / "out", "/edgellm/path") == [FRAMES[0]] * 3 + [FRAMES[1]] * 3
        assert not (tmp_path / "prefixes").exists()

    @pytest.mark.parametrize(
        ("content", "drafting"),
        [
            (None, "off"),
            ("edgellm: {ros__parameters: {plan_on: image}}", "off"),
            ("/robot/edgellm: {ros__parameters: {drafting: auto}}", None),
        ],
    )
    def test_nothing_is_drafted_unless_a_file_of_parameters_says_so(
        self, short, arena_engine, tmp_path, content, drafting
    ):
        from edgellm_ros.ros.replay.replay import Replay, ReplayOptions

        params = tmp_path / "params.yaml"
        params.write_text(content or "")
        options = ReplayOptions(
            short, tmp_path / "out", arena_engine, "cpu", {}, params=params if content else None
        )
        with Replay(options) as replay:
            assert replay.start_parameters.get("drafting") == drafting

    def test_a_frame_that_cannot_be_planned_on_is_recorded_as_such(self, replay, short, expected, tmp_path):
        messages = []
        with Bag(short) as bag:
            for m in bag.messages(list(bag.topics)):
                content = m.data
                if m.topic.name == "/edgellm/image" and m.time == FRAMES[0]:
                    frame = m.decode()
                    content = make(COMPRESSED, header=frame.header, format="jpeg", data=frame.data[:5000])
                messages.append((m.topic.name, m.topic.type, m.time, content))
        run = replay(write_bag(tmp_path / "bag", messages), "--expect", expected)
        assert run.code == 1
        assert run.json["became"] == {"plans_completed": 1, "plans_error": 1}
        assert (run.first["topic"], run.first["field"]) == ("~/image", "sha256")

    def test_frames_that_are_older_than_the_bag_says_are_refused_by_the_bags_clock(
        self, replay, short, tmp_path
    ):
        """The command comes 1.5 s after the last frame: stale, however fast it is played."""
        with Bag(short) as bag:
            messages = [(m.topic.name, m.topic.type, m.time, m.data) for m in bag.messages(list(bag.topics))]
        messages = [m for m in messages if m[0] != "/edgellm/command"]
        messages.append(("/edgellm/command", "std_msgs/msg/String", FRAMES[1] + 1_500_000_000, string("go")))
        run = replay(write_bag(tmp_path / "bag", messages))
        assert run.code == 0, run.err
        assert run.json["became"] == {"plans_stale_input": 1}

    def test_a_robot_without_odometry(self, replay, short, tmp_path):
        bag = copy_bag(tmp_path / "bag", keep=lambda m: m.topic.name != "/edgellm/odom", source=short)
        run = replay(bag, "--no-odometry", "--overlay", "--storage", "sqlite3")
        assert run.code == 0, run.err
        assert run.json["inputs"] == {"image": 3, "command": 2}
        assert run.json["outputs"]["overlay"] == 2


def test_what_is_said_in_the_bag_is_heard_and_answered(replay, tiny_engine, tmp_path):
    """By a model that hears, with random weights."""
    bag = copy_bag(tmp_path / "bag", keep=lambda message: message.topic.name != "/edgellm/command")
    run = replay(bag, "--engine", tiny_engine)
    assert run.code == 0, run.err
    assert run.json["became"] == {"plans_completed": 1, "utterances": 1}
    with Bag(tmp_path / "out") as out:
        (heard,) = (m.decode() for m in out.messages(["/edgellm/utterance"]))
        (answer,) = (m.decode() for m in out.messages(["/edgellm/generation"]))
    assert heard.encoding == "F32LE"
    assert 1.0 < heard.data.nbytes / 4 / heard.sample_rate < 4.0
    assert answer.request_id == "utterance-1"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    """With random weights."""
    directory = tmp_path_factory.mktemp("adapter") / "wild"
    return write_adapter(directory, ARENA_CHECKPOINT, seed=0, strength=0.8)


@pytest.fixture(scope="module")
def lora_engine(adapter, tmp_path_factory) -> Path:
    """The demo's, with the adapter in its folder."""
    engine = tmp_path_factory.mktemp("engine")
    export(ARENA_CHECKPOINT, engine, max_lora_rank=8)
    shutil.copytree(adapter, engine / "lora" / "wild")
    return engine


@pytest.fixture(scope="module")
def adapted(short, lora_engine, adapter, tmp_path_factory) -> Path:
    """What the adapter answers, recorded when it lay elsewhere."""
    out, bare = tmp_path_factory.mktemp("adapted") / "bag", tmp_path_factory.mktemp("bare") / "engine"
    shutil.copytree(lora_engine, bare, ignore=shutil.ignore_patterns("lora"))
    run = finish(start(short, "--out", out, "--engine", bare, "--lora", f"wild={adapter}"))
    assert run.code == 0, run.err
    return out


class TestAdapter:
    FILES = ("lora/wild/adapter_config.json", "lora/wild/adapter_model.safetensors")

    def test_it_answers_the_same_wherever_it_lies(self, replay, short, lora_engine, adapted, tmp_path):
        run = replay(short, "--engine", lora_engine, "--lora", "wild", "--expect", adapted)
        assert run.code == 0, run.err
        assert files(tmp_path / "out") == files(adapted)
        with Bag(adapted) as out:
            assert {m.decode().lora for m in out.messages(["/edgellm/generation"])} == {"wild"}

    def test_one_that_was_altered_is_named(self, replay, short, lora_engine, adapted, tmp_path):
        altered = Path(shutil.copytree(lora_engine, tmp_path / "engine"))
        path = altered / self.FILES[1]
        save_file({name: 2 * values for name, values in load_file(path).items()}, path)
        run = replay(short, "--engine", altered, "--lora", "wild", "--expect", adapted)
        assert run.code == 1
        assert run.first["topic"] == "~/generation"
        assert run.json["comparison"]["engine_files"] == [self.FILES[1]]
        assert f"the engine differs from that of {adapted}: {self.FILES[1]}\n" in run.err

    def test_one_that_does_not_answer_any_more_is_named(self, replay, short, lora_engine, adapted, tmp_path):
        params = tmp_path / "params.yaml"
        params.write_text("edgellm: {ros__parameters: {lora: wild}}")
        run = replay(
            short, "--engine", lora_engine, "--params", params, "--lora", "base", "--expect", adapted
        )
        assert run.code == 1
        assert run.json["comparison"]["engine_files"] == list(self.FILES)
        with Bag(tmp_path / "out") as out:
            assert {m.decode().lora for m in out.messages(["/edgellm/generation"])} == {""}


class TestRefusedByTheNode:
    """Exit code 2, one line, no output bag.

    test/cli/test_cli_replay.py tests what is found without the node.
    """

    def assert_refused(self, run: ReplayRun, words: str, out: Path) -> None:
        assert run.code == 2, run.err
        assert len(run.err.splitlines()) == 1, run.err
        assert run.err.startswith("edgellm replay: error: ")
        assert words in run.err
        assert not out.exists()

    def test_a_value_in_the_parameters_file(self, replay, short, tmp_path):
        params = tmp_path / "params.yaml"
        params.write_text("/**: {ros__parameters: {plan_on: whistle}}")
        run = replay(short, "--params", params)
        self.assert_refused(run, "plan_on must be one of command, image, got 'whistle'", tmp_path / "out")

    @pytest.mark.parametrize(
        "lora, words", [("pirate", "'pirate'"), ("pirate=/nowhere", "has no LoRA inputs")]
    )
    def test_an_adapter_that_is_not_there(self, replay, short, tiny_engine, tmp_path, lora, words):
        run = replay(short, "--engine", tiny_engine, "--lora", lora)
        self.assert_refused(run, words, tmp_path / "out")


def test_ctrl_c_ends_everything_and_leaves_nothing(arena_engine, tmp_path):
    process = start(ARENA, "--out", tmp_path / "out", "--engine", arena_engine)
    for line in process.stderr:
        if line.startswith("playing"):
            break
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 1
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    run = finish(process)
    assert run.code == 130
    assert "Traceback" not in run.err
    assert_gone(children)
    assert list(tmp_path.iterdir()) == []


class TestAttached:
    """With a node that runs already, as launch/replay.launch.py starts both."""

    def test_the_outputs_are_the_same(self, run_beside, expected, tmp_path):
        run = run_beside()
        assert run.code == 0, run.err
        assert files(tmp_path / "out") == files(expected)

    def test_remappings_of_the_bag_are_none_of_ros(self, run_beside, expected, tmp_path):
        run = run_beside("--remap", "/edgellm/image:=~/image")
        assert run.code == 0, run.err
        assert "deprecated" not in run.err
        assert files(tmp_path / "out") == files(expected)

    def test_the_noise_seed_is_set_whatever_the_node_was_started_with(self, run_beside, tmp_path):
        run = run_beside("--noise-seed", 5, noise_seed=3)
        assert run.code == 0, run.err
        with Bag(tmp_path / "out") as out:
            assert {m.decode().noise_seed for m in out.messages(["/edgellm/action_chunk"])} == {5}

    def test_a_node_whose_active_adapter_is_another_is_refused(self, run_beside):
        run = run_beside("--lora", "wild")
        assert run.code == 3
        assert "the node's active adapter is '', expected 'wild' for this replay" in run.err

    def test_a_node_with_other_parameters_is_refused(self, run_beside):
        run = run_beside(plan_timeout=10.0)
        assert run.code == 3
        assert "the node's parameter plan_timeout is 10.0, expected 3600.0" in run.err
