# SPDX-License-Identifier: Apache-2.0
"""Topics of commands, frames, odometry: when the node plans and what it publishes."""

from __future__ import annotations

import re

import numpy as np
import pytest
from builtin_interfaces.msg import Time
from edgellm_ros.action import Plan
from edgellm_ros.msg import PreviousChunk
from edgellm_ros.srv import ListLoras, SetNoiseSeed, SwitchLora

from edgellm_ros.ros.messaging import to_nanoseconds, to_time
from fixtures.peer import image_message

QUIET_S = 0.5  # long enough for a plan that should not be made to be noticed
LONG = 600  # denoise steps of a plan that lasts longer than a few service calls


@pytest.fixture(autouse=True)
def fresh(node, peer):
    """Drop input of earlier tests: a newly activated node has no frame and no command."""
    assert peer.transition("deactivate")
    assert peer.transition("activate")
    initial = {"plan_on": "command", "max_input_age": 3.0, "denoise_steps": 0, "chunking": "off"}
    for name, value in initial.items():
        peer.set_parameter(name, value)
    peer.connect()
    peer.clear()


def actions_of(chunk) -> np.ndarray:
    return np.array(chunk.values, np.float32).reshape(chunk.horizon, -1)


def generations(peer, count=1):
    return peer.wait(
        lambda: len(peer.received["generation"]) >= count and peer.received["generation"], "plan"
    )


