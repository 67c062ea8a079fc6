# SPDX-License-Identifier: Apache-2.0
"""Pieces of speech to utterances, with the real detector.

The voices are synthetic and the rooms are noisy.
"""

from __future__ import annotations

import numpy as np
import pytest
import soxr

from edgellm_arena.speech.rooms import hear, sample_room
from edgellm_arena.speech.voice import sample_voice, speak
from edgellm_ros.multimodal.audio.sound_stream import SoundStream, Utterance
from edgellm_ros.multimodal.audio.utterance import UtteranceSettings
from edgellm_ros.multimodal.audio.voice_activity import VoiceActivity

RATE = 16000
START = 5_000_000_000  # stamp of the first sample, ns


def spoken(text: str, seed: int = 0) -> np.ndarray:
    """Return a recording: 0.5 s of the room, the sentence, 1.2 s of the room."""
    rng = np.random.default_rng(seed)
    return hear(speak(text, sample_voice(rng, "test")), sample_room(rng, "test"), rng, 0.5, 1.2).samples


def s16(samples: np.ndarray) -> np.ndarray:
    return np.rint(np.clip(samples, -1, 1) * 32767).astype("<i2")


@pytest.fixture(scope="module")
def voice() -> VoiceActivity:
    return VoiceActivity()


@pytest.fixture(scope="module")
def command() -> np.ndarray:
    return spoken("go to the red box, please")


@pytest.fixture
def stream(voice) -> SoundStream:
    return SoundStream(voice, UtteranceSettings())


def play(
    stream: SoundStream,
    samples: np.ndarray,
    piece: int = 1600,
    rate: int = RATE,
    start: int = START,
    encoding: str = "S16LE",
) -> list[Utterance]:
    """Send samples [N] or [N, 2], 16-bit or float, in pieces with their stamps."""
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    utterances = []
    for index in range(0, len(samples), piece):
        stamp = start + index * 10**9 // rate if start else 0
        data = samples[index : index + piece].tobytes()
        utterances += stream.add(encoding, rate, channels, data, stamp)
    return utterances


def test_a_sentence_is_one_utterance_with_the_silence_around_it_cut_off(stream, command):
    (utterance,) = play(stream, s16(command))
    assert utterance.reason == "silence"
    assert utterance.sound.sample_rate == RATE
    start = (utterance.stamp - START) / 1e9
    assert 0 < start < 0.5
    assert len(command) / RATE - 1.2 < start + utterance.sound.seconds < len(command) / RATE - 0.3
    first = round(start * RATE)
    recorded = s16(command)[first : first + len(utterance.sound.samples)] / np.float32(32768)
    assert np.array_equal(utterance.sound.samples, recorded)


