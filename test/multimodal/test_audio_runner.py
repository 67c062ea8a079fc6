# SPDX-License-Identifier: Apache-2.0
import dataclasses
import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from edgellm_ros.builder import export
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine.onnxruntime.opset23 import lower_to_opset23
from edgellm_ros.engine.onnxruntime.session import open_session
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.multimodal.audio.encoder_inputs import split_chunks, window_mask
from edgellm_ros.multimodal.audio.runner import KEPT_SOUNDS, AudioRunner
from edgellm_ros.multimodal.sound import Sound
from fixtures.reference_inputs import make_sound

REFERENCES = json.loads((Path(__file__).parents[1] / "data" / "transformers_references.json").read_text())


@pytest.fixture(scope="module")
def config(tiny_engine):
    return EngineConfig.load(tiny_engine).audio


@pytest.fixture(scope="module")
def runner(device, tiny_engine, config) -> AudioRunner:
    executor = EngineExecutor.open(tiny_engine / "audio" / "model.onnx", device)
    return AudioRunner(executor, config, device, 60)


def sound(seconds: float) -> Sound:
    return Sound(make_sound(seconds, 16000), 16000)


@pytest.fixture(scope="module")
def encode(device, runner):
    """Function: sound -> rows of embeddings."""

    def run(one) -> np.ndarray:
        rows = device.zeros((runner.num_tokens(one), 48), np.float32)
        runner.forget()
        assert runner.encode(one, rows)
        return device.download(rows)

    return run


@pytest.mark.parametrize("reference", REFERENCES["hearing"], ids=lambda r: f"{r['seconds']} s")
def test_rows_equal_those_of_transformers(encode, reference):
    rows = encode(sound(reference["seconds"]))
    assert len(rows) == reference["tokens"]
    np.testing.assert_allclose(rows[[0, -1]], reference["rows"], atol=1e-4)


def test_half_precision_rows_are_close_to_fp32(device, encode, tiny_checkpoint, tmp_path, config):
    export(tiny_checkpoint, tmp_path, precision="fp16")
    executor = EngineExecutor.open(tmp_path / "audio" / "model.onnx", device)
    half = AudioRunner(executor, config, device, 60)
    rows = device.zeros((half.num_tokens(sound(1.5)), 48), np.float16)
    half.encode(sound(1.5), rows)
    np.testing.assert_allclose(device.download(rows), encode(sound(1.5)), atol=0.02)


def test_the_same_sound_gives_the_same_rows_whatever_came_before(encode):
    first = encode(sound(2.3))
    for seconds in (0.5, 4.4):
        encode(sound(seconds))
        np.testing.assert_array_equal(encode(sound(2.3)), first)


@pytest.mark.parametrize("seconds", [0.4, 1.2, 2.0, 2.3, 4.4])
def test_a_sound_computed_as_whole_chunks_has_the_same_rows(device, tiny_engine, config, encode, seconds):
    executor = EngineExecutor.open(tiny_engine / "audio" / "model.onnx", device)
    whole = AudioRunner(executor, config, device, 60, pads=True)
    rows = device.zeros((whole.num_tokens(sound(seconds)), 48), np.float32)
    whole.encode(sound(seconds), rows)
    np.testing.assert_allclose(device.download(rows), encode(sound(seconds)), atol=2e-5, rtol=0)


@pytest.mark.only_on("cpu", "cuda", reason="each recorded run of a plan takes memory of its own")
def test_sounds_run_in_advance_have_the_shapes_of_later_ones(device, tiny_engine, config, monkeypatch):
    executor = EngineExecutor.open(tiny_engine / "audio" / "model.onnx", device)
    whole, bound = AudioRunner(executor, config, device, 60, pads=True), []
    prepare = executor.prepare
    monkeypatch.setattr(
        executor, "prepare", lambda *given: bound.append((given[1]["N"], given[2])) or prepare(*given)
    )
    assert whole.warm_up()
    advance = {count: tensors for count, tensors in bound}
    assert sorted(advance) == [2, 3, 4]
    assert len(bound) == 6  # each twice: the second is recorded
    for seconds in (1.2, 2.3, 3.9):
        bound.clear()
        whole.encode(sound(seconds), device.zeros((whole.num_tokens(sound(seconds)), 48), np.float32))
        ((count, tensors),) = bound
        for name, tensor in tensors.items():
            assert tensor.pointer == advance[count][name].pointer
            assert tensor.shape == advance[count][name].shape


def test_a_sound_that_was_encoded_before_is_not_computed_again(device, tiny_engine, config):
    executor = EngineExecutor.open(tiny_engine / "audio" / "model.onnx", device)
    runner = AudioRunner(executor, config, device, 60)

    def encode(one) -> tuple[bool, np.ndarray]:
        rows = device.zeros((runner.num_tokens(one), 48), np.float32)
        return runner.encode(one, rows), device.download(rows)

    sounds = [sound(0.3 + 0.7 * number) for number in range(KEPT_SOUNDS)]
    first = [encode(one) for one in sounds]
    assert all(computed for computed, _ in first)
    for one, (_, expected) in zip(sounds, first, strict=True):
        computed, rows = encode(Sound(one.samples.copy(), one.sample_rate))
        assert not computed
        np.testing.assert_array_equal(rows, expected)
    slower = Sound(sounds[0].samples, 8000)
    assert encode(slower)[0]  # the same samples at another rate; takes the place of the oldest
    assert encode(sounds[0])[0]
    assert not encode(sounds[3])[0]
    changed = Sound(sounds[3].samples.copy(), 16000)
    changed.samples[5] += 0.01
    assert encode(changed)[0]
    runner.forget()
    assert encode(sounds[3])[0]


