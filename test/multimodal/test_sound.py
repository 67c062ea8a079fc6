# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from edgellm_ros.multimodal.sound import Sound


def samples(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


@pytest.mark.parametrize(
    ("wrong", "rate", "message"),
    [
        ([0.0, 0.1], 16000, r"float32 array \[N\], mono, got list"),
        (np.zeros(4), 16000, r"got float64 \[4\]"),
        (np.zeros((4, 2), np.float32), 16000, r"got float32 \[4, 2\]"),
        (samples(), 16000, "must not be empty"),
        (samples(0, np.nan), 16000, "finite.*got a peak of nan"),
        (samples(0, -np.inf), 16000, "finite.*got a peak of inf"),
        (samples(0, -32768), 16000, r"full scale -1\.\.1, got a peak of 32768"),
        (samples(0), 3999, "from 4000 to 192000 Hz, got 3999"),
        (samples(0), 192001, "from 4000 to 192000 Hz, got 192001"),
        (samples(0), 16000.0, "integer in Hz, got 16000.0"),
        (samples(0), True, "integer in Hz, got True"),
    ],
)
def test_invalid_sounds_are_refused_with_the_value(wrong, rate, message):
    with pytest.raises(ValueError, match=message):
        Sound(wrong, rate)


def test_silence_and_clipped_samples_are_sound():
    assert Sound(np.zeros(8000, np.float32), 16000).seconds == 0.5
    assert Sound(samples(1, -1, 1.02), 48000).sample_rate == 48000
