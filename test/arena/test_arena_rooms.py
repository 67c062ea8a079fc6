# SPDX-License-Identifier: Apache-2.0
"""What the microphone records: voice, reverberation, noise, at 16 kHz and 16 bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgellm_arena.speech.rooms import KINDS, MICROPHONES, NOISES, Room, hear, sample_room
from edgellm_ros.multimodal.sound import Sound

QUIET = Room(0.02, 60.0, 8000, "hiss", 120.0, (0, 8000), -6.0, seed=0)


def tone(hertz: float, rate: int = 16000, seconds: float = 1.0) -> Sound:
    time = np.arange(round(seconds * rate)) / rate
    return Sound((0.5 * np.sin(2 * np.pi * hertz * time)).astype(np.float32), rate)


def record(sound: Sound, room: Room, **silence) -> np.ndarray:
    return hear(sound, room, np.random.default_rng(0), **silence).samples


def decibels(signal: np.ndarray) -> float:
    return 10 * np.log10(np.mean(signal.astype(np.float64) ** 2) + 1e-20)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 24500, 48000])
def test_a_tone_keeps_its_frequency_at_every_rate(rate):
    heard = record(tone(1000, rate), QUIET, before=0.0, after=0.0)
    assert len(heard) == 16000
    reference = np.sin(2 * np.pi * 1000 * np.arange(16000) / 16000)
    inner = slice(1000, 15000)
    np.testing.assert_allclose(heard[inner], reference[inner] * 10 ** (-6 / 20), atol=0.01)


def test_frequencies_above_8_khz_are_lost_and_not_folded_back():
    sound = Sound(tone(1000, 48000).samples + tone(12000, 48000).samples, 48000)
    spectrum = np.abs(np.fft.rfft(record(sound, QUIET, before=0.0, after=0.0)))
    assert spectrum[3900:4100].max() < 1e-2 * spectrum[1000]


def test_the_sound_stands_between_the_silences_asked_for():
    heard = record(tone(500), QUIET, before=0.3, after=0.2)
    assert len(heard) == 1.5 * 16000
    assert np.abs(heard[:4700]).max() < 1e-2 < 0.4 < np.abs(heard[4900:5200]).max()
    assert np.abs(heard[-3000:]).max() < 1e-2


@pytest.mark.parametrize("noise", NOISES)
def test_noise_is_as_loud_as_the_room_says(noise):
    room = replace(QUIET, noise=noise, noise_db=12.0)
    heard = record(tone(1000), room, before=1.0, after=0.0)
    assert decibels(heard[16000:]) - decibels(heard[:15900]) == pytest.approx(12, abs=2)


def test_the_microphone_passes_its_band_only():
    sounds = [tone(hertz).samples for hertz in (60, 1000, 6500)]
    mixed = Sound(np.sum(sounds, 0, dtype=np.float32), 16000)
    heard = record(mixed, replace(QUIET, band=(300, 4500)), before=0.0, after=0.0)
    low, middle, high = (np.abs(np.fft.rfft(heard))[k] for k in (60, 1000, 6500))
    assert low < 0.1 * middle
    assert high < 0.1 * middle


def test_the_room_rings_for_its_reverberation_time():
    click = np.zeros(16000, np.float32)
    click[0] = 0.9
    room = replace(QUIET, reverberation_time=0.5, direct_db=0.0)
    heard = record(Sound(click, 16000), room, before=0.0, after=0.0)
    energy = np.cumsum(heard[::-1].astype(np.float64) ** 2)[::-1]
    assert np.sum(heard[16:] ** 2) == pytest.approx(np.sum(heard[:16] ** 2), rel=0.2)
    decay = 10 * np.log10(energy / energy[0] + 1e-20)
    a, b = (int(np.flatnonzero(decay < level)[0]) for level in (-10, -30))  # T20, as in ISO 3382
    assert 3 * (b - a) / 16000 == pytest.approx(0.5, rel=0.2)


def test_too_loud_clips_and_samples_have_16_bits():
    heard = record(tone(200), replace(QUIET, peak_db=6.0), before=0.0, after=0.0)
    assert (heard == heard.max()).sum() > 1000
    assert heard.max() < 1
    np.testing.assert_array_equal(heard * 32768, np.rint(heard * 32768))


def test_recordings_follow_from_room_and_generator():
    room = sample_room(np.random.default_rng(5))
    first, again, other = (hear(tone(300), room, np.random.default_rng(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.samples, again.samples)
    assert first.sample_rate == 16000
    assert not np.array_equal(first.samples, other.samples)


def test_silence_is_recorded_as_noise():
    silent = Sound(np.zeros(8000, np.float32), 16000)
    heard = record(silent, replace(QUIET, noise_db=20.0))
    assert 0 < np.abs(heard).max() < 0.2


def test_the_splits_share_no_kind_of_room_noise_or_microphone():
    assert not set(KINDS["train"]) & set(KINDS["test"])
    assert not set(MICROPHONES["train"]) & set(MICROPHONES["test"])
    rng = np.random.default_rng(0)
    noises = [{sample_room(rng, split).noise for _ in range(200)} for split in ("train", "test")]
    assert not noises[0] & noises[1]
    assert noises[0] | noises[1] == set(NOISES)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"noise": "song"}, "song"),
        ({"reverberation_time": 0.0}, "reverberation_time"),
        ({"band": (4000, 300)}, "4000, 300"),
    ],
)
def test_rooms_that_make_no_sense_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        replace(QUIET, **change)


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="'dev'"):
        sample_room(np.random.default_rng(0), "dev")