def test_a_sound_whose_encoding_was_interrupted_takes_no_other_sound_s_place(
    device, tiny_engine, config, monkeypatch
):
    executor = EngineExecutor.open(tiny_engine / "audio" / "model.onnx", device)
    runner = AudioRunner(executor, config, device, 60)

    def encode(one) -> tuple[bool, np.ndarray]:
        rows = device.zeros((runner.num_tokens(one), 48), np.float32)
        return runner.encode(one, rows), device.download(rows)

    sounds = [sound(0.3 + 0.5 * number) for number in range(KEPT_SOUNDS + 2)]
    first = [encode(one)[1] for one in sounds[:KEPT_SOUNDS]]
    with monkeypatch.context() as patch:
        patch.setattr(device, "copy", lambda target, source: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            encode(sounds[KEPT_SOUNDS])
    encode(sounds[KEPT_SOUNDS + 1])
    for one, expected in zip(sounds[1:KEPT_SOUNDS], first[1:], strict=True):
        np.testing.assert_array_equal(encode(one)[1], expected)


def test_a_kept_sound_does_not_change_with_the_caller_s_samples(device, runner):
    one = Sound(make_sound(1.7, 16000).copy(), 16000)
    rows = device.zeros((runner.num_tokens(one), 48), np.float32)
    runner.encode(one, rows)
    one.samples[:] = 0
    assert runner.encode(one, rows)


def test_a_sound_of_too_many_tokens_is_an_error_that_names_both_and_the_seconds(runner):
    assert runner.num_tokens(sound(4.6)) == 60
    with pytest.raises(
        ValueError, match=r"a sound of 4\.70 s becomes 61 tokens, the .* at most 60 \(less than 4\.65 s\)"
    ):
        runner.num_tokens(sound(4.7))


def test_the_last_of_several_chunks_is_filled_up_and_a_single_one_is_not():
    features = np.arange(2 * 7, dtype=np.float32).reshape(2, 7)
    chunks = split_chunks(features, 3)
    np.testing.assert_array_equal(chunks[0], features[:, :3])
    np.testing.assert_array_equal(chunks[1], features[:, 3:6])
    np.testing.assert_array_equal(chunks[2], np.pad(features[:, 6:], ((0, 0), (0, 2))))
    np.testing.assert_array_equal(split_chunks(features, 7), features[None])
    np.testing.assert_array_equal(split_chunks(features, 9), features[None])


def test_tokens_attend_to_their_window(config):
    mask = window_mask(60, config)  # windows of two chunks, 26 tokens
    for window in (slice(0, 26), slice(26, 52), slice(52, 60)):
        assert mask[window, window].all()
    assert mask.sum() == 26**2 + 26**2 + 8**2


def test_no_token_of_a_sound_attends_to_padding(config):
    mask = window_mask(39, config, tokens=30)
    np.testing.assert_array_equal(mask[:30, :30], window_mask(30, config))
    assert not mask[:30, 30:].any()
    assert mask[30:].any(axis=1).all()  # a row that sees nothing would be NaN


def test_the_graph_lowered_to_opset_23_computes_the_same(tiny_engine):
    path = tiny_engine / "audio" / "model.onnx"
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    inputs = {
        "input_features": np.random.default_rng(0).standard_normal((2, 128, 100)).astype(np.float32),
        "token_index": np.arange(20),
        "position_index": np.arange(20) % 13,
        "attention_mask": np.ones((1, 1, 20, 20), bool),
    }
    cpu = ["CPUExecutionProvider"]
    (lowered,) = onnxruntime.InferenceSession(lower_to_opset23(path), options, cpu).run(None, inputs)
    (rows,) = open_session(path).run(None, inputs)  # in an old ONNX Runtime lowered as well
    np.testing.assert_array_equal(lowered, rows)


def test_a_single_chunk_is_padded_if_the_family_wants_whole_chunks():
    features = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(split_chunks(features, 4), features[None])
    (padded,) = split_chunks(features, 4, whole=True)
    np.testing.assert_array_equal(padded, [[0, 1, 2, 0], [3, 4, 5, 0]])
    for whole in (False, True):
        assert split_chunks(np.zeros((2, 4), np.float32), 4, whole).shape == (1, 2, 4)
        assert split_chunks(np.zeros((2, 5), np.float32), 4, whole).shape == (2, 2, 4)


def test_whole_chunks_change_the_rows_of_a_short_sound_only(device, tiny_engine, config, encode):
    """The convolutions see zeros after the sound in place of a border."""
    executor = EngineExecutor.open(tiny_engine / "audio" / "model.onnx", device)
    whole = AudioRunner(executor, dataclasses.replace(config, whole_chunks=True), device, 60)
    for seconds, changes in ((0.43, True), (1.0, False), (1.33, False)):
        rows = device.zeros((whole.num_tokens(sound(seconds)), 48), np.float32)
        whole.encode(sound(seconds), rows)
        difference = np.abs(device.download(rows) - encode(sound(seconds))).max()
        assert (difference > 1e-3) == changes, (seconds, difference)


@pytest.mark.only_on("cpu", "cuda", reason="each recorded run of a plan takes memory of its own")
def test_a_single_whole_chunk_is_run_in_advance_too(device, tiny_engine, config, monkeypatch):
    executor = EngineExecutor.open(tiny_engine / "audio" / "model.onnx", device)
    whole, counts = (
        AudioRunner(executor, dataclasses.replace(config, whole_chunks=True), device, 60, True),
        set(),
    )
    prepare = executor.prepare
    monkeypatch.setattr(executor, "prepare", lambda *given: counts.add(given[1]["N"]) or prepare(*given))
    assert whole.warm_up()
    assert counts == {1, 2, 3, 4}
