# SPDX-License-Identifier: Apache-2.0
"""Begin and end of utterances, with a scripted detector: one character per 32 ms."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm_ros.multimodal.audio.utterance import UtteranceCutter, UtteranceSettings
from edgellm_ros.multimodal.audio.voice_activity import FRAME

PROBABILITY = {"#": 0.9, "-": 0.35, "_": 0.1}  # speech; speech if it was before; silence
SETTINGS = UtteranceSettings(
    threshold=0.4, pre_roll=0.064, hang_over=0.16, min_speech=0.064, max_length=1.0
)  # 2, 5, 2 and 31 frames


class Script:
    def __init__(self, script: str) -> None:
        self.script = script
        self.reset()

    def reset(self) -> None:
        self.position, self.resets = 0, getattr(self, "resets", -1) + 1

    def probability(self, frame: np.ndarray) -> float:
        assert frame.shape == (FRAME,)
        self.position += 1
        return PROBABILITY[self.script[self.position - 1]]


def cut(script: str, settings: UtteranceSettings = SETTINGS, piece: int = 1000):
    """Return (first frame, frames, reason) of each utterance, and the cutter."""
    cutter = UtteranceCutter(Script(script), settings)
    samples = np.arange(len(script) * FRAME, dtype=np.float32)
    cuts = [c for start in range(0, len(samples), piece) for c in cutter.add(samples[start : start + piece])]
    for c in cuts:  # the samples are those of the stream
        assert np.array_equal(c.samples, samples[c.start : c.start + len(c.samples)])
    return [(c.start / FRAME, len(c.samples) / FRAME, c.reason) for c in cuts], cutter


def test_an_utterance_has_the_pre_roll_on_both_sides_of_the_speech():
    cuts, _ = cut("______####_#_______")
    assert cuts == [(4, 10, "silence")]


def test_speech_at_the_very_start_has_no_sound_before_it():
    cuts, _ = cut("####______")
    assert cuts == [(0, 6, "silence")]


def test_silence_shorter_than_the_hang_over_does_not_end_an_utterance():
    cuts, cutter = cut("___##____##____")
    assert cuts == []
    assert cutter.speaking
    cuts, _ = cut("___##____##_____")
    assert cuts == [(1, 12, "silence")]


def test_weak_speech_does_not_begin_an_utterance_but_keeps_it():
    cuts, _ = cut("___---___##------__##______")
    assert cuts == [(7, 16, "silence")]


def test_too_little_speech_is_a_noise_and_is_counted():
    cuts, cutter = cut("____#_______##______")
    assert cuts == [(10, 6, "silence")]
    assert cutter.dropped == 1


def test_an_utterance_ends_at_the_maximum_and_the_rest_is_skipped():
    endless = "__" + 100 * "#"
    cuts, _ = cut(endless)
    assert cuts == [(0, 31, "max_length")]
    cuts, _ = cut(endless + "_____" + "##_____")
    assert cuts == [(0, 31, "max_length"), (105, 6, "silence")]


def test_the_longest_pre_roll_leaves_room_for_speech_in_the_shortest_utterance():
    tight = UtteranceSettings(0.4, pre_roll=0.5, hang_over=0.16, min_speech=0.4, max_length=1.0)
    cuts, cutter = cut(40 * "_" + 40 * "#", tight)
    assert [reason for _, _, reason in cuts] == ["max_length"]
    assert cutter.dropped == 0


def test_silence_has_no_utterance():
    cuts, cutter = cut(500 * "_")
    assert cuts == []
    assert len(cutter._frames) == 2  # nothing but the pre-roll is kept


def test_the_detector_is_reset_after_every_four_seconds_of_silence():
    script = Script(300 * "_")
    cutter = UtteranceCutter(script, SETTINGS)
    before = script.resets
    cutter.add(np.zeros(124 * FRAME, np.float32))
    assert script.resets == before
    cutter.add(np.zeros(126 * FRAME, np.float32))
    assert script.resets == before + 2


@pytest.mark.parametrize("piece", [1, 37, FRAME, FRAME + 1, 10**6])
def test_utterances_do_not_depend_on_the_size_of_pieces(piece):
    script = "_____###_###_____###---____#______####_________"
    assert cut(script, piece=piece)[0] == cut(script)[0]


class TestEnd:
    def test_completes_the_utterance_up_to_the_last_sample(self):
        cutter = UtteranceCutter(Script("____######"), SETTINGS)
        samples = np.arange(6 * FRAME + 100, dtype=np.float32)
        assert cutter.add(samples) == []
        (last,) = cutter.end()
        assert np.array_equal(last.samples, samples[2 * FRAME :])
        assert last.reason == "stream_end"

    def test_begins_a_new_stream(self):
        cutter = UtteranceCutter(Script("____####"), SETTINGS)
        cutter.add(np.zeros(3 * FRAME + 7, np.float32))
        assert cutter.end() == []
        assert cutter.add(np.zeros(6 * FRAME, np.float32)) == []
        (last,) = cutter.end()
        assert (last.start, len(last.samples)) == (2 * FRAME, 4 * FRAME)

    def test_has_no_utterance_in_a_noise(self):
        cutter = UtteranceCutter(Script("____#___"), SETTINGS)
        cutter.add(np.zeros(6 * FRAME, np.float32))
        assert cutter.end() == []
        assert cutter.dropped == 1


def test_drop_returns_whether_speech_was_dropped():
    cutter = UtteranceCutter(Script("__##"), SETTINGS)
    cutter.add(np.zeros(2 * FRAME, np.float32))
    assert not cutter.drop()
    cutter.add(np.zeros(4 * FRAME, np.float32))
    assert cutter.drop()
    assert not cutter.speaking


@pytest.mark.parametrize(
    "field, value", [("threshold", 1.0), ("pre_roll", -0.1), ("hang_over", 0.0), ("max_length", 0.5)]
)
def test_settings_out_of_range_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} must be from .* got {value}"):
        UtteranceSettings(**{field: value})
