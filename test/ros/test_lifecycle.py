# SPDX-License-Identifier: Apache-2.0
"""The node's states: broken engines, activation, parameters, end of the process."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import cv2
import pytest
from edgellm_ros.action import Plan
from lifecycle_msgs.srv import GetAvailableTransitions
from rcl_interfaces.srv import DescribeParameters, ListParameters
from sensor_msgs.msg import CompressedImage

from fixtures import on_device
from fixtures.peer import RobotPeer, image_message

R = Plan.Result


@pytest.fixture(scope="module")
def manual_node(start_node, peer):
    """A node that waits for its transitions."""
    child = start_node()
    assert peer.state() == "unconfigured"
    return child


@pytest.fixture
def unconfigured(manual_node, peer):
    if peer.state() == "active":
        assert peer.transition("deactivate")
    if peer.state() == "inactive":
        assert peer.transition("cleanup")
    assert peer.state() == "unconfigured"


@pytest.fixture
def active(unconfigured, peer, arena_engine):
    peer.set_parameter("engine_dir", str(arena_engine))
    assert peer.transition("configure")
    assert peer.transition("activate")
    peer.connect()


@pytest.fixture
def active_with_room(unconfigured, peer, arena_engine):
    """An active node in which 20 goals can wait."""
    peer.set_parameter("engine_dir", str(arena_engine))
    assert peer.set_parameter("queue_size", 20).successful
    assert peer.transition("configure")
    assert peer.transition("activate")
    peer.connect()
    yield
    assert peer.set_parameter("queue_size", 4).successful


@pytest.fixture
def goal(scene):
    return Plan.Goal(prompt=scene.command, images=[image_message(scene.pixels)])


def remove_weights(directory):
    (directory / "llm" / "model.onnx").unlink()


def truncate_weights(directory):
    path = directory / "embedding.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def rename_key(directory):
    config = json.loads((directory / "config.json").read_text())
    config["lmm"] = config.pop("llm")
    (directory / "config.json").write_text(json.dumps(config))


def remove_directory(directory):
    shutil.rmtree(directory)


BAD_ENGINES = {
    "missing file": (remove_weights, "llm/model.onnx is missing"),
    "truncated weights": (truncate_weights, "embedding.safetensors has 1000 bytes, expected"),
    "wrong key": (rename_key, "unknown key 'lmm', missing key 'llm'"),
    "missing directory": (remove_directory, "is not an engine directory"),
}


class TestConfigure:
    @pytest.mark.parametrize("name", BAD_ENGINES)
    def test_bad_engine_directory_is_named_and_a_good_one_works_afterwards(
        self, unconfigured, manual_node, peer, arena_engine, tmp_path, name
    ):
        spoil, message = BAD_ENGINES[name]
        spoil(shutil.copytree(arena_engine, tmp_path / "engine"))
        peer.set_parameter("engine_dir", str(tmp_path / "engine"))
        assert not peer.transition("configure")
        assert peer.state() == "unconfigured"
        assert message in manual_node.log.read_text()
        status = peer.wait(lambda: message in (s := peer.status("engine")).message and s, "diagnostics")
        assert status.message.startswith("cannot load the engines: ")
        peer.set_parameter("engine_dir", str(arena_engine))
        assert peer.transition("configure")

    def test_without_an_engine_directory_says_what_to_do(self, unconfigured, manual_node, peer):
        peer.set_parameter("engine_dir", "")
        assert not peer.transition("configure")
        assert "parameter engine_dir is empty" in manual_node.log.read_text()

    @pytest.mark.only_on("cpu", reason="where a GPU is, the plans are what is missing")
    def test_an_unavailable_device_is_named(self, unconfigured, manual_node, peer, arena_engine):
        peer.set_parameter("engine_dir", str(arena_engine))
        peer.set_parameter("device", "tensorrt")
        assert not peer.transition("configure")
        assert "device 'tensorrt' is not available" in manual_node.log.read_text()
        peer.set_parameter("device", on_device.chosen)


def wait_for_actions(peer, calls):
    """Wait until any of the goals, which run side by side, samples its actions."""
    peer.wait(lambda: any("action" in call.stages for call in calls), "feedback from the stage 'action'")


class TestStates:
    def test_a_goal_sent_while_inactive_ends_in_an_error_that_says_so(self, active, peer, goal):
        assert peer.plan(goal).termination_reason == R.COMPLETED
        assert peer.transition("deactivate")
        result = peer.plan(goal)
        assert result.termination_reason == R.ERROR
        assert result.message == "the node is not active"
        assert peer.transition("activate")
        assert peer.plan(goal).termination_reason == R.COMPLETED

    def test_deactivating_ends_running_and_waiting_goals_as_preempted(self, active, peer, goal):
        goal.action_samples, goal.denoise_steps = 16, 1000
        calls = [peer.send(goal), peer.send(goal)]
        for call in calls:
            call.ask_for_result()
        wait_for_actions(peer, calls)
        assert peer.transition("deactivate")
        results = [call.result() for call in calls]
        assert [result.termination_reason for result in results] == [R.PREEMPTED] * 2
        assert results[0].message == "the node was deactivated"

    @pytest.mark.parametrize("sent", ["together", "in turn"])
    def test_cleanup_right_after_deactivate_loses_no_result(self, active_with_room, peer, goal, sent):
        goal.action_samples, goal.denoise_steps = 16, 1000
        calls = [peer.send(goal) for _ in range(20)]  # some run, the others wait
        for call in calls[::2]:
            call.ask_for_result()
        wait_for_actions(peer, calls)
        transitions = []
        for label in ("deactivate", "cleanup"):
            transitions.append(peer.ask_for_transition(label))
            if sent == "in turn":
                peer.wait(transitions[-1].done, label)
        peer.wait(lambda: all(each.done() for each in transitions), "both transitions")
        assert [each.result().success for each in transitions] == [True, True]
        results = [call.result() for call in calls]
        assert [result.termination_reason for result in results] == [R.PREEMPTED] * 20

    def test_a_goal_sent_after_cleanup_ends_in_an_error_that_says_so(self, active, peer, goal):
        assert peer.transition("deactivate")
        assert peer.transition("cleanup")
        result = peer.plan(goal)
        assert (result.termination_reason, result.message) == (R.ERROR, "the node is not active")

    def test_can_go_round_the_states_many_times(self, active, peer, goal):
        for _ in range(3):
            assert peer.transition("deactivate")
            assert peer.transition("cleanup")
            assert peer.transition("configure")
            assert peer.transition("activate")
        assert peer.plan(goal).termination_reason == R.COMPLETED

    def test_an_impossible_transition_is_answered_and_changes_nothing(self, active, peer, goal):
        assert not peer.transition("configure")
        assert not peer.transition("fly")
        assert peer.state() == "active"
        assert peer.plan(goal).termination_reason == R.COMPLETED

    def test_lists_its_transitions(self, active, peer):
        response = peer.call(GetAvailableTransitions, "get_available_transitions")
        labels = {transition.transition.label for transition in response.available_transitions}
        assert labels == {"deactivate", "shutdown"}


class TestParameters:
    def test_all_are_described_and_numbers_have_ranges(self, manual_node, peer):
        names = peer.call(ListParameters, "list_parameters").result.names
        own = [name for name in names if name != "use_sim_time" and not name.startswith("qos_overrides")]
        descriptors = peer.call(DescribeParameters, "describe_parameters", names=own).descriptors
        for descriptor in descriptors:
            assert descriptor.description, descriptor.name
            if descriptor.type in (2, 3):  # integer, double
                assert descriptor.integer_range or descriptor.floating_point_range, descriptor.name

    @pytest.mark.parametrize(
        "name, value, reason",
        [
            ("plan_on", "whistle", "plan_on must be one of command, image, got 'whistle'"),
            ("max_input_age", -1.0, "max_input_age"),
            ("max_input_age", float("nan"), "max_input_age out of range"),
            ("queue_size", -1, "queue_size"),
            ("top_p", 0.0, "top_p must be a number from 1e-30 to 1, got 0.0"),
            ("temperature", 1000000.1, "temperature must be from -1.0 to 1000000.0, got 1000000.1"),
            ("temperature", 1e-9, "temperature must be 0 or a number from 1e-06 to 1e+06, got 1e-09"),
            ("frame_id", "/base_link", "frame_id must be a TF frame: not empty, no leading '/'"),
            ("autostart", True, "autostart"),
            ("plan_timeout", 3, "expected 'Type.DOUBLE' got 'Type.INTEGER'"),
        ],
    )
    def test_a_wrong_value_is_refused_with_a_reason(self, manual_node, peer, name, value, reason):
        verdict = peer.set_parameter(name, value)
        assert not verdict.successful
        assert reason in verdict.reason

    def test_what_is_loaded_cannot_be_exchanged_while_configured(self, active, peer):
        verdict = peer.set_parameter("engine_dir", "/elsewhere")
        assert not verdict.successful
        assert (
            verdict.reason == "engine_dir can only be set while the node is unconfigured: clean it up first"
        )

    def test_frame_id_takes_effect_at_once(self, active, peer, goal):
        assert peer.set_parameter("frame_id", "torso").successful
        assert peer.plan(goal).action_chunks[0].header.frame_id == "torso"
        assert peer.set_parameter("frame_id", "base_link").successful


class TestImageTransport:
    @pytest.mark.parametrize("extension", ["png", "jpeg"])
    def test_compressed_frames_are_planned_on(
        self, unconfigured, peer, domain, arena_engine, scene, extension
    ):
        peer.set_parameter("engine_dir", str(arena_engine))
        peer.set_parameter("image_transport", "compressed")
        camera = RobotPeer(domain, image_type=CompressedImage)
        assert peer.transition("configure")
        assert peer.transition("activate")
        camera.connect()
        data = cv2.imencode(f".{extension}", scene.pixels[..., ::-1])[1].tobytes()
        camera.compressed_frame(data, extension)
        camera.command(scene.command)
        camera.wait(lambda: camera.received["generation"], "plan")
        camera.close()
        assert peer.transition("deactivate")
        assert peer.transition("cleanup")
        peer.set_parameter("image_transport", "raw")


def catches(status: str, number: int) -> bool:
    """Return whether a process handles a signal itself, by its /proc/PID/status."""
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(mask, 16) >> (number - 1) & 1)


class TestEnd:
    @pytest.mark.parametrize(
        "numbers",
        [
            [signal.SIGINT],
            [signal.SIGTERM],
            [signal.SIGINT, signal.SIGINT],  # a terminal's to the group, and a supervisor's to its child
            [signal.SIGINT, signal.SIGTERM, signal.SIGINT],
        ],
    )
    def test_signals_end_the_process_with_exit_code_0_and_goals_get_their_results(
        self, start_node, domain, peer, manual_node, arena_engine, goal, numbers
    ):
        manual_node.stop()
        child = start_node(engine_dir=arena_engine, autostart="true")
        peer.connect()
        goal.action_samples, goal.denoise_steps = 16, 1000
        call = peer.send(goal)
        call.ask_for_result()
        call.wait_for_stage("action")
        for number in numbers:
            child.process.send_signal(number)
            time.sleep(0.1)
        result = call.result()
        assert result.termination_reason == R.PREEMPTED
        assert child.process.wait(10) == 0
        log = child.log.read_text()
        assert "Traceback" not in log
        assert "terminate" not in log

    def test_a_result_can_be_asked_for_shortly_after_deactivation_and_signal(
        self, start_node, peer, manual_node, arena_engine, goal
    ):
        manual_node.stop()
        child = start_node(engine_dir=arena_engine, autostart="true")
        peer.connect()
        goal.action_samples, goal.denoise_steps = 16, 1000
        call = peer.send(goal)
        call.wait_for_stage("action")
        assert peer.transition("deactivate")
        child.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert call.result().termination_reason == R.PREEMPTED
        assert child.process.wait(10) == 0

    def test_a_signal_while_the_engines_load_ends_the_process_with_exit_code_0(
        self, start_node, arena_engine
    ):
        child = start_node(engine_dir=arena_engine, autostart="true")
        signals = Path(f"/proc/{child.process.pid}/status")
        deadline = time.monotonic() + 30
        while not catches(signals.read_text(), signal.SIGTERM) and time.monotonic() < deadline:
            time.sleep(0.01)
        child.process.send_signal(signal.SIGINT)
        assert child.process.wait(30) == 0
        assert "Traceback" not in child.log.read_text()

    def test_the_shutdown_transition_gives_goals_their_results(self, start_node, peer, arena_engine, goal):
        child = start_node(engine_dir=arena_engine, autostart="true")
        peer.connect()
        goal.action_samples, goal.denoise_steps = 16, 1000
        call = peer.send(goal)
        call.ask_for_result()
        call.wait_for_stage("action")
        assert peer.transition("shutdown")
        assert call.result().termination_reason == R.PREEMPTED
        assert peer.state() == "finalized"
        assert child.stop() == 0
        assert "Traceback" not in child.log.read_text()

    @pytest.mark.parametrize(
        "name, value, reason",
        [
            ("plan_on", "whistle", "plan_on must be one of command, image, got 'whistle'"),
            (
                "temperature",
                '"\\e[31mred"',
                "Trying to set parameter 'temperature' to '\\x1b[31mred' of type 'STRING', "
                "expecting type 'DOUBLE': temperature",
            ),
            ("temperature", "1.0e-9", "temperature must be 0 or a number from 1e-06 to 1e+06, got 1e-09"),
        ],
    )
    def test_a_wrong_parameter_at_start_is_one_line_and_exit_code_2(self, start_node, name, value, reason):
        child = start_node(**{name: value})
        assert child.process.wait(20) == 2
        assert child.log.read_text().splitlines() == [f"edgellm_node: error: {reason}"]
