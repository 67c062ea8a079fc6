# SPDX-License-Identifier: Apache-2.0
import dataclasses
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import soxr

from edgellm_ros.multimodal.audio import processor as audio_processor
from edgellm_ros.multimodal.audio.processor import AudioProcessor
from edgellm_ros.multimodal.sound import Sound
from fixtures.reference_inputs import BANDS, FRAMES, make_sound
from fixtures.whisper_features import WHISPER

REFERENCES = json.loads((Path(__file__).parents[1] / "data" / "transformers_references.json").read_text())
CONFIG = WHISPER
PROCESSOR = AudioProcessor(CONFIG)


@pytest.mark.parametrize("reference", REFERENCES["sounds"], ids=lambda r: str(r["sound"]))
def test_features_equal_those_of_transformers(reference):
    seconds, sample_rate, loudness = reference["sound"]
    sound = Sound(make_sound(seconds, sample_rate, loudness), sample_rate)
    features = PROCESSOR.process(sound)
    assert features.shape == (128, reference["frames"])
    assert PROCESSOR.num_frames(sound) == reference["frames"]
    np.testing.assert_allclose(features[BANDS, FRAMES], reference["features"], atol=1e-4, rtol=0)


def test_tokens_of_a_sound_are_as_many_as_transformers_counts():
    counted = [CONFIG.num_tokens(frames) for frames in range(1, 321)]
    assert counted == REFERENCES["audio_tokens"]


@pytest.mark.parametrize("tokens", [1, 12, 13, 14, 26, 320])
def test_a_sound_just_below_the_limit_in_seconds_fits_and_one_at_it_does_not(tokens):
    samples = round(CONFIG.max_seconds(tokens) * 16000)
    below, at = (np.zeros(count, np.float32) for count in (samples - 1, samples))
    assert CONFIG.num_tokens(PROCESSOR.num_frames(Sound(below, 16000))) == tokens
    assert CONFIG.num_tokens(PROCESSOR.num_frames(Sound(at, 16000))) == tokens + 1


@pytest.mark.parametrize("sample_rate", [8000, 11025, 44100, 48000, 192000])
def test_a_tone_has_the_same_features_at_every_rate(sample_rate):
    def features(rate):
        time = np.arange(rate) / rate
        tone = np.sin(2 * np.pi * 700 * time) * np.sin(np.pi * time) ** 2
        return PROCESSOR.process(Sound(tone.astype(np.float32), rate))

    expected, found = features(16000), features(sample_rate)
    loud = expected > expected.max() - 1  # within 40 dB of the loudest
    assert found.shape == expected.shape == (128, 100)
    np.testing.assert_allclose(found[loud], expected[loud], atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("sample_rate", [4000, 8000, 12345, 22050, 44100, 96000])
def test_the_number_of_frames_is_known_without_resampling(sample_rate):
    for count in range(sample_rate, sample_rate + 400, 7):
        sound = Sound(np.full(count, 0.1, np.float32), sample_rate)
        assert PROCESSOR.process(sound).shape[1] == PROCESSOR.num_frames(sound)


def test_long_sounds_are_analysed_in_blocks_without_seams(monkeypatch):
    sound = Sound(make_sound(2.5, 16000), 16000)
    whole = PROCESSOR.process(sound)
    monkeypatch.setattr(audio_processor, "BLOCK", 64)
    np.testing.assert_allclose(PROCESSOR.process(sound), whole, atol=1e-6)


def test_analysing_a_minute_takes_less_memory_than_its_frames_would():
    sound = Sound(np.full(60 * 16000, 0.1, np.float32), 16000)
    tracemalloc.start()
    try:
        PROCESSOR.process(sound)
        assert tracemalloc.get_traced_memory()[1] < 6000 * 400 * 8 * 2
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("count", "sample_rate"), [(200, 16000), (1, 4000), (551, 44100)])
def test_a_sound_shorter_than_half_a_window_is_an_error_that_names_its_length(count, sample_rate):
    with pytest.raises(ValueError, match=r"a sound of 0\.0\d+ s is too short, expected more than 0\.0125 s"):
        PROCESSOR.process(Sound(np.zeros(count, np.float32), sample_rate))


def test_the_shortest_sound_has_one_frame():
    assert PROCESSOR.process(Sound(np.zeros(201, np.float32), 16000)).shape == (128, 1)


def test_samples_without_a_rate_are_no_sound():
    with pytest.raises(ValueError, match="audio must be Sound objects, got ndarray"):
        PROCESSOR.process(np.zeros(16000, np.float32))


@pytest.mark.parametrize(("count", "sample_rate"), [(1, 192000), (3, 16000), (4000, 8000), (7999, 16000)])
def test_a_sound_below_the_least_length_is_extended_with_silence(count, sample_rate):
    processor = AudioProcessor(dataclasses.replace(CONFIG, min_samples=8000))
    sound = Sound(make_sound(count / sample_rate, sample_rate), sample_rate)
    assert len(sound.samples) == count
    resampled = sound.samples if sample_rate == 16000 else soxr.resample(sound.samples, sample_rate, 16000)
    extended = np.pad(resampled, (0, 8000 - len(resampled))).astype(np.float32)
    assert processor.num_frames(sound) == 50
    np.testing.assert_array_equal(processor.process(sound), PROCESSOR.process(Sound(extended, 16000)))
    longer = Sound(make_sound(0.6, 16000), 16000)
    np.testing.assert_array_equal(processor.process(longer), PROCESSOR.process(longer))
