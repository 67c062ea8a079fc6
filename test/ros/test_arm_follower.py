# SPDX-License-Identifier: Apache-2.0
"""The arm's logic on a test clock: limits, blending, stops, refusals."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import numpy as np
import pytest

from edgellm_ros.ros.arm.arm_follower import REASONS, ArmFollower
from edgellm_ros.ros.arm.chunk import Chunk, read_chunk
from edgellm_ros.ros.arm.contract import (
    FORWARD,
    STANDS_S,
    TRAJECTORY,
    Contract,
    EndPoints,
    Joint,
    JointLimits,
)
from edgellm_ros.ros.chunk_checks import RefusedChunkError
from edgellm_ros.ros.follower.trajectory_follower import Mode
from fixtures.arm_on_a_clock import LIMITS, SECOND, SETTINGS, Arm, contract, joint, ramp

TICKS = 150
STREAMS = 1000
ONE_BY_ONE = replace(SETTINGS, follow_time=0.5)


class TestFollowing:
    def test_rows_are_reached_at_the_end_of_their_time(self):
        arm = Arm(settings=replace(SETTINGS, blend_time=0.0))
        arm.send(ramp(0.9, 18))
        commands = arm.run(2.0)[:, 0]
        times = arm.period * np.arange(1, 101)
        assert np.abs(commands - np.interp(times, [0, 1.8], [0, 0.9])).max() < 0.05
        middle = (times > 0.5) & (times < 1.5)
        assert np.abs(commands - 0.5 * times)[middle].max() < 1e-9
        # short of the last row, as it rests when the chunk ends: it brakes, and 0.08 s are averaged
        brakes = 0.5**2 / (2 * LIMITS.acceleration) + 0.5 * 0.08 / 2
        assert commands[-1] == pytest.approx(0.9 - brakes, abs=1e-3)

    def test_a_late_chunk_begins_at_the_row_of_its_age(self):
        arm = Arm(settings=replace(SETTINGS, blend_time=0.0))
        arm.run(1.0)
        arm.send(ramp(0.9, 18), age=0.6)
        assert arm.run(1.0)[-1, 0] == pytest.approx(0.8, abs=1e-3)

    def test_a_motion_begins_where_the_arm_stands_and_ends_at_rest_with_the_chunk(self):
        arm = Arm(position=[0.2, -0.3])
        motion = arm.send(ramp(0.4, 10))
        assert motion.positions[0] == pytest.approx([0.2, -0.3])
        assert not motion.speeds[0].any()
        assert not motion.speeds[-1].any()
        assert motion.end == pytest.approx(arm.now + 1.0, abs=arm.period)

    def test_a_chunk_longer_than_its_age_allows_ends_with_the_watchdog(self):
        arm = Arm()
        assert arm.send(ramp(1.0, 50)).end == pytest.approx(arm.now + 2.0, abs=arm.period)

    def test_a_new_chunk_begins_on_the_running_motion(self):
        arm = Arm()
        arm.send(ramp(1.0, 15))
        arm.run(0.5)
        before = arm.follower.motion
        motion = arm.send(ramp(-0.5, 15))
        position, speed = before.at(motion.start)
        assert motion.positions[0] == pytest.approx(position)
        assert motion.speeds[0] == pytest.approx(speed)
        assert speed[0] > 0.3

    def test_commands_between_two_periods_are_those_of_the_motion_before(self):
        arm = Arm()
        arm.send(ramp(1.0, 15))
        arm.run(0.5)
        before = arm.follower.motion
        for name in ("a", "b"):
            arm.wait(0.004)
            assert arm.send(ramp(-0.5, 15), name=name).start > arm.now
            assert arm.follower.command(arm.now) == pytest.approx(before.at(arm.now)[0])

    @pytest.mark.parametrize("blend_time", [0.0, 0.6])
    def test_the_difference_to_a_new_chunk_fades_out_over_the_blend_time(self, blend_time):
        arm = Arm(settings=replace(SETTINGS, blend_time=blend_time))
        arm.send([0.2] * 20)
        commands = arm.run(1.0)[:, 0]
        reached = int(np.argmax(commands > 0.199)) * arm.period
        assert reached == pytest.approx(blend_time, abs=0.05) if blend_time else reached < 0.5
        assert np.diff(commands).min() >= -1e-3
        assert commands.max() <= 0.2 + 1e-3

    def test_rows_outside_the_range_are_clamped_and_counted_by_joint(self):
        arm = Arm(position=[1.8, 0.0])
        rows = np.zeros((10, 2))
        rows[:, 0] = np.linspace(1.8, 2.25, 10)
        arm.follower.add(Chunk(arm.wall, "", 0.1, rows), arm.now, arm.wall)
        assert arm.run(1.0)[:, 0].max() == pytest.approx(2.0)
        assert arm.follower.clamped == {"joint_0": 5}

    def test_an_arm_that_sags_a_little_begins_where_it_was_commanded(self):
        arm = Arm()
        arm.send(ramp(0.3, 5))
        arm.run(1.0)
        commanded = arm.commands[-1].copy()
        arm.position = commanded - 0.05
        arm.moves = False
        arm.observe()
        assert arm.send([0.3] * 5).positions[0] == pytest.approx(commanded)

    def test_an_arm_that_was_moved_by_hand_begins_where_it_is(self):
        arm = Arm()
        arm.send(ramp(0.3, 5))
        arm.run(1.0)
        arm.position = np.array([-0.6, 0.4])
        arm.now += 0.01
        arm.observe()
        rows = np.full((5, 2), [-0.5, 0.3])
        motion = arm.follower.add(Chunk(arm.wall, "near", 0.1, rows), arm.now, arm.wall)
        assert motion.positions[0] == pytest.approx([-0.6, 0.4])

    def test_a_first_row_too_far_from_the_arm_is_refused_with_the_numbers(self):
        arm = Arm(position=[-0.6, 0.4])
        with pytest.raises(RefusedChunkError, match=r"joint_1 is at 0\.400 and the chunk begins at -0\.600"):
            arm.send([-0.6] * 5)

    def test_a_dry_run_begins_each_chunk_where_the_arm_stands(self):
        arm = Arm(settings=replace(SETTINGS, dry_run=True))
        arm.moves = False
        arm.send(ramp(0.4, 10))
        arm.run(0.5)
        assert not arm.send(ramp(0.4, 10)).positions[0].any()
        assert arm.follower.counts["deviations"] == 0


class TestOneChunkAfterTheOther:
    """With follow_time."""

    def test_the_arm_rests_after_the_time_of_a_chunk(self):
        arm = Arm(settings=ONE_BY_ONE)
        assert arm.send(ramp(1.0, 15)).end == pytest.approx(arm.now + 0.5, abs=arm.period)
        commands = arm.run(1.0)[:, 0]
        assert 0.2 < commands[-1] < 1 / 3  # row 5, less the way of braking
        assert np.ptp(commands[-20:]) == 0

    def test_a_chunk_whose_frame_has_the_arm_in_motion_is_refused(self):
        arm = Arm(settings=ONE_BY_ONE)
        motion = arm.send(ramp(1.0, 15))
        arm.run(0.8)
        with pytest.raises(
            RefusedChunkError, match=r"the arm moves until 0\.20 s after the chunk's frame"
        ) as refused:
            arm.send(ramp(0.5, 15), age=0.5)
        assert refused.value.reason == "in_motion"
        assert arm.follower.motion is motion

    def test_a_late_chunk_of_a_resting_arm_begins_with_its_first_row(self):
        arm = Arm(settings=replace(ONE_BY_ONE, blend_time=0.0))
        arm.run(1.5)
        arm.send([0.0, 0.1, 0.2, 0.3, 0.4, 0.4, 0.4], age=1.5)
        assert np.abs(arm.run(0.1)[:, 0]).max() < 0.01  # row 0; row 14, of the frame's time, would be 0.4
        assert arm.run(0.7)[-1, 0] > 0.2


class TestStops:
    def test_it_stands_within_0_3_s_of_a_stop_and_refuses_until_resume(self):
        arm = Arm()
        arm.send(ramp(1.0, 10))
        arm.run(0.5)
        arm.follower.stop(arm.now)
        arm.run(STANDS_S)
        assert np.ptp(arm.run(0.5), axis=0).max() == 0
        with pytest.raises(RefusedChunkError, match="stopped until"):
            arm.send(ramp(1.0, 10))
        assert arm.follower.mode(arm.now) is Mode.STOPPED
        arm.follower.resume(arm.wall)
        with pytest.raises(RefusedChunkError, match="before the activation or ~/resume"):
            arm.send(ramp(1.0, 10), age=0.1)
        arm.send([0.5] * 10)

    def test_it_brakes_when_the_joint_states_end(self):
        arm = Arm()
        arm.send(ramp(1.0, 15))
        arm.run(0.4)
        arm.reports = False
        arm.run(SETTINGS.max_state_age + STANDS_S)
        assert np.ptp(arm.run(0.5), axis=0).max() == 0
        assert arm.follower.counts["stale_stops"] == 1
        with pytest.raises(RefusedChunkError, match=r"joint joint_0 is 1\.\d\d s old, at most 0\.2"):
            arm.send([0.5] * 10)

    def test_an_arm_that_does_not_follow_is_stopped_with_the_numbers(self):
        arm = Arm()
        arm.moves = False
        arm.send(ramp(1.5, 15))
        arm.run(1.5)
        assert arm.follower.stopped
        assert arm.follower.problem.startswith("joint joint_0 is 0.5")
        assert arm.follower.counts["deviations"] == 1

    def test_a_jump_of_the_clock_brakes(self):
        arm = Arm()
        arm.send(ramp(1.5, 15))
        arm.run(0.5)
        arm.tick(jump=5.0)
        arm.run(STANDS_S)
        assert np.ptp(arm.run(0.5), axis=0).max() == 0
        arm.send([arm.position[0]] * 5)

    def test_late_commands_do_not_make_up_for_the_time_at_once(self):
        arm = Arm(contract(kind=FORWARD))
        arm.send(ramp(1.5, 15))
        before = arm.run(0.5)[-1]
        arm.tick(elapsed=0.4)
        assert np.abs(arm.commands[-1] - before).max() <= 2 * arm.period * LIMITS.speed + 1e-9

    def test_a_chunk_or_a_stop_after_late_commands_begins_where_the_commands_are(self):
        of = contract(joint(0, JointLimits((-1.0, 2.0), 1.0, 20.0, 2000.0, 0.5)), kind=FORWARD)
        for seed in range(60):
            rng, arm = np.random.default_rng(seed), Arm(of)
            for number in range(100):
                if rng.random() < 0.1:
                    arm.wait(rng.uniform(0, 0.1))
                    arm.observe()
                    with contextlib.suppress(RefusedChunkError):
                        arm.send(arm.position[0] + np.cumsum(rng.normal(0, 0.05, 20)), name=str(number))
                if rng.random() < 0.02:
                    arm.follower.stop(arm.now)
                elif arm.follower.stopped:
                    arm.follower.resume(arm.wall)
                arm.tick(
                    arm.period * rng.uniform(0.5, 1.5) if rng.random() < 0.95 else rng.uniform(0.02, 0.15)
                )
            steps = np.abs(np.diff(np.array(arm.commands), axis=0))
            assert steps.max() <= 2 * arm.period * 1.0 + 1e-9, seed

    def test_simulated_time_that_starts_again_forgets_the_motion(self):
        arm = Arm()
        arm.send(ramp(1.5, 15))
        arm.run(0.5)
        arm.tick(elapsed=-50.0)
        assert arm.follower.motion is None
        assert arm.follower.counts["clock_jumps"] == 1


class TestRefused:
    def test_motions_that_take_long_to_compute(self):
        with pytest.raises(
            ValueError, match=r"max_chunk_age 60 s at a rate of 50 Hz is 3000 periods of motion"
        ):
            Arm(settings=replace(SETTINGS, max_chunk_age=60.0))

    def test_before_all_joints_were_seen(self):
        arm = Arm()
        arm.follower = ArmFollower(arm.contract, SETTINGS)
        assert not arm.follower.observe(["joint_1"], [0.0], arm.now)
        with pytest.raises(RefusedChunkError, match="position of joint joint_0 was never received"):
            arm.send([0.0] * 5)

    def test_joint_states_that_are_not_finite_or_incomplete(self):
        arm = Arm()
        with pytest.raises(ValueError, match="position of nan for joint_0"):
            arm.follower.observe(["joint_0"], [math.nan], arm.now)
        with pytest.raises(ValueError, match="1 names and 0 positions"):
            arm.follower.observe(["joint_0"], [], arm.now)

    def test_an_arm_outside_its_range(self):
        arm = Arm(position=[0.0, 2.1])
        with pytest.raises(RefusedChunkError, match=r"joint_1 stands at 2\.100, its limits are -1 to 2"):
            arm.send([0.0] * 5)

    def test_degrees_that_a_contract_calls_radians(self):
        arm = Arm()
        with pytest.raises(RefusedChunkError, match=r"the chunk begins at 30\.000, at most 0\.5 apart"):
            arm.send([30.0] * 5)


def random_joint(rng: np.random.Generator, index: int, rate: float) -> Joint:
    """Return a joint of any unit; percent and end points included."""
    low = rng.uniform(-2, -0.2)
    high = low + rng.uniform(0.3, 4)
    acceleration = float(rng.uniform(1, 30))
    averaged = int(rng.integers(1, round(STANDS_S * rate) - 2))  # periods
    jerk = 2 * acceleration * rate / averaged * float(rng.uniform(1.0, 1.05))
    speed = acceleration * float(rng.uniform(0.2, 0.99)) * (STANDS_S - (averaged + 2) / rate)
    limits = JointLimits((low, high), speed, acceleration, jerk, float(rng.uniform(0.1, 0.6)))
    unit = str(rng.choice(["degrees", "radians", "metres", "percent"]))
    if unit == "percent":
        ends = (low, high) if rng.random() < 0.5 else (high, low)
        return joint(index, limits, unit=unit, end_points=EndPoints((0.0, 100.0), ends))
    sign, offset = int(rng.choice([-1, 1])), float(rng.uniform(-1, 1))
    return joint(index, limits, unit=unit, sign=sign, offset=offset, scale=float(rng.uniform(0.5, 2)))


def message_of(rng: np.random.Generator, arm: Arm, sent: list[dict]) -> dict:
    """Return a chunk's fields: mostly good, otherwise wrong, late, early or doubled."""
    if sent and rng.random() < 0.15:
        return sent[int(rng.integers(len(sent)))]
    of = arm.contract
    horizon, dt = int(rng.integers(1, 50)), float(rng.choice([0.02, 1 / 30, 0.1]))
    size = of.limits("deviation") * rng.choice([0.02, 0.2, 2.0])
    walk = np.cumsum(rng.normal(0, 1, (horizon, len(of.joints))), 0)
    steps = rng.choice([-3.0, 0.0, 3.0], (horizon, len(of.joints)))
    targets = arm.position + size * (walk if rng.random() < 0.6 else steps)
    age = rng.uniform(0, 0.3) if rng.random() < 0.8 else rng.normal(0, 3)
    names = list(of.policy_names)
    fields = {
        "stamp": arm.wall - round(age * SECOND), "request_id": str(len(sent)), "dt": dt,
        "horizon": horizon, "names": names, "units": [each.unit for each in of.joints],
        "values": of.to_policy(targets).ravel(),
    }  # fmt: skip
    wrong = rng.random()
    if wrong < 0.05:
        fields["values"] = np.where(rng.random(targets.size) < 0.3, math.nan, fields["values"])
    elif wrong < 0.08:
        fields["values"] = fields["values"] * 1e30
    elif wrong < 0.1:
        fields["dt"] = -dt
    elif wrong < 0.12:
        fields["names"] = [*names[1:], "other.pos"]
    elif wrong < 0.14:
        fields["units"] = ["steps", *fields["units"][1:]]
    return fields