@pytest.mark.parametrize("rate", [8000, 16000, 44100, 48000])
def test_utterances_do_not_depend_on_the_size_of_pieces(voice, command, rate):
    samples = s16(soxr.resample(command, RATE, rate))
    heard = []
    for piece in (len(samples), rate // 10, 997, 160):
        (utterance,) = play(SoundStream(voice, UtteranceSettings()), samples, piece, rate)
        heard.append(utterance)
    for utterance in heard[1:]:
        assert np.array_equal(utterance.sound.samples, heard[0].sound.samples)
        assert abs(utterance.stamp - heard[0].stamp) <= 1000  # stamps of pieces are whole nanoseconds


def test_resampled_in_pieces_is_resampled_at_once(stream, command):
    high = soxr.resample(command, RATE, 44100)
    (utterance,) = play(stream, s16(high), 1000, 44100)
    at_once = soxr.resample(s16(high).astype(np.float32) / 32768, 44100, RATE)
    first = round((utterance.stamp - START) / 1e9 * RATE)
    length = len(utterance.sound.samples)
    assert np.array_equal(utterance.sound.samples, at_once[first : first + length])


def test_encodings_and_channels_of_one_sound_give_one_utterance(voice, command):
    mono = s16(command)
    as_float = mono.astype("<f4") / np.float32(32768)
    variants = [
        play(SoundStream(voice, UtteranceSettings()), samples, encoding=encoding)[0].sound.samples
        for samples, encoding in (
            (mono, "S16LE"),
            (np.stack([mono, mono], 1), "S16LE"),
            (as_float, "F32LE"),
            (np.stack([as_float, as_float], 1), "F32LE"),
        )
    ]
    for variant in variants[1:]:
        assert np.array_equal(variant, variants[0])


def test_two_sentences_are_two_utterances(stream, command):
    assert len(play(stream, s16(np.concatenate([command, command])))) == 2


@pytest.mark.slow
def test_most_sentences_of_unknown_voices_in_unknown_rooms_are_one_utterance(voice):
    heard = [len(play(SoundStream(voice, UtteranceSettings()), s16(spoken("stop", n)))) for n in range(20)]
    heard += [
        len(play(SoundStream(voice, UtteranceSettings()), s16(spoken("hey robot, go to the green ball", n))))
        for n in range(20, 40)
    ]
    assert heard.count(1) >= 38


class TestSoundsThatAreNotSpeech:
    def test_silence(self, stream):
        assert play(stream, np.zeros(20 * RATE, "<i2")) == []

    def test_clipped_noise(self, stream):
        noise = np.random.default_rng(0).standard_normal(20 * RATE)
        assert play(stream, s16(100 * noise)) == []

    @pytest.mark.slow
    def test_an_endless_sound_is_one_utterance_of_the_maximum_length(self, stream):
        time = np.arange(60 * RATE) / RATE
        humming = 0.4 * np.sin(2 * np.pi * 200 * time) * (1 + np.sin(2 * np.pi * 4 * time))
        (utterance,) = play(stream, s16(humming))
        assert utterance.reason == "max_length"
        assert 9.9 < utterance.sound.seconds <= 10.0


class TestEndOfTheStream:
    def test_a_piece_without_data_completes_the_utterance(self, stream, command):
        assert play(stream, s16(command)[: -int(1.2 * RATE)]) == []
        (utterance,) = stream.add("", 0, 0, b"", 0)  # a message with default fields
        assert utterance.reason == "stream_end"

    def test_a_jump_of_the_stamps_completes_the_utterance(self, stream, command):
        speech = s16(command)[: -int(1.2 * RATE)]
        assert play(stream, speech) == []
        later = START + 60 * 10**9
        (utterance,) = play(stream, s16(command)[:1600], start=later)
        assert utterance.reason == "stream_end"
        assert utterance.stamp < START + 10**9

    def test_another_sensor_that_is_far_ahead_completes_the_utterance(self, stream, command):
        speech = s16(command)[: -int(1.2 * RATE)]
        assert play(stream, speech) == []
        end = START + len(speech) * 10**9 // RATE
        assert stream.time_passed(end + 10**9) == []
        assert stream.time_passed(end + 2 * 10**9) == []
        (utterance,) = stream.time_passed(end + 2 * 10**9 + 1)
        assert utterance.reason == "stream_end"
        assert stream.time_passed(end + 3 * 10**9) == []

    def test_stamps_of_another_sensor_before_waiting_pieces_end_nothing(self, stream, command):
        middle = len(command) // 2
        utterances = play(stream, s16(command)[:middle])
        for index in range(middle, len(command), 1600):
            utterances += stream.time_passed(START + 60 * 10**9)
            stamp = START + index * 10**9 // RATE
            utterances += stream.add("S16LE", RATE, 1, s16(command)[index : index + 1600].tobytes(), stamp)
        assert [utterance.reason for utterance in utterances] == ["silence"]

    def test_without_speech_no_utterance_is_completed(self, stream, command):
        play(stream, s16(command))
        assert stream.time_passed(START + 60 * 10**9) == []

    def test_a_stream_without_stamps_is_never_taken_to_jump(self, stream, command):
        (utterance,) = play(stream, s16(command), start=0)
        assert utterance.stamp == 0


class TestErrors:
    def test_an_unreadable_piece_drops_its_utterance_but_not_the_next(self, stream, command):
        play(stream, s16(command)[: 2 * RATE])
        with pytest.raises(ValueError, match=r"3 bytes, .*; the utterance that it interrupts is dropped"):
            stream.add("S16LE", RATE, 1, b"123", 0)
        with pytest.raises(ValueError, match=r"got 0$"):
            stream.add("S16LE", 0, 1, b"12", 0)
        assert len(play(stream, s16(command))) == 1

    def test_a_change_of_rate_is_one_error_and_then_the_new_rate_applies(self, stream, command):
        play(stream, s16(command)[:RATE])
        low = s16(soxr.resample(command, RATE, 8000))
        with pytest.raises(
            ValueError, match=r"changed within the stream from S16LE at 16000 Hz .* at 8000 Hz"
        ):
            stream.add("S16LE", 8000, 1, low[:800].tobytes(), START + 10**9)
        assert len(play(stream, low, rate=8000)) == 1

    def test_ten_minutes_at_once_are_refused(self, stream):
        with pytest.raises(ValueError, match=r"expected a chunk of at most 30 s of sound, got 600.0 s"):
            stream.add("S16LE", RATE, 1, bytes(2 * 600 * RATE), 0)


def test_an_utterance_does_not_depend_on_earlier_sound(voice, stream, command):
    (first,) = play(stream, s16(command))
    stream.drop()
    (again,) = play(stream, s16(command))
    play(stream, s16(spoken("what do you see", 3)), start=START + 20 * 10**9)
    (after_a_jump,) = play(stream, s16(command), start=START + 60 * 10**9)
    for utterance in (again, after_a_jump):
        assert np.array_equal(utterance.sound.samples, first.sound.samples)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_stream(stream):
    play(stream, np.zeros(60 * RATE, "<i2"), piece=RATE)
    kept = sum(frame.nbytes for frame in stream._cutter._frames) + stream._cutter._rest.nbytes
    assert kept < 100_000
