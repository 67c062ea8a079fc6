# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-Omni's sounds: silence after them, masked chunks, pairs of rows.

test/parity has the reference.
"""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

from edgellm_ros.builder import export
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine.onnxruntime.opset23 import lower_to_opset23
from edgellm_ros.engine.onnxruntime.session import open_session
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.multimodal.audio.config import Qwen2_5AudioConfig
from edgellm_ros.multimodal.audio.encoder_inputs import chunk_masks
from edgellm_ros.multimodal.audio.processor import AudioProcessor
from edgellm_ros.multimodal.audio.runner import AudioRunner
from edgellm_ros.multimodal.sound import Sound
from fixtures.qwen2_5_omni_checkpoint import write_qwen2_5_omni
from fixtures.reference_inputs import make_sound
from fixtures.whisper_features import WHISPER

CONFIG = Qwen2_5AudioConfig(
    d_model=8,
    encoder_layers=1,
    encoder_attention_heads=1,
    output_dim=8,
    n_window=100,
    num_mel_bins=128,
    sampling_rate=16000,
    n_fft=400,
    hop_length=160,
)
SECONDS = [0.0201, 0.4, 1.99, 2.0, 2.02, 4.4]
TOKENS = 120


def sound(seconds: float) -> Sound:
    return Sound(make_sound(seconds, 16000), 16000)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_qwen2_5_omni(tmp_path_factory.mktemp("checkpoint") / "qwen2_5_omni")


@pytest.fixture(scope="module")
def engine(checkpoint, tmp_path_factory):
    directory = tmp_path_factory.mktemp("engine")
    export(checkpoint, directory)
    return directory


@pytest.fixture(scope="module")
def make_runner(device, engine):
    """Function: `pads` of `AudioRunner` -> a runner."""

    def make(pads: bool = False) -> AudioRunner:
        executor = EngineExecutor.open(engine / "audio" / "model.onnx", device)
        return AudioRunner(executor, EngineConfig.load(engine).audio, device, TOKENS, pads)

    return make


def encode(runner: AudioRunner, device, one: Sound, dtype=np.float32) -> np.ndarray:
    rows = device.zeros((runner.num_tokens(one), 48), dtype)
    runner.forget()
    runner.encode(one, rows)
    return device.download(rows)


@pytest.mark.parametrize("seconds", SECONDS)
def test_the_last_frames_see_zeros_after_the_sound(seconds):
    """Frames are those of a sound that silence follows.

    There is one for each hop that has begun.
    """
    one = sound(seconds)
    fading = np.linspace(1, 0, len(one.samples), dtype=np.float32)
    one = Sound(one.samples * fading, 16000)  # the loudest frame is not behind its end
    found = AudioProcessor(CONFIG).process(one)
    followed = Sound(np.pad(one.samples, (0, 1600)), 16000)
    assert found.shape[1] == -(-len(one.samples) // 160)
    expected = AudioProcessor(WHISPER).process(followed)[:, : found.shape[1]]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_another_end_than_that_of_whisper_changes_the_last_frames_only():
    one = sound(1.5)
    found, mirrored = (AudioProcessor(each).process(one) for each in (CONFIG, WHISPER))
    differences = np.abs(found - mirrored).max(axis=0)
    assert differences[:-2].max() < 1e-6
    assert differences[-1] > 0.01


def test_a_token_is_two_rows_of_two_frames():
    frames = np.arange(3, 500)
    after_convolutions = (frames - 1) // 2 + 1
    expected = (after_convolutions - 2) // 2 + 1  # transformers' formula
    assert [CONFIG.num_tokens(int(count)) for count in frames] == expected.tolist()
    assert (CONFIG.chunk_frames, CONFIG.chunk_tokens) == (200, 50)


@pytest.mark.parametrize("tokens", [1, 2, 49, 50, 51, 320])
def test_a_sound_at_the_limit_in_seconds_fits_and_a_longer_one_does_not(tokens):
    samples = round(CONFIG.max_seconds(tokens) * 16000)
    processor = AudioProcessor(CONFIG)
    at, above = (Sound(np.zeros(count, np.float32), 16000) for count in (samples, samples + 1))
    assert CONFIG.num_tokens(processor.num_frames(at)) == tokens
    assert CONFIG.num_tokens(processor.num_frames(above)) == tokens + 1


@pytest.mark.parametrize(("count", "sample_rate"), [(1, 16000), (320, 16000), (160, 8000), (882, 44100)])
def test_a_sound_without_a_token_is_refused(make_runner, count, sample_rate):
    with pytest.raises(ValueError, match=r"a sound of 0\.0\d+ s is too short, expected more than 0\.0200 s"):
        make_runner().num_tokens(Sound(np.zeros(count, np.float32), sample_rate))
    assert make_runner().num_tokens(Sound(np.zeros(321, np.float32), 16000)) == 1


def test_rows_of_a_chunk_attend_to_those_that_have_sound():
    filled, visible = chunk_masks(2, 8, 11)
    np.testing.assert_array_equal(filled[:, 0], [[1] * 8, [1, 1, 1, 0, 0, 0, 0, 0]])
    assert filled.dtype == np.float32
    assert visible[0].all()
    np.testing.assert_array_equal(visible[1, 0], [[True, True, False, False]] * 4)


@pytest.mark.parametrize("seconds", SECONDS)
def test_a_sound_computed_as_whole_chunks_has_the_same_rows(device, make_runner, seconds):
    exact, padded = (encode(make_runner(pads), device, sound(seconds)) for pads in (False, True))
    assert np.abs(exact).max() > 0.5
    np.testing.assert_allclose(padded, exact, atol=2e-5, rtol=0)


def test_rows_do_not_depend_on_the_sound_before(device, make_runner):
    runner = make_runner()
    first = encode(runner, device, sound(2.3))
    for seconds in (4.4, 0.1):
        encode(runner, device, sound(seconds))
        np.testing.assert_array_equal(encode(runner, device, sound(2.3)), first)


def test_chunks_and_their_padding_do_not_change_other_chunks(engine):
    graph, features = open_session(engine / "audio" / "model.onnx"), np.random.default_rng(0)
    features = features.standard_normal((3, 128, 200)).astype(np.float32)

    def run(chunks: list[int], frames: int, tokens: int) -> np.ndarray:
        filled, visible = chunk_masks(len(chunks), 200, frames)
        given = {"frame_mask": filled, "attention_mask": visible, "token_index": np.arange(tokens)}
        return graph.run(None, {"input_features": features[chunks], **given})[0]

    alone, beside = run([0], 200, 50), run([0, 1, 2], 600, 150)
    np.testing.assert_allclose(beside[:50], alone, atol=1e-5)
    features[1, :, 131] = 0  # seen by the last of 131 frames
    short = run([1], 131, 33)
    features[1, :, 132:] = 9.0  # masked
    np.testing.assert_array_equal(run([1], 131, 33), short)
    assert np.abs(run([1], 200, 33) - short).max() > 0.01


def test_half_precision_rows_are_close_to_fp32(device, make_runner, checkpoint, tmp_path):
    config = export(checkpoint, tmp_path, precision="fp16")
    executor = EngineExecutor.open(tmp_path / "audio" / "model.onnx", device)
    half = encode(AudioRunner(executor, config.audio, device, TOKENS), device, sound(2.5), np.float16)
    np.testing.assert_allclose(half, encode(make_runner(), device, sound(2.5)), atol=0.03)


@pytest.mark.only_on("cpu", "cuda", reason="each recorded run of a plan takes memory of its own")
def test_sounds_of_one_chunk_and_more_are_run_in_advance(make_runner, monkeypatch):
    runner, counts = make_runner(pads=True), []
    prepare = runner._executor.prepare
    monkeypatch.setattr(
        runner._executor, "prepare", lambda *given: counts.append(given[1]["N"]) or prepare(*given)
    )
    assert runner.warm_up()
    assert counts == [1, 1, 2, 2]  # two chunks of 50 tokens within 120


def test_the_graph_lowered_to_opset_23_computes_the_same(engine):
    path = engine / "audio" / "model.onnx"
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    filled, visible = chunk_masks(2, 200, 333)
    inputs = {
        "input_features": np.random.default_rng(0).standard_normal((2, 128, 200)).astype(np.float32),
        "frame_mask": filled,
        "attention_mask": visible,
        "token_index": np.arange(83),
    }
    cpu = ["CPUExecutionProvider"]
    (lowered,) = onnxruntime.InferenceSession(lower_to_opset23(path), options, cpu).run(None, inputs)
    (rows,) = open_session(path).run(None, inputs)  # in an old ONNX Runtime lowered as well
    np.testing.assert_array_equal(lowered, rows)
