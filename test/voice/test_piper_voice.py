# SPDX-License-Identifier: Apache-2.0
"""Piper voices: ids, sound, files that cannot be used, texts of all kinds."""

from __future__ import annotations

import time

import numpy as np
import pytest

from edgellm_ros.voice.phonemes import phoneme_ids, phonemes, runs
from edgellm_ros.voice.piper_voice import MAX_PHONEMES, PiperVoice
from edgellm_ros.voice.voice import open_voice, speak, spoken_pieces
from fixtures.tiny_voice import PER_ID, RATE, SYMBOLS, random_text, write_tiny_voice

TEXT = "I see a red box. It is two metres away, to my left."


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_voice(tmp_path_factory.mktemp("voice"))


@pytest.fixture(scope="module")
def joe(published_voice):
    return PiperVoice(published_voice, noise_scale=0.0)


def ids_heard(samples: np.ndarray) -> list[int]:
    """Return the ids whose tones are in the sound of a tiny voice."""
    frames = samples[: len(samples) // PER_ID * PER_ID].reshape(-1, PER_ID)
    loud = frames[np.abs(frames).max(axis=1) > 1000]
    spectrum = np.abs(np.fft.rfft(loud, 16 * PER_ID, axis=1))
    return [round((peak * RATE / (16 * PER_ID) - 100) / 10) for peak in spectrum.argmax(axis=1)]


def test_phonemes_keep_the_marks_between_clauses():
    assert (
        phonemes("Hello, how are you? I'm fine: thanks!", "en-us")
        == "həlˈoʊ, hˈaʊ ɑːɹ juː? aɪm fˈaɪn: θˈæŋks!"
    )
    assert phonemes('He said "yes." Then 3.5', "en-us") == "hiː sˈɛd jˈɛs. ðˈɛn θɹˈiː pɔɪnt fˈaɪv"


def test_phonemes_follow_the_language():
    assert phonemes("die Katze", "de").startswith("diː")
    assert phonemes("die Katze", "en-us").startswith("dˈaɪ")


def test_ids_are_begin_then_each_phoneme_with_a_pad_then_end():
    table = {"^": [1], "_": [0], "$": [2], "a": [14], "b": [15]}
    assert phoneme_ids("abxa", table) == ([1, 14, 0, 15, 0, 14, 0, 2], 1)


def test_the_model_gets_these_ids(tiny):
    samples, rate = speak(PiperVoice(tiny), "go")
    assert rate == RATE
    table = {symbol: number for number, symbol in enumerate(SYMBOLS)}
    expected = [table["^"]]
    for phoneme in phonemes("go", "en-us"):
        expected += [table[phoneme], table["_"]]
    assert ids_heard(samples) == [*expected, table["$"]]


def test_long_phonemes_are_cut_into_runs():
    text = ("ab, cd " * 100).strip()
    cut = list(runs(text, 50))
    assert max(map(len, cut)) <= 50
    assert " ".join(cut) == text
    assert all(run.endswith((",", "cd")) for run in cut)
    assert list(map(len, runs("a" * 120, 50))) == [50, 50, 20]


def test_pieces_of_the_sound_are_bounded(tiny):
    pieces = list(spoken_pieces(PiperVoice(tiny), "word " * 2000))
    assert len(pieces) > 20
    assert max(map(len, pieces)) <= (2 * MAX_PHONEMES + 2) * PER_ID + RATE


def test_unknown_phonemes_are_counted_and_skipped(tmp_path):
    ids = {symbol: [number] for number, symbol in enumerate(SYMBOLS) if symbol != "ɹ"}
    voice = PiperVoice(write_tiny_voice(tmp_path, phoneme_id_map=ids))
    whole, _ = speak(PiperVoice(write_tiny_voice(tmp_path)), "red")
    samples, _ = speak(PiperVoice(write_tiny_voice(tmp_path, phoneme_id_map=ids)), "red")
    assert speak(voice, "red rock")[0].size
    assert voice.unknown_phonemes == 2
    assert len(whole) - len(samples) == 2 * PER_ID


@pytest.mark.parametrize("text", ["", " ", "...", "😀", "\x00\x07", "```\ncode\n```"])
def test_a_text_with_nothing_to_say_has_no_samples(tiny, text):
    samples, rate = speak(PiperVoice(tiny), text)
    assert (samples.size, samples.dtype, rate) == (0, np.int16, RATE)


@pytest.mark.slow
def test_texts_of_all_kinds_are_spoken(tiny):
    """Nothing crashes or takes long; 1,000 texts took 90 s of processor time."""
    rng = np.random.default_rng(11)
    voices = PiperVoice(tiny), open_voice("espeak")
    for _ in range(60):
        text = random_text(rng)[:1500]
        for voice in voices:
            began = time.process_time()
            assert all(piece.size <= 90 * voice.sample_rate for piece in spoken_pieces(voice, text)), text
            assert time.process_time() - began < 5, text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"espeak": {}}, "tiny.onnx.json: no key espeak.voice"),
        ({"espeak": {"voice": "en-mars"}}, "tiny.onnx.json: espeak.voice: espeak-ng has no voice 'en-mars'"),
        ({"audio": {"sample_rate": "fast"}}, "audio.sample_rate is 'fast', expected a number from 4000"),
        ({"phoneme_type": "text"}, "phoneme_type is 'text', expected espeak"),
        ({"phoneme_id_map": {"_": [0], "^": [1]}}, "phoneme_id_map has no '\\$'"),
        ({"phoneme_id_map": {"a": [-1]}}, "phoneme_id_map.'a' is \\[-1\\], expected a list of ids"),
        (
            {"inference": {"noise_scale": 1e9}},
            "inference.noise_scale is 1000000000.0, expected a number from 0",
        ),
    ],
)
def test_settings_that_cannot_be_used_are_refused(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        PiperVoice(write_tiny_voice(tmp_path, **changes))


def test_files_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.onnx: no such file, expected the MODEL\.onnx"):
        PiperVoice(tmp_path / "none.onnx")
    path = write_tiny_voice(tmp_path)
    path.write_bytes(b"not a model")
    with pytest.raises(ValueError, match=r"tiny\.onnx: not a model that ONNX Runtime loads"):
        PiperVoice(path)
    path.with_name("tiny.onnx.json").write_text("[")
    with pytest.raises(ValueError, match=r"tiny\.onnx\.json: not valid JSON"):
        PiperVoice(path)


def test_espeak_speaks_without_a_model():
    samples, rate = speak(open_voice("espeak"), TEXT)
    assert rate == 22050
    assert 2 < len(samples) / rate < 6
    german, _ = speak(open_voice("espeak:de"), TEXT)
    assert not np.array_equal(german[: len(samples)], samples[: len(german)])
    with pytest.raises(ValueError, match="no voice 'xx-none'"):
        open_voice("espeak:xx-none")


@pytest.mark.slow
class TestPublishedVoice:
    def test_the_sound_fits_the_text(self, joe):
        """English has 15 to 20 characters a second; a failure hums, clips or is silent."""
        samples, rate = speak(joe, TEXT)
        seconds = len(samples) / rate
        assert rate == 22050
        assert len(TEXT) / 25 < seconds < len(TEXT) / 9
        values = samples / 32768
        assert np.abs(values).max() < 0.95  # no clipping
        assert abs(values.mean()) < 0.01
        level = np.sqrt((values[: len(values) // 220 * 220].reshape(-1, 220) ** 2).mean(axis=1))
        speech = level > 0.02
        assert 0.5 < speech.mean() < 0.95
        assert 0.15 < longest(~speech) / 100 < 0.8  # the pause between the sentences
        assert not joe.unknown_phonemes

    def test_without_noise_the_sound_repeats(self, joe, published_voice):
        assert np.array_equal(speak(joe, "I see a red box.")[0], speak(joe, "I see a red box.")[0])
        noisy = PiperVoice(published_voice)
        assert not np.array_equal(speak(noisy, "A box.")[0], speak(noisy, "A box.")[0])

    def test_the_first_sound_is_there_soon(self, joe):
        """Processor time of two cores: other load changes it less than elapsed time."""
        times = []
        for sentence in ("I see a red box.", "The robot stands in front of a large", "You are welcome!"):
            began = time.process_time()
            next(joe.sounds(sentence))
            times.append(time.process_time() - began)
        assert sorted(times)[1] < 0.4 * 2


def longest(flags: np.ndarray) -> int:
    """Return the length of the longest run of true values that does not end the sound."""
    inner = "".join("1" if flag else "0" for flag in flags).strip("1")
    return max(map(len, inner.split("0")))
