# SPDX-License-Identifier: Apache-2.0
"""What one hears in an episode."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm_arena.ros.soundtrack import motor_sound, soundtrack
from edgellm_arena.speech.rooms import MICROPHONE_RATE
from edgellm_arena.world.unicycle import DT
from edgellm_ros.multimodal.sound import Sound

NO_ANSWER = np.zeros(0, np.int16)


def loudness(samples: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(samples))))


def pitch(samples: np.ndarray) -> float:
    """Return the frequency of the largest amplitude, in Hz."""
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return float(np.argmax(spectrum) * MICROPHONE_RATE / len(samples))


def test_the_motor_is_silent_while_the_robot_stands():
    speeds = np.concatenate([np.zeros(20), np.full(20, 0.8)])
    sound = motor_sound(speeds)
    assert len(sound) == round(40 * DT * MICROPHONE_RATE)
    half = round(19 * DT * MICROPHONE_RATE)
    assert not sound[:half].any()
    assert loudness(sound[-half:]) > 0.01


def test_the_motor_hums_higher_at_a_higher_speed():
    slow, fast = (pitch(motor_sound(np.full(30, speed))) for speed in (0.3, 1.0))
    assert slow == pytest.approx(55 + 27, abs=3)
    assert fast == pytest.approx(55 + 90, abs=3)


def test_the_drive_follows_the_command():
    command = Sound(np.full(1000, 0.25, np.float32), MICROPHONE_RATE)
    sound = soundtrack(command, NO_ANSWER, MICROPHONE_RATE, np.zeros(10))
    assert sound.sample_rate == MICROPHONE_RATE
    assert np.array_equal(sound.samples[:1000], command.samples)
    assert len(sound.samples) == 1000 + round(10 * DT * MICROPHONE_RATE)
    assert not sound.samples[1000:].any()


def test_the_answer_is_heard_to_its_end_at_its_own_speed():
    time = np.arange(2 * 22050) / 22050
    answer = (8000 * np.sin(2 * np.pi * 440 * time)).astype(np.int16)
    sound = soundtrack(None, answer, 22050, np.zeros(5))
    assert len(sound.samples) == pytest.approx(2 * MICROPHONE_RATE, abs=2)
    assert pitch(sound.samples) == pytest.approx(440, abs=1)
    assert np.abs(sound.samples).max() == pytest.approx(8000 / 32768, rel=0.02)


def test_loud_sounds_together_do_not_leave_full_scale():
    answer = np.full(16000, 32767, np.int16)
    sound = soundtrack(None, answer, MICROPHONE_RATE, np.full(10, 2.0))
    assert np.abs(sound.samples).max() <= 1.0
