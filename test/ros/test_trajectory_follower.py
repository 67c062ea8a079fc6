# SPDX-License-Identifier: Apache-2.0
"""The follower's logic on a test clock: times of rows, limits, stops, refusals."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from edgellm_arena.world.unicycle import State, rollout
from edgellm_ros.ros.chunk_checks import RefusedChunkError
from edgellm_ros.ros.follower.course import Chunk, Limits, read_chunk
from edgellm_ros.ros.follower.trajectory_follower import Mode, Settings, TrajectoryFollower

SECOND = 10**9
START = 1000 * SECOND
LIMITS = Limits(speed=0.8, acceleration=1.0, deceleration=1.5, curvature=2.5, lateral_acceleration=1.2)
SETTINGS = Settings(LIMITS, period=0.05, blend_time=0.3, max_chunk_age=2.0, future_tolerance=0.2)
WATCHDOG_S = 0.3
TICKS = 120
NAMES, UNITS = ("acceleration", "curvature"), ("m/s^2", "1/m")


class Robot:
    """A follower whose clock steps it once per period, with a record of its commands."""

    def __init__(self, settings: Settings = SETTINGS) -> None:
        self.follower = TrajectoryFollower(settings)
        self.now = START
        self.follower.start(self.now)
        self.motions = [self.follower.motion]

    def send(self, rows, age: float = 0.0, dt: float = 0.1, request_id: str | None = None) -> None:
        accelerations, curvatures = np.array(rows, float).T
        stamp = self.now - round(age * SECOND)
        name = str(len(self.motions)) if request_id is None else request_id
        self.follower.add(Chunk(stamp, name, dt, accelerations, curvatures), self.now)

    def run(self, seconds: float):
        for _ in range(round(seconds / self.follower.settings.period)):
            self.now += round(self.follower.settings.period * SECOND)
            self.motions.append(self.follower.step(self.now, self.follower.settings.period))
        return self.motions[-1]


def check_limits(motions, limits: Limits, period: float) -> None:
    speed = np.array([motion.speed for motion in motions])
    curvature = np.array([motion.curvature for motion in motions])
    assert np.isfinite(speed).all()
    assert np.isfinite(curvature).all()
    assert speed.min() >= 0
    assert speed.max() <= limits.speed + 1e-9
    assert np.abs(curvature).max() <= limits.curvature + 1e-9
    assert (speed**2 * np.abs(curvature)).max() <= limits.lateral_acceleration + 1e-9
    changes = np.diff(speed) / period
    assert changes.max() <= limits.acceleration + 1e-9
    assert changes.min() >= -limits.deceleration - 1e-9


class TestFollowing:
    def test_the_arenas_own_integration_gives_the_same_speeds_and_path(self):
        rng = np.random.default_rng(0)
        actions = np.stack([rng.uniform(-1.5, 1.0, 40), rng.uniform(-0.6, 0.6, 40)], -1)
        actions[:8, 0] = 0.9
        robot = Robot(replace(SETTINGS, period=0.1, blend_time=0.0, max_chunk_age=10.0))
        robot.send(actions)
        expected = rollout(State(), actions)
        predicted = robot.follower.predict(robot.now)
        assert predicted[:41] == pytest.approx(expected, abs=1e-9)
        commands = [robot.follower.step(robot.now, 0.1)]
        for _ in range(39):
            commands.append(robot.run(0.1))
        assert [command.speed for command in commands] == pytest.approx(expected[1:, 3])
        moving = expected[1:, 3] > 0
        assert np.array([c.curvature for c in commands])[moving] == pytest.approx(actions[moving, 1])

    @pytest.mark.parametrize("age, row", [(0.0, 0), (0.3, 3), (0.96, 9), (1.26, 12)])
    def test_a_chunk_begins_at_the_row_of_its_age(self, age, row):
        robot = Robot(replace(SETTINGS, blend_time=0.0))
        robot.run(2.0)
        robot.send([(1.0, 0.01 * index) for index in range(40)], age)
        assert robot.follower.step(robot.now, 0.05).curvature == pytest.approx(0.01 * row)

    def test_columns_are_found_by_name(self):
        chunk = read_chunk(
            START,
            request_id="",
            dt=0.1,
            horizon=2,
            names=NAMES[::-1],
            units=UNITS[::-1],
            values=[1.0, 2.0, 3.0, 4.0],
        )
        assert chunk.curvatures.tolist() == [1, 3]
        assert chunk.accelerations.tolist() == [2, 4]

    def test_the_plan_begins_at_the_speed_that_was_measured_at_its_frame(self):
        robot = Robot(replace(SETTINGS, blend_time=0.0))
        for index in range(41):
            robot.follower.observe_speed(START + index * SECOND // 20, 0.2 * index / 40)
        robot.run(2.0)
        robot.send([(0.0, 0.0)] * 40, age=1.0)
        assert robot.run(1.0).speed == pytest.approx(0.1)

    def test_without_odometry_the_plan_begins_at_the_speed_that_was_commanded(self):
        robot = Robot(replace(SETTINGS, blend_time=0.0, max_chunk_age=9.0))
        robot.send([(0.5, 0.0)] * 8 + [(0.0, 0.0)] * 80)
        robot.run(2.0)
        assert robot.follower.motion.speed == pytest.approx(0.4)
        robot.send([(0.0, 0.0)] * 40, age=1.6)  # at 0.2 m/s then
        assert robot.run(1.0).speed == pytest.approx(0.2, abs=0.03)

    def test_the_motion_begins_at_the_measured_speed(self):
        robot = Robot()
        robot.follower.observe_speed(START + SECOND, 0.5)
        robot.now += SECOND
        robot.follower.start(robot.now)
        assert robot.run(0.05).speed == pytest.approx(0.5 - 1.5 * 0.05)

    @pytest.mark.parametrize("blend_time", [0.0, 0.3, 1.0])
    def test_the_curvature_passes_to_the_new_chunk_over_the_blend_time(self, blend_time):
        robot = Robot(replace(SETTINGS, blend_time=blend_time))
        robot.send([(0.5, 0.0)] * 10 + [(0.0, 0.0)] * 30)
        robot.run(1.0)
        robot.send([(0.0, 1.0)] * 40)
        curvatures = [robot.run(0.05).curvature for _ in range(30)]
        assert np.diff([0.0, *curvatures]).min() >= -1e-12
        reached = sum(curvature < 1 - 1e-6 for curvature in curvatures) * 0.05
        assert blend_time - 0.101 <= reached <= blend_time
        if blend_time:
            assert np.diff([0.0, *curvatures]).max() < 1.6 * 0.05 / blend_time

    def test_a_prediction_is_what_is_driven_without_a_further_chunk(self):
        robot = Robot()
        robot.send([(0.6, 0.3)] * 30, dt=0.05)
        robot.run(0.5)
        predicted = robot.follower.predict(robot.now)[1:, 3]
        driven = [robot.follower.motion.speed, *(robot.run(0.05).speed for _ in predicted[1:])]
        assert driven == pytest.approx(predicted.tolist())
        assert driven[-1] == 0
        assert max(driven) > 0.5


class TestStops:
    def moving(self, **changes) -> Robot:
        robot = Robot(replace(SETTINGS, **changes))
        robot.send([(1.0, 0.2)] * 20)
        robot.run(1.0)
        assert robot.follower.motion.speed > 0.7
        return robot

    def test_braking_begins_when_the_last_row_is_used_up(self):
        robot = self.moving(max_chunk_age=10.0)
        robot.run(1.0 - 0.05)
        before = robot.follower.motion.speed
        assert before > 0.7
        robot.run(0.1)
        assert robot.follower.motion.speed < before
        assert robot.run(before / LIMITS.deceleration).speed == 0
        assert robot.follower.mode is Mode.WAITING
        check_limits(robot.motions, LIMITS, 0.05)

    def test_braking_begins_when_the_frame_is_too_old(self):
        robot = self.moving(max_chunk_age=1.2)
        robot.run(0.2)
        before = robot.follower.motion.speed
        assert robot.run(0.1).speed < before
        assert robot.run(before / LIMITS.deceleration).speed == 0

    def test_after_a_stop_nothing_but_zero_until_resume(self):
        robot = self.moving()
        robot.follower.stop()
        speeds = [robot.run(0.05).speed for _ in range(20)]
        assert speeds == pytest.approx(np.maximum(0.8 - 0.075 * np.arange(1, 21), 0).tolist())
        with pytest.raises(RefusedChunkError, match="stopped until"):
            robot.send([(1.0, 0.0)] * 40)
        assert robot.run(1.0).speed == 0
        assert robot.follower.mode is Mode.STOPPED
        robot.follower.start(robot.now)  # a new activation does not end the stop
        assert robot.follower.mode is Mode.STOPPED
        robot.follower.resume(robot.now)
        with pytest.raises(RefusedChunkError, match="before the activation"):
            robot.send([(1.0, 0.0)] * 40, age=0.1)
        assert robot.run(1.0).speed == 0
        robot.send([(1.0, 0.0)] * 40)
        assert robot.run(1.0).speed > 0

    @pytest.mark.parametrize("jump", [-3600.0, -1.0, 1.0, 3600.0])
    def test_a_jump_of_the_clock_ends_the_chunk_and_later_ones_are_followed(self, jump):
        robot = self.moving()
        robot.now += round(jump * SECOND)
        before = robot.follower.motion.speed
        assert robot.run(0.05).speed < before
        robot.run(1.0)
        assert robot.follower.motion.speed == 0
        robot.send([(1.0, 0.0)] * 40)
        assert robot.run(0.5).speed > 0.2
        check_limits(robot.motions, LIMITS, 0.05)


class TestRefusedChunks:
    ROWS = ((1.0, 0.0),) * 40

    @pytest.mark.parametrize(
        "changes, reason",
        [
            ({"names": ("steering", "curvature")}, "wrong_names"),
            ({"names": ("acceleration", "acceleration")}, "wrong_names"),
            ({"names": (), "units": (), "values": ()}, "wrong_names"),
            ({"units": ("m/s^2", "rad")}, "wrong_units"),
            ({"units": ("m/s^2",)}, "wrong_units"),
            ({"dt": 0.0}, "wrong_dt"),
            ({"dt": -0.1}, "wrong_dt"),
            ({"dt": math.nan}, "wrong_dt"),
            ({"dt": math.inf}, "wrong_dt"),
            ({"horizon": 3}, "wrong_size"),
            ({"horizon": 0, "values": ()}, "wrong_size"),
            ({"horizon": 1001, "values": (0.0,) * 2002}, "too_long"),
            ({"values": (0.0,) * 2002}, "too_long"),
            ({"horizon": 2**31}, "too_long"),
            ({"values": (1.0, 2.0, math.nan, 4.0)}, "not_finite"),
            ({"values": (1.0, 2.0, 3.0, -math.inf)}, "not_finite"),
        ],
    )
    def test_a_message_that_is_not_a_unicycles_plan_is_refused(self, changes, reason):
        fields = {"dt": 0.1, "horizon": 2, "names": NAMES, "units": UNITS, "values": (1.0, 2.0, 3.0, 4.0)}
        read_chunk(START, request_id="", **fields)
        with pytest.raises(RefusedChunkError) as refused:
            read_chunk(START, request_id="", **{**fields, **changes})
        assert refused.value.reason == reason

    @pytest.mark.parametrize(
        "age, rows, reason",
        [(-0.21, 40, "from_future"), (2.01, 40, "too_old"), (1.0, 10, "used_up"), (3.01, 40, "before_start")],
    )
    def test_a_chunk_at_the_wrong_time_is_refused_and_counted(self, age, rows, reason):
        robot = Robot()
        robot.run(3.0)
        with pytest.raises(RefusedChunkError) as refused:
            robot.send(self.ROWS[:rows], age)
        assert refused.value.reason == reason
        assert robot.follower.counts == {reason: 1}
        assert robot.run(1.0).speed == 0

    def test_a_chunk_of_an_older_frame_is_refused(self):
        robot = Robot()
        robot.run(1.0)
        robot.send(self.ROWS, age=0.1)
        with pytest.raises(RefusedChunkError, match=r"0\.10 s older"):
            robot.send(self.ROWS, age=0.2)

    def test_a_doubled_chunk_is_refused_and_another_answer_to_the_same_frame_is_followed(self):
        robot = Robot()
        robot.run(1.0)
        for request_id in ("a", "b"):
            robot.send(self.ROWS, request_id=request_id)
        for request_id in ("a", "b"):
            with pytest.raises(RefusedChunkError, match="before"):
                robot.send(self.ROWS, request_id=request_id)
        assert robot.follower.counts == {"accepted": 2, "repeated": 2}


def random_settings(rng: np.random.Generator) -> Settings:
    limits = Limits(*rng.uniform((0.2, 0.3, 0.5, 0.5, 0.3), (2.0, 3.0, 4.0, 4.0, 3.0)))
    period = float(rng.choice([0.02, 0.05, 0.1]))
    blend_time = float(rng.choice([0.0, 0.2, 0.8]))
    return Settings(limits, period, blend_time, float(rng.uniform(0.3, 3.0)), float(rng.uniform(0.0, 0.5)))


def message_of(rng: np.random.Generator, now: int, sent: list[dict]) -> dict:
    """Return a chunk's fields: mostly good, otherwise wrong, late, early or doubled.

    A chunk may also be of an older frame.
    """
    if sent and rng.random() < 0.15:
        return sent[int(rng.integers(len(sent)))]
    horizon, dt = int(rng.integers(1, 40)), float(rng.choice([0.05, 0.1, 0.2]))
    rows = np.stack([rng.normal(0.5, 2, horizon), rng.normal(0, 3, horizon)], -1)
    age = rng.uniform(0, 0.5) if rng.random() < 0.8 else rng.normal(0, 3)
    fields = {
        "stamp": now - round(age * SECOND),
        "request_id": str(len(sent)),
        "dt": dt,
        "horizon": horizon,
        "names": NAMES,
        "units": UNITS,
        "values": rows.ravel(),
    }
    wrong = rng.random()
    if wrong < 0.05:
        fields["values"] = np.where(rng.random(rows.size) < 0.3, math.nan, rows.ravel())
    elif wrong < 0.08:
        fields["values"] = rows.ravel() * 1e38
    elif wrong < 0.1:
        fields["dt"] = -dt
    elif wrong < 0.12:
        fields["horizon"] = horizon + 1
    return fields


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(first, first + 250) for first in range(0, 1000, 250)], ids=str)
def test_limits_watchdog_and_stop_hold_for_random_streams_of_chunks(seeds):
    """The robot stands if no sent chunk could be driven for long enough.

    Long enough is the time of the watchdog plus a stopping time. A simple rule beside the follower checks it
    from the chunks that were sent.
    """
    moving = refused = 0
    for seed in seeds:
        rng = np.random.default_rng(seed)
        settings = random_settings(rng)
        limits, period = settings.limits, settings.period
        stopping_s = limits.speed / limits.deceleration + period
        follower = TrajectoryFollower(settings)
        now = START
        follower.start(now)
        motions, sent, driveable = [follower.motion], [], []
        idle_s, stopped_s = math.inf, None
        rate = rng.choice([1.0, 5.0])
        for tick in range(TICKS):
            now += round(period * SECOND)
            if rng.random() < 0.01:
                now += round(rng.normal(0, 3) * SECOND)
            while rng.random() < rate * period and not 70 < tick < 90:  # a gap
                sent.append(message_of(rng, now, sent))
                lasts_s = min(settings.max_chunk_age, sent[-1]["horizon"] * abs(sent[-1]["dt"]))
                span_s = np.array([-settings.future_tolerance, lasts_s])
                driveable.append((sent[-1]["stamp"] + span_s * SECOND).tolist())
                try:
                    follower.add(read_chunk(**sent[-1]), now)
                except RefusedChunkError:
                    refused += 1
            if rng.random() < 0.005:
                follower.stop()
                stopped_s = 0.0
            elif stopped_s is not None and rng.random() < 0.02:
                follower.resume(now)
                stopped_s = None
            motions.append(follower.step(now, period))
            idle_s = 0.0 if any(begin <= now <= end for begin, end in driveable) else idle_s + period
            if idle_s > WATCHDOG_S + stopping_s:
                assert motions[-1].speed == 0, seed
            if stopped_s is not None:
                stopped_s += period
                if stopped_s > stopping_s:
                    assert motions[-1].speed == 0, seed
                    assert motions[-1].yaw_rate == 0
            moving += motions[-1].speed > 0
        check_limits(motions, limits, period)
    assert moving > 0.2 * TICKS * len(seeds)
    assert refused > 5 * len(seeds)