class TestPlanOnCommand:
    def test_frame_then_command_is_planned_once(self, peer, scene):
        frame = peer.frame(scene.pixels)
        peer.listen(0.2)
        peer.command(scene.command)
        generation = generations(peer)[0]
        assert generation.header == frame.header
        peer.listen(QUIET_S)
        assert len(peer.received["generation"]) == 1

    def test_command_then_frame_is_planned_once(self, peer, scene):
        peer.command(scene.command)
        peer.listen(0.2)
        frame = peer.frame(scene.pixels)
        generation = generations(peer)[0]
        assert generation.header == frame.header
        peer.frame(scene.pixels)
        peer.listen(QUIET_S)
        assert len(peer.received["generation"]) == 1

    def test_publishes_words_chunk_and_path_of_one_request(self, peer, scene):
        peer.frame(scene.pixels)
        peer.command(scene.command)
        generation = generations(peer)[0]
        peer.wait(lambda: peer.received["path"] and peer.received["text"], "path and text")
        chunk, path = peer.received["action_chunk"][0], peer.received["path"][0]
        assert chunk.request_id == generation.request_id
        assert chunk.header == path.header
        assert chunk.header.stamp == generation.header.stamp
        assert peer.received["text"][0].data == generation.text
        # Each topic hands over one message per turn of the executor, and the words come in several.
        peer.wait(
            lambda: "".join(piece.data for piece in peer.received["text_stream"]) == generation.text,
            "words of the whole answer",
        )

    def test_an_old_frame_is_refused(self, peer, scene):
        peer.frame(scene.pixels, stamp=Time(sec=peer.now().sec - 10))
        peer.command(scene.command)
        status = peer.wait(lambda: (s := peer.status("plans")).level == s.WARN and s, "warning")
        assert "limit 3 s (parameter max_input_age)" in status.message
        assert not peer.received["generation"]

    def test_a_frame_from_the_future_is_refused_and_counted(self, peer, scene):
        before = peer.metrics()["frames_refused"]
        peer.frame(scene.pixels, stamp=Time(sec=peer.now().sec + 100))
        peer.wait(lambda: peer.metrics()["frames_refused"] == before + 1, "refused frame")
        status = peer.wait(lambda: "future" in (s := peer.status("inputs")).message and s, "warning")
        assert status.level == status.WARN
        assert re.search(
            r"the camera frame is stamped \d+\.\d\d s in the future, limit 0.5 s", status.message
        )
        peer.command(scene.command)
        peer.listen(QUIET_S)
        assert not peer.received["generation"]
        frame = peer.frame(scene.pixels)
        assert generations(peer)[0].header == frame.header

    def test_a_goal_is_told_that_the_newest_frame_was_refused(self, peer, scene):
        future = r"the camera frame is stamped \d+\.\d\d s in the future, limit 0.5 s \(parameter \w+\)"

        def answer() -> str:
            result = peer.plan(Plan.Goal(prompt="what do you see?"))
            assert result.termination_reason == Plan.Result.STALE_INPUT
            return result.message

        assert answer() == "the request has no image, and no camera frame has arrived on ~/image"
        before = peer.metrics()["frames_refused"]
        peer.frame(scene.pixels, stamp=Time(sec=peer.now().sec + 100))
        peer.wait(lambda: peer.metrics()["frames_refused"] == before + 1, "refused frame")
        reason = rf"the request has no image, and the newest camera frame was refused: ~/image: {future}"
        assert re.fullmatch(reason, answer())
        peer.frame(scene.pixels, stamp=Time(sec=peer.now().sec - 10))
        peer.wait(lambda: "limit 3 s (parameter max_input_age)" in answer(), "accepted frame, which is old")
        assert "refused" not in answer()
        peer.frame(scene.pixels, stamp=Time(sec=peer.now().sec + 100))
        peer.wait(lambda: re.search(rf"; a newer one was refused: ~/image: {future}$", answer()), "reason")
        peer.frame(scene.pixels)
        peer.wait(
            lambda: peer.plan(Plan.Goal(prompt="what do you see?")).termination_reason == "completed", "plan"
        )

    def test_a_frame_without_a_stamp_ages_by_its_arrival(self, peer, scene):
        peer.frame(scene.pixels, stamp=Time())
        peer.command(scene.command)
        generations(peer)
        peer.set_parameter("max_input_age", 0.5)
        peer.listen(0.6)
        peer.command(scene.command)
        status = peer.wait(lambda: (s := peer.status("plans")).level == s.WARN and s, "warning")
        assert re.match(r"the camera frame is \d\.\d\d s old, limit 0.5 s", status.message)
        assert len(peer.received["generation"]) == 1

    def test_a_newer_command_preempts(self, peer, scene):
        peer.set_parameter("denoise_steps", 1000)
        peer.set_parameter("action_samples", 16)
        peer.frame(scene.pixels)
        peer.command(scene.command)
        peer.wait(lambda: peer.received["text_stream"], "first words")
        peer.set_parameter("denoise_steps", 0)
        peer.set_parameter("action_samples", 1)
        peer.frame(scene.pixels)
        peer.command("what do you see?")
        generation = generations(peer)[0]
        peer.listen(QUIET_S)
        assert peer.received["generation"] == [generation]
        assert peer.received["text"][0].data == generation.text

    def test_a_broken_frame_is_reported_and_the_next_is_planned(self, peer, scene):
        broken = peer.frame(scene.pixels[:0], stamp=peer.now())
        assert broken.height == 0
        peer.command(scene.command)
        status = peer.wait(lambda: (s := peer.status("plans")).level == s.WARN and s, "warning")
        assert status.message.startswith("image is empty")
        peer.frame(scene.pixels)
        peer.command(scene.command)
        assert generations(peer)

    def test_a_frame_beyond_the_limit_is_refused_and_the_next_is_planned(self, peer, scene):
        before = peer.metrics()
        peer.set_parameter("limits.message_bytes", 1000)
        peer.frame(scene.pixels)
        refused = peer.wait(
            lambda: (s := peer.status("inputs")).level == s.WARN and "limits." in s.message and s, "warning"
        )
        assert f"the camera frame has {scene.pixels.size} bytes" in refused.message
        assert "at most 1000 are taken (parameter limits.message_bytes)" in refused.message
        assert peer.metrics()["frames_refused"] - before["frames_refused"] == 1
        peer.set_parameter("limits.message_bytes", 2**28)
        peer.frame(scene.pixels)
        peer.command(scene.command)
        generations(peer)

    def test_a_command_beyond_the_limit_is_refused_and_the_next_is_planned(self, peer, scene):
        before = peer.metrics()
        peer.set_parameter("limits.text_length", len(scene.command))
        peer.frame(scene.pixels)
        peer.command(scene.command + "!")
        peer.wait(
            lambda: peer.metrics()["commands_refused"] - before["commands_refused"] == 1, "refused command"
        )
        peer.command(scene.command)
        assert len(generations(peer)) == 1
        peer.set_parameter("limits.text_length", 1_000_000)


