# SPDX-License-Identifier: Apache-2.0
"""Cameras and joints of a policy: their names, and the joint state of a plan.

Parameters give the names.
"""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from builtin_interfaces.msg import Time
from sensor_msgs.msg import JointState

from edgellm_ros.replay import inputs
from edgellm_ros.ros.camera_topic import camera_names, camera_topic
from edgellm_ros.ros.node.sensors import cameras
from edgellm_ros.ros.node.sensors.cameras import Cameras
from edgellm_ros.ros.node.sensors.input_time import Frame, StaleInputError
from edgellm_ros.ros.node.sensors.joint_states import JointStates, state_joints
from edgellm_ros.ros.node.settings.parameters import SPECS
from fixtures.peer import image_message

NONE_GIVEN = [""]  # the default of the parameters
PIXELS = np.zeros((2, 2, 3), np.uint8)


def policy(cameras: tuple[str, ...] = ("top", "wrist", "left"), state: tuple[str, ...] = ("a", "b")):
    return SimpleNamespace(
        cameras=SimpleNamespace(names=cameras), state=SimpleNamespace(names=state, dim=len(state))
    )


def at(seconds: float) -> Frame:
    """A frame that is stamped at this time."""
    return Frame(image_message(PIXELS, Time(sec=int(seconds), nanosec=round(seconds % 1 * 1e9))))


def test_a_replay_takes_frames_and_joint_states_of_a_time_together_as_the_node_does():
    assert inputs.SAME_TIME_NS == cameras.SAME_TIME_NS
    assert SPECS["odom_wait"].default * 1e9 == inputs.WAIT_NS


class TestCameras:
    def test_are_all_of_the_policy_in_its_order_or_those_that_are_named(self):
        assert camera_names(NONE_GIVEN, policy()) == ("top", "wrist", "left")
        assert camera_names(["left", "top"], policy()) == ("left", "top")
        assert camera_names(NONE_GIVEN, None) == ()

    def test_the_first_has_no_topic_of_its_own(self):
        topics = Cameras(("left", "top", "wrist")).topics
        assert topics == {"top": "~/top/image", "wrist": "~/wrist/image"}

    @pytest.mark.parametrize(
        ("name", "topic"),
        [
            ("wrist", "~/wrist/image"),
            ("observation.image2", "~/observation_image2/image"),
            ("__left--arm__", "~/left_arm/image"),
            ("2", "~/camera_2/image"),
        ],
    )
    def test_topics_are_names_of_ros(self, name, topic):
        assert camera_topic(name) == topic

    def test_two_cameras_with_one_topic_are_refused(self):
        with pytest.raises(ValueError, match=r"top, a\.b, a-b have the same topics ~/a_b/image, ~/a_b/image"):
            camera_names(NONE_GIVEN, policy(("top", "a.b", "a-b")))

    def test_a_frame_without_a_stamp_has_the_time_of_its_arrival(self):
        cameras = Cameras(("top", "wrist"))
        cameras.add("wrist", Frame(image_message(PIXELS), arrival=9_900_000_000))
        assert len(cameras.beside(at(10.0), cameras.last(), 0.0, tolerance_s=0.1)) == 2
        with pytest.raises(StaleInputError, match=r"is 0\.10 s older than that on ~/image, limit 0\.05 s"):
            cameras.beside(at(10.0), cameras.last(), 0.0, tolerance_s=0.05)

    def test_a_plan_gets_the_frame_that_is_nearest_to_its_own(self):
        cameras = Cameras(("top", "wrist"))
        frames = [at(seconds) for seconds in (9.9, 9.95, 10.02, 10.1)]
        for frame in frames:
            cameras.add("wrist", frame)
        first = at(10.0)
        assert cameras.beside(first, cameras.last(), 0.0, 0.2) == (first, frames[2])

    def test_a_plan_that_begins_late_keeps_the_frames_that_were_there(self):
        cameras, first, frame = Cameras(("top", "wrist")), at(10.0), at(9.99)
        cameras.add("wrist", frame)
        paired = cameras.last()
        for i in range(10):
            cameras.add("wrist", at(10.5 + i))
        assert cameras.beside(first, paired, 0.0, 0.2) == (first, frame)

    def test_a_plan_waits_for_a_frame_of_the_same_time_that_arrives_after_its_own(self):
        cameras, first, same = Cameras(("top", "wrist")), at(10.0), at(10.0)
        cameras.add("wrist", at(9.9))
        timer = threading.Timer(0.05, lambda: cameras.add("wrist", same))
        timer.start()
        start = time.monotonic()
        assert cameras.beside(first, cameras.last(), 10.0, 0.2) == (first, same)
        assert time.monotonic() - start < 5.0

    def test_a_frame_that_was_taken_a_moment_earlier_is_as_new(self):
        cameras, first, frame = Cameras(("top", "wrist")), at(10.0), at(9.996)
        cameras.add("wrist", frame)
        start = time.monotonic()
        assert cameras.beside(first, cameras.last(), 10.0, 0.2) == (first, frame)
        assert time.monotonic() - start < 5.0

    def test_a_frame_that_was_refused_is_told_until_one_is_accepted(self):
        cameras = Cameras(("top", "wrist"))
        cameras.refuse("wrist", "it is stamped 9.00 s in the future")
        words = "; the newest was refused: it is stamped 9.00 s in the future$"
        with pytest.raises(StaleInputError, match=rf"has arrived on ~/wrist/image .*{words}"):
            cameras.beside(at(10.0), cameras.last(), 0.0, 0.2)
        cameras.add("wrist", at(5.0))
        with pytest.raises(StaleInputError, match=r"camera_tolerance\)$"):
            cameras.beside(at(10.0), cameras.last(), 0.0, 0.2)
        cameras.refuse("wrist", "it is stamped 9.00 s in the future")
        with pytest.raises(StaleInputError, match=rf"camera_tolerance\){words}"):
            cameras.beside(at(10.0), cameras.last(), 0.0, 0.2)

    def test_a_camera_without_a_frame_is_not_waited_for(self):
        cameras, start = Cameras(("top", "wrist")), time.monotonic()
        with pytest.raises(StaleInputError, match="no frame of the camera 'wrist' has arrived on ~/wrist/i"):
            cameras.beside(at(10.0), cameras.last(), 10.0, 0.2)
        assert time.monotonic() - start < 5.0


