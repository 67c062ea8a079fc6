# SPDX-License-Identifier: Apache-2.0
"""`edgellm generate --audio`: what is read from sound files, and what is refused."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import soundfile

from edgellm_ros.io.sound_file import read_sound
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams
from fixtures.reference_inputs import make_sound
from fixtures.refusal import assert_refused

SAMPLES = make_sound(1.2, 22050)


def write(path: Path, samples=SAMPLES, rate=22050, **options) -> Path:
    soundfile.write(path, samples, rate, **options)
    return path


def wav_header(size: int, channels: int = 1, bits: int = 16) -> bytes:
    """Header of a 16 kHz WAV file whose samples take `size` bytes."""
    align = channels * bits // 8
    layout = struct.pack("<HHIIHH", 1, channels, 16000, 16000 * align, align, bits)
    return (
        b"RIFF" + struct.pack("<I", (36 + size) % 2**32) + b"WAVEfmt " + struct.pack("<I", 16) + layout
        + b"data" + struct.pack("<I", size)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "tolerance", "options"),
    [
        ("a.wav", 0, {"subtype": "FLOAT"}),
        ("a.wav", 2**-15, {"subtype": "PCM_16"}),
        ("a.wav", 2**-23, {"subtype": "PCM_24"}),
        ("a.flac", 2**-15, {}),
    ],
)
def test_samples_are_those_of_the_file(tmp_path, name, tolerance, options):
    sound = read_sound(write(tmp_path / name, **options), 30)
    assert sound.sample_rate == 22050
    assert sound.samples.dtype == np.float32
    np.testing.assert_allclose(sound.samples, SAMPLES, rtol=0, atol=tolerance)


def test_a_lossy_file_sounds_nearly_the_same(tmp_path):
    samples = read_sound(write(tmp_path / "a.ogg"), 30).samples
    assert len(samples) == len(SAMPLES)
    assert np.corrcoef(samples, SAMPLES)[0, 1] > 0.95


def test_channels_are_averaged(tmp_path):
    stereo = np.stack([SAMPLES, 0.5 * SAMPLES[::-1]], axis=1)
    sound = read_sound(write(tmp_path / "a.wav", stereo, subtype="FLOAT"), 30)
    np.testing.assert_allclose(sound.samples, stereo.mean(axis=1), atol=1e-7)


def test_a_wav_file_of_unknown_length_is_read_to_its_end(tmp_path):
    path = tmp_path / "streamed.wav"
    path.write_bytes(wav_header(0xFFFFFFFF) + bytes(3200))
    assert len(read_sound(path, 30).samples) == 1600


def test_a_sound_file_is_answered_as_the_runtime_answers_its_samples(
    edgellm, tiny_engine, tmp_path, runtime_device
):
    path = write(tmp_path / "a.wav", subtype="FLOAT")
    answer = edgellm("generate", tiny_engine, "--audio", path, "--max-tokens", 6, "--json").json
    with LLMInferenceRuntime(tiny_engine, runtime_device) as runtime:
        request = LLMGenerationRequest(
            "", audio=(Sound(SAMPLES, 22050),), sampling=SamplingParams(max_tokens=6), action_samples=1
        )
        expected = runtime.handle_request(request)
    assert answer["token_ids"] == expected.token_ids
    assert answer["prompt_tokens"] == expected.prompt_tokens
    assert answer["metrics"]["audio_s"] > 0


def test_silence_is_a_sound(edgellm, tiny_engine, tmp_path):
    path = write(tmp_path / "silence.wav", np.zeros(8000), 8000)
    assert edgellm("generate", tiny_engine, "--audio", path, "--max-tokens", 2).code == 0


PCM = wav_header(3200) + bytes(3200)
NOT_SOUNDS = {
    "no file": (None, "no such file"),
    "empty file": (b"", "the sound file is empty"),
    "text": (b"this is not a sound " * 20, "not a sound that libsndfile can read (400 bytes): Format not"),
    "truncated header": (PCM[:30], "truncated"),
    "truncated wav": (PCM[:1001], "the sound file is truncated: 957 bytes of 'data', expected 3200"),
    "odd number of bytes": (
        wav_header(3201) + bytes(3202),
        "3201 bytes of samples are not a multiple of the sample size 2",
    ),
    "half a stereo sample": (
        wav_header(3202, 2) + bytes(3202),
        "3202 bytes of samples are not a multiple of the sample size 4",
    ),
    "no samples": (wav_header(0), "samples must not be empty"),
}


@pytest.mark.parametrize("name", NOT_SOUNDS)
def test_what_is_no_whole_sound_is_refused(edgellm, tiny_engine, tmp_path, name):
    content, message = NOT_SOUNDS[name]
    path = tmp_path / "a.wav"
    if content is not None:
        path.write_bytes(content)
    assert_refused(edgellm("generate", tiny_engine, "--audio", path), str(path), message)


@pytest.mark.parametrize("ending", ["flac", "ogg"])
def test_a_truncated_compressed_file_is_refused(edgellm, tiny_engine, tmp_path, ending):
    path = write(tmp_path / f"a.{ending}")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    message = {"flac": "can read", "ogg": "truncated: its last page is missing"}[ending]
    assert_refused(edgellm("generate", tiny_engine, "--audio", path), str(path), message)


@pytest.mark.parametrize("ending", ["mp3", "aiff", "au", "caf", "w64", "rf64"])
def test_formats_whose_truncation_is_not_noticed_are_refused(edgellm, tiny_engine, tmp_path, ending):
    path = write(tmp_path / f"a.{ending}")
    run = edgellm("generate", tiny_engine, "--audio", path)
    assert_refused(run, str(path), soundfile.info(path).format_info, "expected WAV, FLAC, OGG")


def test_samples_that_are_not_finite_are_refused(edgellm, tiny_engine, tmp_path):
    path = write(tmp_path / "a.wav", np.full(4000, np.nan), 16000, subtype="FLOAT")
    assert_refused(edgellm("generate", tiny_engine, "--audio", path), str(path), "must be finite")


def test_a_rate_out_of_range_is_refused(edgellm, tiny_engine, tmp_path):
    path = write(tmp_path / "a.wav", rate=2000)
    assert_refused(edgellm("generate", tiny_engine, "--audio", path), str(path), "4000 to 192000 Hz")


def test_a_sound_of_ten_minutes_is_refused_before_it_is_read(edgellm, tiny_engine, tmp_path, monkeypatch):
    path = write(tmp_path / "long.flac", np.zeros(600 * 8000), 8000)
    monkeypatch.setattr(soundfile.SoundFile, "read", lambda *_, **__: pytest.fail("was read"))
    run = edgellm("generate", tiny_engine, "--audio", path)
    assert_refused(run, str(path), "a sound of 600.00 s, the engine takes less than 24.65 s")


def test_neither_words_nor_sound_is_refused(edgellm, tiny_engine):
    assert_refused(edgellm("generate", tiny_engine), "give --prompt or --audio")


def test_sound_for_an_engine_without_audio_encoder_is_refused(edgellm, engine_without_audio):
    assert_refused(
        edgellm("generate", engine_without_audio, "--audio", "hello.wav"), "hello.wav", "no audio encoder"
    )