class TestPlanOnImage:
    def test_every_frame_is_planned_while_a_command_stands(self, peer, scene):
        peer.set_parameter("plan_on", "image")
        peer.command(scene.command)
        peer.listen(0.2)
        for count in (1, 2, 3):
            frame = peer.frame(scene.pixels)
            assert generations(peer, count)[-1].header == frame.header
        peer.command("")
        peer.listen(0.2)
        peer.frame(scene.pixels)
        peer.listen(QUIET_S)
        assert len(peer.received["generation"]) == 3

    def test_a_repeated_command_does_not_start_again(self, peer, scene):
        peer.set_parameter("plan_on", "image")
        peer.frame(scene.pixels)
        for _ in range(3):
            peer.command(scene.command)
        generations(peer)
        peer.listen(QUIET_S)
        assert len(peer.received["generation"]) == 1

    def test_of_the_frames_that_come_meanwhile_only_the_newest_is_planned(self, peer, scene):
        peer.set_parameter("plan_on", "image")
        peer.set_parameter("denoise_steps", LONG)
        peer.set_parameter("max_input_age", 30.0)  # a frame waits for the plan before it
        peer.command(scene.command)
        peer.listen(0.2)
        peer.frame(scene.pixels)
        peer.wait(lambda: peer.received["text_stream"], "first words")
        peer.set_parameter("denoise_steps", 0)
        before = peer.metrics()
        for _ in range(5):
            newest = peer.frame(scene.pixels)
            peer.listen(0.02)
        assert generations(peer, 2)[-1].header == newest.header
        peer.listen(QUIET_S)
        assert len(peer.received["generation"]) == 2
        after = peer.metrics()
        dropped, received = (after[n] - before[n] for n in ("frames_dropped", "frames_received"))
        assert received - 1 == dropped > 0
        assert after["plans_preempted"] == before["plans_preempted"]