class TestEarlierObservations:
    """Frames at and before that of a plan, 0.1 s apart."""

    @staticmethod
    def observed(top: tuple[float, ...], wrist: tuple[float, ...], earlier=(0.2, 0.1)) -> list[list[float]]:
        """Return the times of the frames of a plan at the last frame of `top`."""
        cameras = Cameras(("top", "wrist"), earlier)
        for time_ in sorted({*top, *wrist}):
            if time_ in top:
                cameras.add_first(first := at(time_))
            if time_ in wrist:
                cameras.add("wrist", at(time_))
        stored = cameras.last()
        frames = cameras.observed(cameras.beside(first, stored, 0.0, 1.0), stored)
        return [[round(frame.time * 1e-9, 3) for frame in camera] for camera in frames]

    def test_are_those_nearest_to_their_times(self):
        top = (9.79, 9.84, 9.92, 9.97, 10.0)
        wrist = (9.81, 9.88, 9.95, 10.02)
        assert self.observed(top, wrist) == [[9.79, 9.92, 10.0], [9.81, 9.88, 10.02]]

    def test_repeat_the_first_frame_as_lerobot_does(self):
        assert self.observed((10.0,), (10.0,)) == [[10.0] * 3, [10.0] * 3]
        assert self.observed((9.9, 10.0), (9.9, 10.0)) == [[9.9, 9.9, 10.0]] * 2

    def test_are_those_of_a_fast_camera_of_which_not_all_frames_are_stored(self):
        fast = tuple(round(8 + i / 500, 3) for i in range(1001))
        cameras = Cameras(("top", "wrist"), (0.2, 0.1))
        for each in fast:
            cameras.add_first(at(each))
        assert len(cameras.last()[0]) < 40
        (found, _) = self.observed(fast, fast)
        np.testing.assert_allclose(found, [9.8, 9.9, 10.0], atol=0.1 / 8 / 2 + 1e-3)

    def test_are_those_after_a_clock_that_was_set_back(self):
        cameras = Cameras(("top", "wrist"), (0.2, 0.1))
        for seconds in (*np.arange(99.0, 100.0, 0.02), *np.arange(1.0, 1.5, 0.02)):
            cameras.add_first(first := at(round(float(seconds), 3)))
            cameras.add("wrist", first)
        stored = cameras.last()
        (found, _) = cameras.observed(cameras.beside(first, stored, 0.0, 1.0), stored)
        assert [round(frame.time * 1e-9, 2) for frame in found] == [1.28, 1.38, 1.48]

    def test_are_not_stored_for_a_policy_without_them(self):
        cameras = Cameras(("top", "wrist"))
        cameras.add_first(at(10.0))
        assert cameras.last() == ((), ())

    def test_states_are_those_nearest_to_their_times(self):
        joints = JointStates(("a",))
        for i in range(5):
            message = JointState(name=["a"], position=[float(i)])
            message.header.stamp = Time(sec=10, nanosec=100_000_000 * i)
            joints.add(message)
        found = [joints.state_at(10.4, 1.0, ago)[0] for ago in (9.0, 0.28, 0.1, 0.0)]
        assert found == [0.0, 1.0, 3.0, 4.0]


class TestJoints:
    def test_have_the_names_of_the_policys_state_unless_they_are_named(self):
        assert state_joints(NONE_GIVEN, policy()) == ("a", "b")
        assert state_joints(["pan", "lift"], policy()) == ("pan", "lift")
        assert state_joints(NONE_GIVEN, None) == ()

    def test_a_message_with_fewer_positions_than_names_is_refused(self):
        joints = JointStates(("a",))
        with pytest.raises(ValueError, match="a joint state has 2 names and 1 positions"):
            joints.add(JointState(name=["a", "b"], position=[1.0]))
        with pytest.raises(ValueError, match="2 names and 1 positions"):
            joints.newest_state(0, 1.0)

    def test_a_state_stamped_in_the_future_is_refused(self):
        joints, message = JointStates(("a",)), JointState(name=["a"], position=[1.0])
        message.header.stamp = Time(sec=12)
        with pytest.raises(StaleInputError, match=r"joint state is stamped 2\.00 s in the future"):
            joints.add(message, 10 * 10**9, 0.5)

    def test_the_newest_state_is_stale_when_it_is_old(self):
        joints, message = JointStates(("a", "b")), JointState(name=["b", "a"], position=[1.0, 2.0])
        joints.add(message, 10 * 10**9)
        np.testing.assert_array_equal(joints.newest_state(11 * 10**9, 1.0), [2.0, 1.0])
        with pytest.raises(StaleInputError, match=r"the newest joint state is 2\.00 s old, limit 1 s"):
            joints.newest_state(12 * 10**9, 1.0)
