# SPDX-License-Identifier: Apache-2.0
"""The speaker of an episode: fixed by its seed, never one that training has heard."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm_arena.speech.person import AFTER, BEFORE, person_of
from edgellm_arena.speech.voice import VARIANTS


def test_an_episode_sounds_the_same_every_time():
    first, again = (person_of(7).say("go to the red box") for _ in range(2))
    assert np.array_equal(first.samples, again.samples)


def test_other_episodes_have_other_people():
    assert len({person_of(seed) for seed in range(20)}) == 20


def test_people_of_the_test_split_are_none_of_training():
    assert {person_of(seed).voice.variant for seed in range(40)} <= set(VARIANTS["test"])
    assert not {person_of(seed, "train").voice.variant for seed in range(40)} & set(VARIANTS["test"])


def test_said_again_it_is_another_recording_of_the_same_length():
    person = person_of(3)
    first, again = person.say("stop"), person.say("stop", 1)
    assert len(first.samples) == len(again.samples)
    assert not np.array_equal(first.samples, again.samples)


def test_the_room_is_heard_before_and_after_the_words():
    person = person_of(5)
    assert person.say("stop").seconds > BEFORE + 0.2 + AFTER
    assert person.say("go to the green ball please").seconds > person.say("stop").seconds + 0.5


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="split must be train or test, got 'all'"):
        person_of(1, "all")