def latest(followable: list[list[float]], arm: Arm, before: float) -> float:
    """Return the present time (s) if a sent chunk can be followed now, or `before`."""
    return arm.now if any(first <= arm.wall <= last for first, last in followable) else before


def check_limits(times: list[float], commands: list[np.ndarray], of: Contract, seed: int) -> None:
    """Check commands [N, J] at `times` (s), none of which may exceed a limit."""
    low, high = of.limits("position").T
    positions, steps = np.array(commands), np.diff(times)[:, None]
    assert np.isfinite(positions).all()
    assert (positions >= low - 1e-9).all(), seed
    assert (positions <= high + 1e-9).all(), seed
    speeds = np.diff(positions, axis=0) / steps
    assert (np.abs(speeds) <= of.limits("speed") + 1e-6).all(), seed
    accelerations = np.diff(speeds, axis=0) / (0.5 * (steps[1:] + steps[:-1]))
    assert (np.abs(accelerations) <= of.limits("acceleration") + 1e-6).all(), seed
    jerks = np.diff(accelerations, axis=0) / ((steps[2:] + steps[1:-1] + steps[:-2]) / 3)
    assert (np.abs(jerks) <= of.limits("jerk") + 1e-4).all(), seed


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(first, first + 250) for first in range(0, STREAMS, 250)], ids=str)
def test_limits_watchdog_and_stops_hold_for_random_streams_of_chunks(seeds):
    """The arm stands 0.3 s after the last time that any sent chunk could be followed.

    A rule beside the follower checks it from the chunks that were sent.
    """
    moved = accepted = 0
    reasons = set()
    for seed in seeds:
        rng = np.random.default_rng(seed)
        rate = float(rng.choice([20.0, 50.0, 100.0]))
        joints = [random_joint(rng, index, rate) for index in range(int(rng.integers(1, 8)))]
        of = contract(*joints, rate=rate, kind=str(rng.choice([TRAJECTORY, FORWARD])))
        settings = replace(
            SETTINGS, blend_time=float(rng.choice([0.0, 0.2, 0.8])), max_chunk_age=float(rng.uniform(0.3, 3)),
            ensemble_coeff=None if seed % 2 else 0.1 * (seed % 5 - 1),
        )  # fmt: skip
        low, high = of.limits("position").T
        arm = Arm(of, settings, rng.uniform(low, high))
        sent, followable = [], []
        times, commands = [arm.now], [arm.position.copy()]  # since the arm was last moved from outside
        jitter = float(rng.choice([0.0, 0.5]))  # of the commands' times, in periods
        busy, spoke, stopped = -math.inf, arm.now, math.inf  # last times; of the stop
        chunks_per_s = rng.choice([1.0, 5.0])
        for tick in range(TICKS):
            begin = arm.position.copy()
            elapsed = arm.period * (1 + jitter * rng.uniform(-1, 1))
            arm.tick(elapsed, jump=float(rng.normal(0, 3)) if rng.random() < 0.005 else 0.0)
            times.append(arm.now)
            commands.append(arm.commands[-1])
            stands = np.array_equal(commands[-1], commands[-2])
            late_s = STANDS_S + (1 + jitter) * arm.period + 1e-6  # two commands tell that the arm stands
            busy = latest(followable, arm, busy)
            spoke = arm.now if arm.reports else spoke
            assert stands or arm.now - busy <= late_s, seed
            assert stands or arm.now - spoke <= settings.max_state_age + late_s + (1 + jitter) * arm.period, (
                seed
            )
            assert stands or arm.now - stopped <= late_s, seed
            moved += not np.array_equal(arm.position, begin)
            while rng.random() < chunks_per_s / rate and not 90 < tick < 110:  # a gap
                arm.wait(0.2 * jitter * arm.period * rng.random())
                sent.append(message_of(rng, arm, sent))
                lasts_s = min(settings.max_chunk_age, sent[-1]["horizon"] * abs(sent[-1]["dt"]))
                span_s = np.array([-settings.future_tolerance, lasts_s])
                followable.append((sent[-1]["stamp"] + span_s * SECOND).tolist())
                busy = latest(followable, arm, busy)
                rested = not arm.follower.is_moving(arm.now)
                try:
                    motion = arm.follower.add(read_chunk(of, **sent[-1]), arm.now, arm.wall)
                except RefusedChunkError as error:
                    reasons.add(error.reason)
                    continue
                accepted += 1
                assert not motion.speeds[-1].any()
                if rested:  # it begins where the arm stands, or where it was commanded to stand
                    away = np.abs(motion.positions[0] - arm.position)
                    assert (away <= of.limits("deviation")).all(), seed
                    assert not motion.speeds[0].any()
                    if not np.array_equal(motion.positions[0], commands[-1]):
                        check_limits(times, commands, of, seed)
                        times, commands = [arm.now], [motion.positions[0]]
            if rng.random() < 0.004:
                arm.follower.stop(arm.now)
                stopped = arm.now
            elif arm.follower.stopped and rng.random() < 0.05:
                arm.follower.resume(arm.wall)
                stopped = math.inf
            if rng.random() < 0.01:
                arm.reports = not arm.reports
            if rng.random() < 0.002:
                arm.moves = not arm.moves  # a joint that is blocked
        check_limits(times, commands, of, seed)
    assert accepted > len(seeds)
    assert moved > 0.1 * TICKS * len(seeds)
    assert reasons >= set(REASONS) - {"wrong_size", "too_long", "too_old", "outside_limits", "in_motion"}
