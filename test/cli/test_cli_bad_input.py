# SPDX-License-Identifier: Apache-2.0
"""Bad input ends with exit code 2 and one line on standard error.

The line says what was wrong and where.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
from safetensors.numpy import save_file

from fixtures.on_device import error_without_gpu
from fixtures.refusal import assert_refused
from fixtures.tiny_adapter import write_adapter


def test_engine_directory_that_is_not_there(edgellm):
    assert_refused(edgellm("generate", "/nowhere", "--prompt", "go"), "/nowhere/config.json", "not found")


def test_vocabulary_map_without_the_stop_tokens(edgellm, tiny_checkpoint, tmp_path):
    path = tmp_path / "map.safetensors"
    save_file({"vocab_map": np.arange(100)}, path)
    told = edgellm("export", tiny_checkpoint, tmp_path / "engine", "--vocab-map", path)
    assert_refused(told, str(path), "lacks the stop tokens [258, 269]")
    assert not (tmp_path / "engine").exists()


def test_hidden_states_of_no_layer(edgellm, tiny_checkpoint, tmp_path):
    for layers, words in (("1,x", "'x'"), ("0", "of at least 1"), ("9", "has 3 layers")):
        assert_refused(edgellm("export", tiny_checkpoint, tmp_path / "e", "--hidden-states", layers), words)


def test_engine_directory_with_a_missing_file(edgellm, broken_engine):
    (broken_engine / "llm" / "model.onnx.data").unlink()
    assert_refused(edgellm("generate", broken_engine, "--prompt", "go"), "llm/model.onnx.data is missing")


def test_engine_directory_with_a_truncated_weight_file(edgellm, broken_engine):
    weights = broken_engine / "embedding.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-10])
    assert_refused(
        edgellm("generate", broken_engine, "--prompt", "go"), str(weights), f"expected {len(whole)}"
    )


def test_engine_directory_with_an_altered_weight_file_is_found_by_verify(edgellm, broken_engine):
    weights = broken_engine / "llm" / "model.onnx.data"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    assert edgellm("inspect", broken_engine).code == 0
    assert_refused(edgellm("inspect", broken_engine, "--verify"), str(weights), "SHA-256")


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda config: config["llm"].update(hiden_size=3), ["llm", "unknown key 'hiden_size'"]),
        (lambda config: config["llm"].pop("hidden_size"), ["llm", "missing key 'hidden_size'"]),
        (lambda config: config["llm"].update(hidden_size="48"), ["llm.hidden_size", "'48'"]),
        (lambda config: config["builder"].update(max_batch_size=-1), ["max_batch_size", "-1"]),
        (lambda config: config.update(format_version=99), ["format_version", "99"]),
    ],
)
def test_engine_directory_with_a_wrong_config(edgellm, broken_engine, change, words):
    path = broken_engine / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    assert_refused(edgellm("generate", broken_engine, "--prompt", "go"), "config.json", *words)


def test_engine_directory_with_a_config_that_is_no_json(edgellm, broken_engine):
    (broken_engine / "config.json").write_text("{")
    assert_refused(edgellm("inspect", broken_engine), "config.json", "not valid JSON")


@pytest.mark.parametrize(
    "option, value",
    [
        ("--temperature", "-0.5"),
        ("--temperature", "nan"),
        ("--top-k", "-1"),
        ("--top-p", "1.5"),
        ("--top-p", "0"),
        ("--min-p", "-0.1"),
        ("--repetition-penalty", "-2"),
        ("--repetition-penalty", "0"),
        ("--seed", "-1"),
        ("--seed", str(2**64)),
        ("--max-tokens", "0"),
        ("--action-samples", "-1"),
        ("--noise-seed", "-3"),
        ("--denoise-steps", "-5"),
        ("--denoise-steps", "0"),
        ("--logprobs", "-1"),
        ("--logprobs", "two"),
        ("--speed", "-0.1"),
    ],
)
def test_number_out_of_range(edgellm, tiny_engine, option, value):
    assert_refused(edgellm("generate", tiny_engine, "--prompt", "go", option, value), option, value)


@pytest.mark.parametrize(
    "option, value, word",
    [
        ("--temperature", "1e-9", "temperature"),
        ("--action-samples", "1000", "max_action_samples"),
        ("--logprobs", "1000", "logprobs"),
        ("--stop", "", "stop"),
    ],
)
def test_value_that_the_runtime_refuses(edgellm, tiny_engine, option, value, word):
    assert_refused(edgellm("generate", tiny_engine, "--prompt", "go", option, value), word)


@pytest.mark.parametrize(
    "content, words",
    [
        (None, ["no such file"]),
        (b"", ["the image file is empty"]),
        (b"this is not an image", ["not an image"]),
    ],
)
def test_image_that_is_none(edgellm, tiny_engine, tmp_path, content, words):
    path = tmp_path / "frame.png"
    if content is not None:
        path.write_bytes(content)
    assert_refused(edgellm("generate", tiny_engine, "--prompt", "go", "--image", path), str(path), *words)


def test_truncated_image(edgellm, tiny_engine, image, tmp_path):
    path = tmp_path / "half.png"
    path.write_bytes(image.read_bytes()[: image.stat().st_size // 2])
    run = edgellm("generate", tiny_engine, "--prompt", "go", "--image", path)
    assert_refused(run, f"{path}: the PNG file is truncated: ", " bytes of 'IDAT', expected ")


def test_jpeg_file_that_is_damaged_inside(edgellm, tiny_engine, tmp_path):
    """Half of it zeros, with a valid end, which OpenCV would show as grey."""
    picture = np.random.default_rng(0).integers(0, 256, (96, 128, 3), np.uint8)
    data = cv2.imencode(".jpg", picture)[1].tobytes()
    path = tmp_path / "frame.jpg"
    path.write_bytes(data[: len(data) // 2] + bytes(len(data) // 2) + b"\xff\xd9")
    run = edgellm("generate", tiny_engine, "--prompt", "go", "--image", path)
    assert_refused(run, str(path), "the JPEG file cannot be decoded", "Corrupt JPEG data")


def test_image_that_is_a_directory(edgellm, tiny_engine, tmp_path):
    run = edgellm("generate", tiny_engine, "--prompt", "go", "--image", tmp_path)
    assert_refused(run, str(tmp_path), "is a directory")


def test_unknown_adapter(edgellm, tiny_engine):
    run = edgellm("generate", tiny_engine, "--prompt", "go", "--lora", "forest")
    assert_refused(run, f"--lora 'forest': no such adapter in {tiny_engine}/lora, which has none")


def test_adapter_without_a_directory_is_not_the_current_folder(
    edgellm, tiny_lora_engine, tiny_checkpoint, tmp_path, monkeypatch
):
    monkeypatch.chdir(write_adapter(tmp_path / "adapter", tiny_checkpoint))
    run = edgellm("generate", tiny_lora_engine, "--prompt", "go", "--lora", "forest=")
    assert_refused(run, "--lora 'forest=': expected a directory or a file after '='")


def test_adapter_for_an_engine_that_takes_none(edgellm, tiny_engine, tmp_path):
    run = edgellm("generate", tiny_engine, "--prompt", "go", "--lora", f"forest={tmp_path}")
    assert_refused(run, "adapter 'forest': this engine has no LoRA inputs", "--max-lora-rank")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": 16}, "has rank 16; this engine supports at most 8 (max_lora_rank)"),
        ({"prefix": "base_model.model.audio_tower."}, "no LoRA inputs for audio_tower.layers.0.mlp."),
        ({"use_dora": True}, "use_dora True: not supported, only plain LoRA is"),
    ],
)
def test_adapter_that_does_not_fit(edgellm, tiny_lora_engine, tiny_checkpoint, tmp_path, change, message):
    directory = write_adapter(tmp_path / "adapter", tiny_checkpoint, **change)
    run = edgellm("generate", tiny_lora_engine, "--prompt", "go", "--lora", f"forest={directory}")
    assert_refused(run, str(directory), message)


def test_adapter_of_the_checkpoint_above_the_rank_that_was_asked_for(edgellm, tiny_checkpoint, tmp_path):
    checkpoint = shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    write_adapter(checkpoint / "lora" / "forest", checkpoint, r=6)
    run = edgellm("export", checkpoint, tmp_path / "engine", "--max-lora-rank", 5)
    assert_refused(run, "lora/forest", "has rank 6; this engine supports at most 5 (max_lora_rank)")
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize("name, words", [("base", "is the name of the base model"), ("a b", "got 'a b'")])
def test_adapter_of_the_checkpoint_with_a_name_that_it_cannot_have(
    edgellm, tiny_checkpoint, tmp_path, name, words
):
    checkpoint = shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    write_adapter(checkpoint / "lora" / name, checkpoint)
    assert_refused(edgellm("export", checkpoint, tmp_path / "engine"), words)
    assert not (tmp_path / "engine").exists()


def test_prompt_of_ten_thousand_words(edgellm, tiny_engine):
    run = edgellm("generate", tiny_engine, "--prompt", "word " * 10_000)
    assert_refused(run, "tokens", "max_kv_cache_capacity")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cuda", "tensorrt"])
def test_device_that_is_not_there(tiny_engine, name):
    command = ["-m", "edgellm_ros", "generate", tiny_engine, "--prompt", "go", "--device", name]
    assert f"edgellm generate: error: device {name!r} is not available: " in error_without_gpu(*command)


@pytest.mark.parametrize(
    "name, content, word",
    [
        ("poses.csv", "0,0\n1,x\n", "could not convert"),
        ("poses.csv", "0,0\n1,nan\n", "finite"),
        ("poses.json", "[[0, 0, 0, 0, 0]]", "shape [1, 5]"),
        ("poses.json", "[1, 2", "poses.json"),
        ("poses.txt", "0 0", "expected a .json, .npy or .csv file"),
        ("poses.npy", "not numpy", "poses.npy"),
    ],
)
def test_history_file_that_makes_no_sense(edgellm, tiny_engine, tmp_path, name, content, word):
    path = tmp_path / name
    path.write_text(content)
    assert_refused(edgellm("generate", tiny_engine, "--prompt", "go", "--history", path), name, word)


def test_history_of_the_wrong_length(edgellm, tiny_engine, tmp_path):
    path = tmp_path / "poses.npy"
    np.save(path, np.zeros((3, 2)))
    assert_refused(edgellm("generate", tiny_engine, "--prompt", "go", "--history", path), "history", "3")


@pytest.mark.parametrize("arguments", [[], ["fly"], ["generate"], ["replay", "bag"]])
def test_arguments_that_are_missing_or_unknown(edgellm, arguments):
    assert_refused(edgellm(*arguments), "error", "--help")


def test_export_of_something_that_is_no_checkpoint(edgellm, tmp_path):
    assert_refused(edgellm("export", tmp_path / "nothing", tmp_path / "engine"), str(tmp_path / "nothing"))
    assert not (tmp_path / "engine").exists()


def test_export_of_a_truncated_checkpoint(edgellm, tiny_checkpoint, tmp_path):
    checkpoint = Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))
    shard = sorted(checkpoint.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    assert_refused(edgellm("export", checkpoint, tmp_path / "engine"), str(shard))


def test_check_of_a_checkpoint_that_cannot_be_exported(edgellm, tiny_checkpoint, tmp_path):
    checkpoint = shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    config = checkpoint / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "qwen9"}))
    assert_refused(edgellm("export", "--check", checkpoint), str(config), "model_type 'qwen9'", "supported: ")


def test_export_without_an_engine_directory(edgellm, tiny_checkpoint):
    assert_refused(edgellm("export", tiny_checkpoint), "ENGINE_DIR is missing")


def test_export_with_8_bits_for_a_cpu_in_bf16(edgellm, tiny_checkpoint, tmp_path):
    run = edgellm("export", tiny_checkpoint, tmp_path / "engine", "--cpu-int8", "--precision", "bf16")
    assert_refused(run, "cpu_int8 needs precision fp32")


def test_export_with_limits_that_contradict_each_other(edgellm, tiny_checkpoint, tmp_path):
    run = edgellm("export", tiny_checkpoint, tmp_path / "engine", "--max-input-len", 448)
    assert_refused(run, "max_kv_cache_capacity 448", "max_input_len")


@pytest.mark.skipif(importlib.util.find_spec("tensorrt") is not None, reason="TensorRT is installed here")
@pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="TensorRT for RTX is missing")
def test_build_without_a_gpu_says_that_gpus_can_be_named(edgellm, tiny_engine):
    run = edgellm("build", tiny_engine)
    assert_refused(run, "no usable NVIDIA GPU", "; --gpu names GPUs to build for without one")


def test_build_for_more_drafted_tokens_than_the_cache_has(edgellm, tiny_engine):
    run = edgellm("build", tiny_engine, "--verification-tokens", 449)
    assert_refused(run, "verification of 449 tokens: expected 1 to the KV cache's 448")


def test_demo_of_something_that_is_no_checkpoint(edgellm, tmp_path):
    pytest.importorskip("rclpy")
    run = edgellm("demo", "--checkpoint", tmp_path, "--engine", tmp_path / "e", "--out", tmp_path / "o")
    assert_refused(run, str(tmp_path / "config.json"), "not a checkpoint")
