# SPDX-License-Identifier: Apache-2.0
"""Which camera frames a plan with several frames gets."""

from __future__ import annotations

from types import SimpleNamespace

from builtin_interfaces.msg import Time

from edgellm_ros.ros.node.sensors.frame_history import FrameHistory
from edgellm_ros.ros.node.sensors.input_time import Frame

INTERVAL, MAX_AGE = 0.5, 1.0


def frame(seconds: float, stamped: bool = True) -> Frame:
    nanoseconds = round(seconds * 1e9)
    stamp = Time(sec=nanoseconds // 10**9, nanosec=nanoseconds % 10**9) if stamped else Time()
    return Frame(SimpleNamespace(header=SimpleNamespace(stamp=stamp)), arrival=nanoseconds)


def sent(history: FrameHistory, times: list[float], interval: float = INTERVAL) -> list[float]:
    """Add all frames; return the times of those that a plan with the last frame gets."""
    frames = [frame(time) for time in times]
    for each in frames:
        history.add(each, interval)
    return [each.time / 1e9 for each in (*history.before(frames[-1], interval, MAX_AGE), frames[-1])]


def test_frames_are_at_least_an_interval_apart_and_the_newest_is_the_last():
    times = [10 + i / 10 for i in range(24)]
    assert sent(FrameHistory(4), times) == [10.5, 11.0, 11.5, 12.3]


def test_a_frame_a_little_early_is_taken():
    times = [10.0, 10.499, 11.001, 11.499]
    assert sent(FrameHistory(4), times) == times


def test_a_camera_slower_than_the_interval_gives_its_own_frames():
    assert sent(FrameHistory(3), [10.0, 11.0, 12.0, 13.0]) == [11.0, 12.0, 13.0]


def test_with_fewer_frames_so_far_all_are_sent():
    assert sent(FrameHistory(8), [10.0, 10.5, 11.0]) == [10.0, 10.5, 11.0]


def test_one_frame_per_plan_is_the_newest_alone():
    assert sent(FrameHistory(1), [10.0, 10.5, 11.0]) == [11.0]


def test_frames_from_before_a_pause_of_the_camera_are_left_out():
    assert sent(FrameHistory(4), [10.0, 10.5, 12.6, 13.1]) == [12.6, 13.1]
    assert sent(FrameHistory(4), [10.0, 10.5, 12.5, 13.0]) == [10.0, 10.5, 12.5, 13.0]


def test_a_clock_that_is_set_back_starts_a_new_history():
    assert sent(FrameHistory(4), [100.0, 100.5, 10.0, 10.5]) == [10.0, 10.5]


def test_an_interval_that_was_made_shorter_gives_no_more_frames():
    history, newest = FrameHistory(4), frame(11.7)
    for each in (*map(frame, (10.0, 10.5, 11.0, 11.5)), newest):
        history.add(each, INTERVAL)
    times = [each.time / 1e9 for each in history.before(newest, 0.1, MAX_AGE)]
    assert times == [10.5, 11.0, 11.5]


def test_frames_that_came_after_the_planned_one_are_left_out():
    history, planned = FrameHistory(3), frame(11.0)
    for each in (frame(10.0), frame(10.5), planned, frame(11.5)):
        history.add(each, INTERVAL)
    times = [each.time / 1e9 for each in history.before(planned, INTERVAL, MAX_AGE)]
    assert times == [10.5]


def test_frames_without_a_stamp_are_spaced_by_arrival():
    history, newest = FrameHistory(3), frame(10.5, stamped=False)
    history.add(frame(10.0, stamped=False), INTERVAL)
    history.add(newest, INTERVAL)
    assert [each.time / 1e9 for each in history.before(newest, INTERVAL, MAX_AGE)] == [10.0]
