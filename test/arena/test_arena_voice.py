# SPDX-License-Identifier: Apache-2.0
"""Speech from sentences: the same for the same voice; the splits share no speaker."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from benchmarks.memory import read_memory
from edgellm_arena.speech.voice import ACCENTS, ESPEAK_RATE, VARIANTS, Voice, sample_voice, speak

SENTENCE = "Robot, go to the red box, please."


def pitch_hz(samples: np.ndarray, rate: int) -> float:
    """The strongest period between 60 and 400 Hz of the autocorrelation."""
    spectrum = np.fft.rfft(samples, 2 * len(samples))
    likeness = np.fft.irfft(np.abs(spectrum) ** 2)[: rate // 60]
    return rate / (rate // 400 + int(likeness[rate // 400 :].argmax()))


@pytest.mark.parametrize("variant", ["m3", "f1", "klatt", "klatt6"])
def test_a_sentence_sounds_the_same_whatever_was_said_before(variant):
    voice = Voice("en-us", variant)
    first = speak(SENTENCE, voice)
    speak("What do you see?", Voice("en-gb-scotland", "f4"))
    again = speak(SENTENCE, voice)
    np.testing.assert_array_equal(again.samples, first.samples)


def test_threads_may_speak_at_once():
    voices = [Voice("en-us", variant) for variant in ("m1", "m2", "f1", "f2")]
    alone = [speak(SENTENCE, voice).samples for voice in voices]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda voice: speak(SENTENCE, voice).samples, voices))
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_every_speaker_says_it_differently():
    said = {
        speak("go", Voice(accent, variant)).samples.tobytes()
        for split in ("train", "test")
        for accent in ("en-us", "en-gb-scotland")
        for variant in VARIANTS[split]
    }
    assert len(said) == 2 * sum(len(variants) for variants in VARIANTS.values())


@pytest.mark.parametrize("accent", dict.fromkeys(ACCENTS["train"] + ACCENTS["test"]))
def test_every_accent_speaks_for_a_sentences_time(accent):
    assert 1.5 < speak(SENTENCE, Voice(accent)).seconds < 3.5


def test_speed_and_pauses_change_the_length():
    usual, fast = speak(SENTENCE, Voice()), speak(SENTENCE, Voice(words_per_minute=250))
    slow = speak(SENTENCE, Voice(word_gap=10))
    assert fast.seconds < 0.8 * usual.seconds < usual.seconds < slow.seconds - 0.3


def test_pitch_rises_with_the_setting_and_with_a_smaller_person():
    low, high = (speak("ah", Voice(pitch=pitch, pitch_range=0)) for pitch in (20, 80))
    assert pitch_hz(high.samples, ESPEAK_RATE) > 1.3 * pitch_hz(low.samples, ESPEAK_RATE)
    small = speak("ah", Voice(pitch=20, pitch_range=0, sample_rate=24500))
    assert pitch_hz(small.samples, small.sample_rate) == pytest.approx(
        pitch_hz(low.samples, ESPEAK_RATE) * 24500 / ESPEAK_RATE, rel=0.02
    )


def test_punctuation_is_not_read_out():
    plain = speak("robot stop", Voice()).seconds
    assert speak("Robot: stop!", Voice()).seconds < plain + 0.6
    assert speak("robot colon stop exclamation mark", Voice()).seconds > plain + 0.8


def test_the_splits_share_no_speaker_and_the_test_has_an_accent_of_its_own():
    assert not set(VARIANTS["train"]) & set(VARIANTS["test"])
    assert set(ACCENTS["test"]) - set(ACCENTS["train"])
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        voices = [sample_voice(rng, split) for _ in range(300)]
        assert {voice.variant for voice in voices} == set(VARIANTS[split])
        assert {voice.accent for voice in voices} == set(ACCENTS[split])


def test_voices_follow_from_the_seed():
    drawn = [[sample_voice(np.random.default_rng(seed)) for _ in range(3)] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    ("voice", "words"),
    [({"accent": "en-mars"}, "en-mars"), ({"variant": "unknown"}, "unknown")],
)
def test_speakers_that_do_not_exist_are_refused(voice, words):
    with pytest.raises(ValueError, match=words):
        speak(SENTENCE, Voice(**voice))


@pytest.mark.parametrize("text", ["", "  ", "..."])
def test_nothing_cannot_be_said(text):
    with pytest.raises(ValueError, match="nothing to say"):
        speak(text, Voice())


@pytest.mark.parametrize(
    "setting",
    [
        {"words_per_minute": 20},
        {"pitch": 100},
        {"pitch_range": -1},
        {"word_gap": 99},
        {"sample_rate": 8000},
    ],
)
def test_settings_out_of_range_are_refused(setting):
    with pytest.raises(ValueError, match=f"{next(iter(setting))}.*{next(iter(setting.values()))}"):
        Voice(**setting)


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="'dev'"):
        sample_voice(np.random.default_rng(0), "dev")


def allocated_per_sentence(sentences: list[str], voice: Voice) -> float:
    """Bytes that are still there after these sentences, on average."""
    before = read_memory().allocated
    for sentence in sentences:
        speak(sentence, voice)
    return (read_memory().allocated - before) / len(sentences)


@pytest.mark.slow
def test_speaking_leaves_no_memory_behind():
    voice = Voice()
    allocated_per_sentence(["go"] * 20, voice)
    assert allocated_per_sentence(["go"] * 40, voice) < 500


@pytest.mark.slow
def test_sentences_of_other_lengths_leave_no_memory_behind():
    voice = Voice()
    allocated_per_sentence([str(number) for number in range(20)], voice)
    assert allocated_per_sentence([str(number) for number in range(20, 60)], voice) < 500
