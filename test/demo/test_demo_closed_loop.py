# SPDX-License-Identifier: Apache-2.0
"""Driving an episode without the model, and hearing its command."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm_arena.driving import expert
from edgellm_arena.driving.expert import BRISK, CAREFUL, Manner
from edgellm_arena.episodes.closed_loop import Plan, drive
from edgellm_arena.episodes.episode import Outcome, World, dead_ahead_episode, make_episode
from edgellm_arena.evaluation.play import obeyed, play
from edgellm_arena.world.unicycle import State, to_base, wrap
from edgellm_ros.runtime.transcript import Transcript


def expert_driver(world: World, manner: Manner = BRISK):
    rng = np.random.default_rng(0)

    def think(frame):
        return Plan("i drive", expert.plan(world.scene, world.state, world.episode.target, rng, manner))

    return think


def test_the_expert_reaches_the_target():
    world = World(make_episode(3))
    driven = drive(world, expert_driver(world))
    assert world.outcome is Outcome.SUCCESS
    assert driven.clipped == 0
    assert [plan.time for plan in driven.plans] == pytest.approx(0.8 * np.arange(len(driven.plans)))


@pytest.mark.slow
def test_an_episode_is_the_same_every_time():
    tracks = []
    for _ in range(2):
        world = World(make_episode(3))
        drive(world, expert_driver(world))
        tracks.append(world.track)
    assert np.array_equal(*tracks)


def test_a_plan_takes_over_after_its_latency_with_the_speed_that_it_has_by_then():
    world = World(make_episode(3))
    wanted = [0.4, 0.2]  # m/s^2 held for a whole plan

    def think(frame):
        return Plan("", np.tile([wanted[min(int(world.time / 0.8 + 0.5), 1)], 0.0], (40, 1)))

    with pytest.raises(StopIteration):  # twenty steps are enough
        drive(world, think, on_step=iter([None] * 20).__next__)
    accelerations = np.diff(world.track[:, 3]) / 0.1
    assert accelerations[:19] == pytest.approx([0] * 3 + [0.4] * 8 + [-0.4] + [0.2] * 7)


def test_the_robot_steers_back_to_the_path_of_a_plan_that_takes_over_late():
    world = World(make_episode(3))
    plans = iter([np.tile([0.4, 2.5], (40, 1))])
    frames = []

    def think(frame):
        frames.append(world.state)
        return Plan("", next(plans, np.zeros((40, 2))))

    with pytest.raises(StopIteration):
        drive(world, think, on_step=iter([None] * 35).__next__, replan_steps=20)
    start = frames[1]  # where the straight plan begins; it takes over three steps later
    late = State(*world.track[23])
    assert abs(wrap(late.heading - start.heading)) > 0.3
    x, y = to_base(start, world.track[-1, :2])
    assert x > 0.5
    assert abs(y) < 0.06


@pytest.mark.slow
def test_the_robot_brakes_on_an_answer_that_does_not_drive():
    world = World(make_episode(3))
    answers = iter([Plan("go", np.tile([0.5, 0.0], (40, 1)))])
    drive(world, lambda frame: next(answers, Plan("i do not see it", None)))
    assert world.outcome is Outcome.TIMEOUT
    assert world.track[:, 3].max() == pytest.approx(0.4)
    assert world.track[20:, 3].max() == 0


@pytest.mark.slow
def test_steps_planned_beyond_the_limits_are_counted():
    world = World(make_episode(3))
    driven = drive(world, lambda frame: Plan("", np.tile([-9.0, 0.0], (40, 1))))
    assert driven.clipped == 50 * (8 - 3)  # the plans of 40 s, each in charge for 5 steps


def test_speed_is_a_mean_over_the_time_in_which_the_robot_moves():
    world = World(make_episode(3))
    for accel in [0, 0, 1, 1, 0, -1, -1, 0, 0]:
        world.step(accel, 0)
    assert world.mean_speed() == pytest.approx((0.15 + 0.2 + 0.15) / 3)  # two steps are slower than 0.05 m/s


def test_a_robot_that_never_moved_has_no_speed():
    assert World(make_episode(3)).mean_speed() == 0


def test_the_target_does_not_count_when_the_robot_is_near_to_something():
    world = World(make_episode(4))
    drive(world, expert_driver(world))
    scene, target = world.scene, world.episode.target
    others = [solid for index, solid in enumerate(scene.solids) if index != target]
    near = [np.hypot(world.track[:, 0] - s.x, world.track[:, 1] - s.y).min() - s.radius for s in others]
    assert world.least_clearance() == pytest.approx(min(near) - 0.15)
    assert world.least_clearance() > 0.9  # it ends within 0.2 m of its target


@pytest.mark.slow
def test_a_careful_drive_is_slower_and_keeps_more_distance():
    worlds = [World(dead_ahead_episode(3)) for _ in range(2)]
    for world, manner in zip(worlds, (BRISK, CAREFUL), strict=True):
        drive(world, expert_driver(world, manner))
    brisk, careful = worlds
    assert 0.2 < careful.mean_speed() < 0.4 < brisk.mean_speed()
    assert careful.least_clearance() > brisk.least_clearance() + 0.05


def test_a_plan_that_is_too_short_is_an_error():
    world = World(make_episode(3))
    with pytest.raises(ValueError, match="the plan has 5 actions, expected at least 11"):
        drive(world, lambda frame: Plan("", np.zeros((5, 2))), replan_steps=8, latency_steps=3)


class ScriptedTranscriber:
    """Writes given words with given confidences, and keeps the sounds."""

    def __init__(self, *script: tuple[str, float]):
        self.script, self.sounds = list(script), []

    def transcribe(self, sound):
        self.sounds.append(sound)
        text, confidence = self.script.pop(0)
        return Transcript(text, "English", confidence)


def test_the_first_words_that_are_sure_enough_are_obeyed():
    transcriber = ScriptedTranscriber(("mumble", -3.0), ("go to the red box", -0.1))
    assert obeyed(make_episode(3), transcriber) == "go to the red box"
    first, again = transcriber.sounds
    assert not np.array_equal(first.samples, again.samples)
    assert obeyed(make_episode(3), ScriptedTranscriber(*[("mumble", -3.0)] * 3)) == ""


def test_words_of_a_speech_engine_are_a_typed_command():
    class Asked(Exception):
        pass

    class Runtime:
        def handle_request(self, request):
            raise Asked(request)

    transcriber = ScriptedTranscriber(("go to the red box", -0.1))
    with pytest.raises(Asked) as asked:
        play(Runtime(), make_episode(3), 0, spoken=True, transcriber=transcriber)
    (request,) = asked.value.args
    assert (request.prompt, request.audio) == ("go to the red box", ())