class TestOdometry:
    def test_past_motion_reaches_the_model(self, peer, scene):
        """The path starts with the speed of the odometry."""
        now = peer.now()
        for step in range(-20, 1):
            nanoseconds = now.sec * 10**9 + now.nanosec + step * 50_000_000
            stamp = Time(sec=nanoseconds // 10**9, nanosec=nanoseconds % 10**9)
            peer.odometry(x=0.5 * step * 0.05, speed=0.5, stamp=stamp)
        peer.frame(scene.pixels, stamp=now)
        peer.command(scene.command)
        generations(peer)
        path = peer.wait(lambda: peer.received["path"], "path")[0]
        first = path.poses[1].pose.position.x - path.poses[0].pose.position.x
        assert 0.03 < first < 0.07  # 0.5 m/s for 0.1 s, give or take 2 m/s^2

    @pytest.mark.parametrize(
        "poses, twist, jump, reason",
        [
            (0.6, 0.6, 0.0, "completed"),
            (0.54, 0.6, 0.0, "warned"),
            (0.0, 0.6, 0.0, "error"),
            (0.6, 0.0, 0.0, "error"),
            (0.6, 0.6, 0.2, "warned"),
            (0.6, 0.6, 1.0, "error"),
        ],
        ids=["equal", "slower", "frozen poses", "frozen twist", "small jump", "jump"],
    )
    def test_poses_that_differ_from_the_twist_do_not_drive_on(self, peer, scene, poses, twist, jump, reason):
        """A stop is planned to the standstill, or refused; words are not refused."""
        now = peer.now()
        for step in range(-20, 1):
            stamp = to_time(to_nanoseconds(now) + step * 50_000_000)
            peer.odometry(poses * step * 0.05 + jump * (step > -6), speed=twist, stamp=stamp)
        peer.listen(0.2)
        goal = Plan.Goal(prompt="stop", images=[image_message(scene.pixels, now)], action_samples=1)
        result = peer.plan(goal)
        status = peer.wait(lambda: peer.status("inputs"), "diagnostics")
        differs = "poses and twist of the odometry differ by"
        assert (differs in status.message) == (reason != "completed")
        if reason == "error":
            assert result.termination_reason == Plan.Result.ERROR
            assert result.message.startswith(differs)
            assert result.message.endswith("no trajectory is planned from it")
            assert status.level == status.ERROR
            goal.action_samples = 0
            assert peer.plan(goal).generation.text
        else:
            assert result.termination_reason == Plan.Result.COMPLETED
            x = [pose.pose.position.x for pose in result.paths[0].poses]
            assert x[-1] < 0.3
            assert x[-1] - x[-11] < 0.01

    def test_a_frame_is_planned_with_the_odometry_that_comes_shortly_after_it(self, peer, scene):
        peer.set_parameter("odom_wait", 5.0)
        peer.set_parameter("future_stamp_tolerance", 2.0)
        start, stamp = peer.now(), peer.now()
        stamp.sec += 1
        peer.odometry(stamp=start)
        peer.listen(0.2)
        peer.command(scene.command)
        peer.frame(scene.pixels, stamp=stamp)
        peer.listen(QUIET_S)
        assert not peer.received["text_stream"]
        peer.odometry(x=0.5, speed=0.7, stamp=stamp)
        generations(peer)
        peer.set_parameter("odom_wait", 0.05)
        peer.set_parameter("future_stamp_tolerance", 0.5)
        path = peer.wait(lambda: peer.received["path"], "path")[0]
        assert 0.05 < path.poses[1].pose.position.x < 0.09

    def test_odometry_that_stopped_is_stale_input(self, peer, scene):
        old = peer.now()
        old.sec -= 10
        peer.odometry(stamp=old)
        peer.frame(scene.pixels)
        peer.listen(0.2)
        peer.command(scene.command)
        status = peer.wait(lambda: (s := peer.status("plans")).level == s.WARN and s, "warning")
        assert "the newest odometry is" in status.message
        assert "older than the frame, limit 3 s" in status.message

    def test_odometry_that_stopped_is_stale_without_a_stamped_frame_too(self, peer, scene):
        old = peer.now()
        old.sec -= 10
        peer.odometry(stamp=old)
        peer.listen(0.2)
        goal = Plan.Goal(prompt=scene.command, images=[image_message(scene.pixels)])
        result = peer.plan(goal)
        assert result.termination_reason == Plan.Result.STALE_INPUT
        assert re.match(r"the newest odometry is 1\d\.\d\d s old, limit 3 s", result.message)

    def test_huge_numbers_are_refused_counted_and_logged_once(self, node, peer, scene):
        before = peer.metrics()["odometry_refused"]
        for _ in range(5):
            peer.odometry(orientation_w=1e200)
            peer.listen(0.3)
        peer.wait(lambda: peer.metrics()["odometry_refused"] == before + 5, "refused odometry")
        log = node.log.read_text()
        assert log.count("~/odom: odometry has no orientation: the quaternion's length is 1e+200") == 1
        assert "Traceback" not in log


def test_more_samples_than_the_engine_takes_are_refused_when_they_are_set(peer):
    refused = peer.set_parameter("action_samples", 100)
    assert not refused.successful
    assert refused.reason == (
        "action_samples must be from 0 to 64, max_action_samples of the engine, got 100"
    )
    assert peer.set_parameter("action_samples", 64).successful
    assert peer.set_parameter("action_samples", 1).successful


class TestChunking:
    """`chunking`: what a second plan of a command makes of the chunk of the first."""

    def drive(self, peer, scene, stamp: int) -> np.ndarray:
        """Plan the command on a frame with this stamp (ns); return the chunk's actions."""
        peer.wait(lambda: to_nanoseconds(peer.now()) >= stamp, "time of the frame")
        peer.clear()
        peer.frame(scene.pixels, to_time(stamp))
        peer.command(scene.command)
        return actions_of(peer.wait(lambda: peer.received["action_chunk"], "chunk")[0])

    def test_frozen_actions_are_those_of_the_chunk_before(self, peer, scene):
        peer.set_parameter("chunking", "frozen")
        before, start = peer.metrics(), to_nanoseconds(peer.now())
        first = self.drive(peer, scene, start)
        second = self.drive(peer, scene, start + 3 * 10**8)
        after = peer.metrics()
        assert after["chunk_delay"] >= 1
        np.testing.assert_array_equal(second[0], first[3])
        counters = ("chunks_continued", "chunks_not_continued")
        assert [after[name] - before[name] for name in counters] == [1, 1]

    def test_a_chunk_is_not_continued_after_deactivation(self, peer, scene):
        start = to_nanoseconds(peer.now())
        plain = self.drive(peer, scene, start)
        peer.set_parameter("chunking", "guided")
        guided = self.drive(peer, scene, start + 5 * 10**8)
        assert np.abs(guided - plain).max() > 1e-3
        assert peer.transition("deactivate")
        assert peer.transition("activate")
        peer.connect()
        np.testing.assert_array_equal(self.drive(peer, scene, to_nanoseconds(peer.now())), plain)

    def test_a_goal_may_continue_a_chunk_of_its_own_or_none(self, peer, scene):
        peer.set_parameter("chunking", "guided")
        plain = self.drive(peer, scene, to_nanoseconds(peer.now()))
        chunk = peer.received["action_chunk"][0]
        goal = Plan.Goal(prompt=scene.command, images=[image_message(scene.pixels)])
        goal.previous_chunk = [PreviousChunk(form="off")]
        np.testing.assert_array_equal(actions_of(peer.plan(goal).action_chunks[0]), plain)
        goal.previous_chunk = [PreviousChunk(form="frozen", chunk=chunk, executed=7, delay=4)]
        found = actions_of(peer.plan(goal).action_chunks[0])
        np.testing.assert_array_equal(found[:4], plain[7:11])
        goal.previous_chunk[0].delay = 34
        result = peer.plan(goal)
        assert result.termination_reason == Plan.Result.ERROR
        assert result.message.startswith("previous_chunk: delay must be at most 33, the actions that are")
        goal.action_samples = 0  # the chunk is not used, and checked all the same
        assert peer.plan(goal).message == result.message
        goal.previous_chunk[0].delay = 4
        assert peer.plan(goal).termination_reason == Plan.Result.COMPLETED


class TestOverlay:
    def test_is_the_frame_with_the_path_drawn_on_it(self, peer, scene):
        frame = peer.frame(scene.pixels)
        peer.command(scene.command)
        overlay = peer.wait(lambda: peer.received["overlay"], "overlay")[0]
        assert overlay.header == frame.header
        assert (overlay.width, overlay.height, overlay.encoding) == (320, 224, "rgb8")
        drawn = np.frombuffer(overlay.data, np.uint8).reshape(224, 320, 3)
        changed = (drawn != scene.pixels).any(axis=2)
        assert 0 < changed.sum() < 0.2 * changed.size


class TestServices:
    def test_switch_to_an_unknown_adapter_fails_and_changes_nothing(self, peer):
        response = peer.call(SwitchLora, "switch_lora", name="polite")
        assert not response.success
        assert response.message == "unknown LoRA adapter 'polite'; loaded: cautious, german"
        assert peer.call(ListLoras, "list_loras").active == ""

    def test_switch_to_the_base_model_succeeds(self, peer):
        assert peer.call(SwitchLora, "switch_lora", name="").success

    def test_the_checkpoints_own_adapters_are_listed(self, peer):
        response = peer.call(ListLoras, "list_loras")
        assert response.success
        assert list(response.names) == ["cautious", "german"]

    def test_noise_seed_decides_the_trajectory(self, peer, scene):
        def values(seed):
            assert peer.call(SetNoiseSeed, "set_noise_seed", seed=seed).success
            peer.clear()
            peer.frame(scene.pixels)
            peer.command(scene.command)
            generations(peer)
            chunk = peer.wait(lambda: peer.received["action_chunk"], "chunk")[0]
            assert chunk.noise_seed == seed
            return list(chunk.values)

        assert values(3) == values(3) != values(4)

    def test_a_negative_noise_seed_is_refused(self, peer):
        response = peer.call(SetNoiseSeed, "set_noise_seed", seed=-1)
        assert not response.success
        assert response.message == "seed must be from 0 to 9223372036854775807, got -1"

    def test_metrics_count_plans_and_time_them(self, peer, scene):
        before = peer.metrics()
        peer.frame(scene.pixels)
        peer.command(scene.command)
        generation = generations(peer)[0]
        after = peer.metrics()
        assert after["plans_completed"] == before["plans_completed"] + 1
        tokens = after["generation_generated_tokens"] - before["generation_generated_tokens"]
        assert tokens == generation.token_count
        assert after["total_latency_median"] > 0
        assert after["memory_resident"] > 1e7

    def test_metrics_tell_when_nothing_is_left_to_do_and_what_was_published(self, peer, scene):
        before = peer.metrics()
        peer.set_parameter("denoise_steps", LONG)
        peer.frame(scene.pixels)
        peer.command(scene.command)
        peer.wait(lambda: peer.metrics()["jobs_pending"] == 1, "plan that runs")
        peer.set_parameter("denoise_steps", 0)
        peer.wait(lambda: peer.metrics()["jobs_pending"] == 0, "end of the plan")
        after = peer.metrics()
        names = ("generation", "text", "action_chunk", "path", "overlay")
        assert [after[f"{n}_published"] - before[f"{n}_published"] for n in names] == [1] * 5
        assert after["text_stream_published"] > before["text_stream_published"]
        assert after["clock"] == pytest.approx(peer.now().sec, abs=5)

    def test_metrics_tell_who_is_connected(self, peer):
        metrics = peer.metrics()
        assert metrics["inputs_connected"] == 4
        assert metrics["outputs_connected"] == 10


class TestDiagnostics:
    def test_come_once_a_second_with_three_statuses(self, peer):
        peer.wait(lambda: len(peer.received["diagnostics"]) >= 3, "diagnostics")
        first, second = peer.received["diagnostics"][1:3]
        assert [status.name for status in first.status] == [
            f"/edgellm: {n}" for n in ("engine", "inputs", "plans")
        ]
        seconds = [a.header.stamp.sec + a.header.stamp.nanosec * 1e-9 for a in (first, second)]
        assert seconds[1] - seconds[0] == pytest.approx(1.0, abs=0.5)

    def test_warn_without_a_camera(self, peer):
        status = peer.wait(lambda: (s := peer.status("inputs")).level == s.WARN and s, "warning")
        assert "no camera frame" in status.message
