# SPDX-License-Identifier: Apache-2.0
"""German answers: right by the grammar, and read back."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm_arena.driving.expert import BRISK, CAREFUL
from edgellm_arena.episodes.situation import sample_situations
from edgellm_arena.words.german import is_german, to_english, to_german


@pytest.mark.parametrize(
    ("english", "german"),
    [
        (
            "the red box is ahead on the left, about half a metre away. i am there and stop.",
            "die rote kiste ist vorne links, etwa einen halben meter entfernt. ich bin da und halte an.",
        ),
        (
            "the green ball is straight ahead, about one and a half metres away. the way is clear. "
            "i drive there carefully and stop in front of the ball.",
            "der grüne ball ist geradeaus, etwa eineinhalb meter entfernt. der weg ist frei. "
            "ich fahre vorsichtig hin und halte vor dem ball an.",
        ),
        (
            "i see a blue cone on the left, a grey obstacle on the right and a red box straight ahead.",
            "ich sehe einen blauen kegel links, ein graues hindernis rechts und eine rote kiste geradeaus.",
        ),
        (
            "i do not see a yellow cylinder. i look around.",
            "ich sehe keinen gelben zylinder. ich sehe mich um.",
        ),
        ("i do not see a box.", "ich sehe keine kiste."),
    ],
)
def test_answers_are_translated(english, german):
    assert to_german(english) == german
    assert to_english(german) == english


@pytest.mark.slow
@pytest.mark.parametrize("manner", [BRISK, CAREFUL])
def test_every_answer_is_translated_whole_and_read_back(manner):
    for moment in sample_situations(np.random.default_rng(0), 150, manner=manner):
        german = to_german(moment.answer)
        assert to_english(german) == moment.answer
        assert is_german(german)
        assert not is_german(moment.answer)


@pytest.mark.parametrize(
    "text",
    [
        "der rote kiste ist links.",
        "ich sehe eine roten ball links.",
        "die rote kiste ist vorne links, etwa two metres away.",
        "i stop.",
    ],
)
def test_wrong_or_mixed_german_is_told(text):
    assert not is_german(text)
