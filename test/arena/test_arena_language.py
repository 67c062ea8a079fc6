# SPDX-License-Identifier: Apache-2.0
"""What people say, what the robot answers, and whether it is true."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm_arena.episodes.episode import Episode
from edgellm_arena.episodes.scoring import check, is_true, names_target
from edgellm_arena.episodes.situation import Situation, sample_situations
from edgellm_arena.words import answers
from edgellm_arena.words.answers import Answer, Mention, parse_answer
from edgellm_arena.words.language import KINDS, TEMPLATES, Command, sample_command, vocabulary
from edgellm_arena.world.scene import Scene, make_solid, random_look
from edgellm_arena.world.unicycle import State


def two_solids() -> Scene:
    rng = np.random.default_rng(0)
    return Scene(
        (make_solid(rng, "box", "red", 2.0, 0.6), make_solid(rng, "ball", "blue", 1.2, -0.5)),
        random_look(rng),
    )


def situation(kind: str, target: int | None, seen=(0, 1), command: Command | None = None) -> Situation:
    named = {"color": "red", "shape": "box"} if kind in ("go", "where") else {}
    command = command or Command("", kind, **named)
    return Situation(
        two_solids(), State(), np.zeros((8, 2)), command, "", False, None, target, seen, False, "start"
    )


def texts(kind: str, split: str, count: int = 400) -> set[str]:
    rng = np.random.default_rng(3)
    named = ("red", "box") if kind in ("go", "where") else (None, None)
    found = (sample_command(rng, kind, *named, split=split).text for _ in range(count))
    return {"".join(c for c in t.lower() if c not in ".,:?!") for t in found}


@pytest.mark.parametrize("kind", KINDS)
def test_there_are_many_ways_to_say_each_thing_and_the_splits_share_none(kind):
    train, test = texts(kind, "train"), texts(kind, "test")
    assert len(train) >= 50
    assert len(test) >= 20
    assert not train & test


def test_commands_name_the_thing():
    rng = np.random.default_rng(0)
    for _ in range(50):
        command = sample_command(rng, "go", "purple", "ball")
        assert any(word in command.text for word in ("purple", "violet"))
        assert any(word in command.text for word in ("ball", "sphere"))
        assert (command.kind, command.color, command.shape) == ("go", "purple", "ball")


def test_commands_use_known_words_only():
    rng = np.random.default_rng(1)
    words = vocabulary()
    for kind in KINDS:
        named = ("green", "cylinder") if kind in ("go", "where") else (None, None)
        for _ in range(100):
            text = sample_command(rng, kind, *named).text.lower()
            assert {w.strip(".,:?!") for w in text.split()} <= words


@pytest.mark.parametrize(
    ("kind", "color", "shape", "words"),
    [
        ("dance", None, None, "dance"),
        ("go", None, None, "go"),
        ("stop", "red", "box", "stop"),
        ("go", "grey", "box", "grey box"),
    ],
)
def test_commands_that_make_no_sense_are_refused(kind, color, shape, words):
    with pytest.raises(ValueError, match=words):
        sample_command(np.random.default_rng(0), kind, color, shape)


def test_go_says_where_the_target_is_and_what_comes_next():
    scene = two_solids()
    assert answers.go_answer(scene, State(), 0, blocked=False) == (
        "the red box is ahead on the left, about two metres away. "
        "the way is clear. i drive there and stop in front of the box."
    )
    assert answers.go_answer(scene, State(), 1, blocked=True) == (
        "the blue ball is ahead on the right, about one metre away. "
        "an obstacle is in the way. i drive around it and stop in front of the ball."
    )
    near = State(2.0 - scene.solids[0].radius - 0.3, 0.6)
    assert answers.go_answer(scene, near, 0, blocked=False) == (
        "the red box is straight ahead, about half a metre away. i am there and stop."
    )


def test_describe_goes_from_left_to_right():
    assert answers.describe_answer(two_solids(), State(), (1, 0)) == (
        "i see a red box on the left and a blue ball on the right."
    )
    assert answers.describe_answer(two_solids(), State(), ()) == "i see nothing here."


@pytest.mark.parametrize(
    ("bearing", "side"), [(8.1, "left"), (7.9, "ahead"), (-7.9, "ahead"), (-8.1, "right"), (0, "ahead")]
)
def test_sides(bearing, side):
    assert answers.side_of(bearing) == side


@pytest.mark.parametrize(("metres", "said"), [(0.2, 0.5), (0.74, 0.5), (0.76, 1.0), (1.4, 1.5), (9.0, 5.0)])
def test_distances_are_said_in_half_metres(metres, said):
    assert answers.distance_step(metres) == said


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (
            "the red box is ahead on the left, about one and a half metres away. the way is clear.",
            Answer((Mention("red", "box", "left", 1.5),), way="clear"),
        ),
        (
            "the blue ball is straight ahead, about half a metre away. i am there and stop.",
            Answer((Mention("blue", "ball", "ahead", 0.5),), way="there", stops=True),
        ),
        (
            "i do not see a green cone. i look around.",
            Answer((Mention("green", "cone"),), seen=False, looks=True),
        ),
        ("i do not see a cone.", Answer((Mention(None, "cone"),), seen=False)),
        (
            "i see a red box on the left, a grey obstacle straight ahead and a blue ball on the right.",
            Answer(
                (
                    Mention("red", "box", "left"),
                    Mention("grey", "obstacle", "ahead"),
                    Mention("blue", "ball", "right"),
                )
            ),
        ),
        ("i stop.", Answer((), stops=True)),
        ("mumble", Answer(())),
    ],
)
def test_answers_are_read_back(text, answer):
    assert parse_answer(text) == answer


@pytest.mark.slow
def test_the_right_answer_is_true_in_every_part():
    for split in ("train", "test"):
        for moment in sample_situations(np.random.default_rng(5), 80, split):
            assert is_true(moment.answer, moment), (moment.command, moment.answer)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("the red box is ahead on the left, about two metres away. the way is clear.", set()),
        (
            "the red box is ahead on the left, about two and a half metres away. the way is clear.",
            {"distance"},
        ),
        ("the blue box is ahead on the left, about two metres away. the way is clear.", {"color"}),
        ("the red ball is ahead on the left, about two metres away. the way is clear.", {"shape"}),
        ("the red box is straight ahead, about two metres away. the way is clear.", {"side"}),
        ("the red box is ahead on the left, about two metres away. an obstacle is in the way.", {"way"}),
        ("i do not see a red box. i look around.", {"seen", "side", "distance", "way"}),
        ("", {"seen", "color", "shape", "side", "distance", "way"}),
    ],
)
def test_each_wrong_part_of_an_answer_is_found(text, wrong):
    assert {part for part, true in check(text, situation("go", 0)).items() if not true} == wrong


def test_a_thing_that_is_not_there_must_not_be_seen():
    absent = situation("go", None)
    assert is_true("i do not see a red box. i look around.", absent)
    assert not is_true("i do not see a red box. i stop.", absent)
    assert not is_true("the red box is ahead on the left, about two metres away.", absent)
    assert not is_true("i do not see a blue box. i look around.", absent)


def test_descriptions_are_compared_as_sets():
    moment = situation("describe", None)
    assert is_true("i see a blue ball on the right and a red box on the left.", moment)
    assert not check("i see a blue ball on the left and a red box on the right.", moment)["side"]
    assert not check("i see a red box on the left.", moment)["count"]
    assert not check("i see a red box on the left and a blue cone on the right.", moment)["shape"]


def test_within_a_degree_and_a_half_of_a_boundary_both_words_are_true():
    assert answers.side_is_true("left", 7.0)
    assert answers.side_is_true("ahead", 9.0)
    assert not answers.side_is_true("left", 6.0)
    assert not answers.side_is_true(None, 8.0)


def test_every_template_of_a_named_thing_has_a_place_for_it():
    assert all("{x}" in template for kind in ("go", "where") for template in TEMPLATES[kind])
    assert not any("{" in template for kind in ("describe", "stop") for template in TEMPLATES[kind])


@pytest.mark.parametrize(
    "text, understood",
    [
        ("die rote kiste ist geradeaus, etwa zwei meter entfernt. der weg ist frei. ich fahre hin", True),
        ("ich sehe keine kiste. ich sehe mich um.", True),
        ("der rote ball ist geradeaus, etwa zwei meter entfernt.", False),
        ("der rote kiste ist geradeaus, etwa zwei meter entfernt.", False),  # wrong German
        ("the red box is straight ahead, about two metres away. the way is clear. i drive there", True),
        ("the red box is on the left, about five metres away.", True),
        ("i do not see a red box. i look around.", True),
        ("i do not see a box. i look around.", True),
        ("the blue box is straight ahead, about two metres away.", False),
        ("the red ball is straight ahead, about two metres away.", False),
        ("i see a red box straight ahead and a blue ball on the left.", False),
        ("i stop.", False),
    ],
)
def test_a_command_is_understood_if_the_answer_names_its_thing_and_no_other(text, understood):
    scene = two_solids()
    index = next(i for i, solid in enumerate(scene.solids) if (solid.color, solid.shape) == ("red", "box"))
    command = Command("go to the box", "go", None, "box")
    assert names_target(text, Episode(0, "random", scene, State(), command, index)) is understood
