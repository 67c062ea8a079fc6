# SPDX-License-Identifier: Apache-2.0
"""Raw sound to samples, and errors for invalid data."""

from __future__ import annotations

import array

import numpy as np
import pytest

from edgellm_ros.multimodal.audio.pcm import PcmFormat, join

MONO = PcmFormat("S16LE", 16000, 1)


def test_s16_full_scale_is_one():
    samples = MONO.decode(np.array([0, 16384, -32768, 32767], "<i2").tobytes())
    assert samples.dtype == np.float32
    assert samples.tolist() == [0, 0.5, -1, 32767 / 32768]


def test_f32_stays_as_it_is():
    values = np.array([0.1, -1.0, 1.25], "<f4")
    assert PcmFormat("F32LE", 48000, 1).decode(values.tobytes()).tolist() == values.tolist()


def test_stereo_is_mixed_down_to_its_mean():
    data = np.array([[16384, 0], [-16384, 16384]], "<i2").tobytes()
    assert PcmFormat("S16LE", 16000, 2).decode(data).tolist() == [0.25, 0.0]


def test_arrays_of_ros_messages_are_accepted():
    assert MONO.decode(array.array("B", [0, 64])).tolist() == [0.5]


@pytest.mark.parametrize(
    "fields, words",
    [
        (("MP3", 16000, 1), "sound encoding 'MP3' is not supported; use one of S16LE, F32LE"),
        (("S16LE", 0, 1), "sample_rate must be from 4000 to 192000 Hz, got 0"),
        (("S16LE", 16000, 0), r"channels must be 1 \(mono\) or 2 \(stereo\), got 0"),
        (("S16LE", 16000, 6), "got 6"),
    ],
)
def test_an_invalid_format_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        PcmFormat(*fields)


@pytest.mark.parametrize(
    "pcm, data, words",
    [
        (MONO, b"123", r"sound has 3 bytes, not a multiple of 2: 1 channel\(s\) of 2 bytes"),
        (PcmFormat("S16LE", 16000, 2), b"123456", "6 bytes, not a multiple of 4"),
        (PcmFormat("F32LE", 16000, 1), np.array([0, np.nan], "<f4").tobytes(), "must be finite"),
        (PcmFormat("F32LE", 16000, 1), np.array([0, -np.inf], "<f4").tobytes(), "a peak of inf"),
        (PcmFormat("F32LE", 16000, 1), np.array([0, 12000], "<f4").tobytes(), "a peak of 12000"),
    ],
)
def test_data_that_cannot_be_read_is_refused(pcm, data, words):
    with pytest.raises(ValueError, match=words):
        pcm.decode(data)


class TestJoin:
    def test_pieces_become_one_sound_in_their_order(self):
        pieces = [(MONO, np.array(part, "<i2").tobytes()) for part in ([16384], [-16384, 0])]
        sound = join(pieces)
        assert sound.samples.tolist() == [0.5, -0.5, 0]
        assert sound.sample_rate == 16000

    def test_pieces_of_two_formats_are_refused(self):
        with pytest.raises(
            ValueError, match=r"chunk 1 is S16LE at 8000 Hz with 1 .* but chunk 0 is S16LE at"
        ):
            join([(MONO, b"00"), (PcmFormat("S16LE", 8000, 1), b"00")])

    @pytest.mark.parametrize("pieces", [[], [(MONO, b"")]])
    def test_joining_no_samples_is_refused(self, pieces):
        with pytest.raises(ValueError, match=r"at least one chunk|the sound is empty"):
            join(pieces)
