# SPDX-License-Identifier: Apache-2.0
"""GGUF files of hybrids and of vision-language models.

Tensors, keys and files are compared with checkpoints, and what is not supported is refused.
"""

from __future__ import annotations

import json
import logging
import shutil
from functools import partial

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgellm_ros.builder import export
from edgellm_ros.builder.gguf.checkpoint import as_checkpoint, linked_tensors
from edgellm_ros.builder.quantization.gguf import GgufLayout
from fixtures.gguf_checkpoint import write_mmproj, write_model
from fixtures.gguf_files import write_gguf
from fixtures.hybrid_checkpoints import write_nemotron_h_checkpoint, write_qwen3_5_checkpoint
from fixtures.mtp_checkpoints import write_qwen3_5_with_head
from fixtures.qwen2_5_vl_checkpoint import write_qwen2_5_vl_checkpoint
from fixtures.qwen3_5_checkpoint import write_whole_qwen3_5_checkpoint
from fixtures.qwen3_vl_checkpoint import write_qwen3_vl_checkpoint

ROPE = {"rope_type": "axial", "rope_theta": 1e4}
whole_qwen3_5 = partial(
    write_whole_qwen3_5_checkpoint, vision={"temporal_patch_size": 2, "rope_parameters": ROPE}
)
TEXTS = {
    "qwen35": write_qwen3_5_checkpoint,
    "qwen35 with an MTP head": write_qwen3_5_with_head,
    "nemotron_h": write_nemotron_h_checkpoint,
}
WHOLES = {
    "qwen2vl": lambda directory, seed: write_qwen2_5_vl_checkpoint(directory),
    "qwen3vl": write_qwen3_vl_checkpoint,
    "qwen35": whole_qwen3_5,
}


def assert_same_tensors(found, checkpoint) -> None:
    """Compare tensors with those of a checkpoint, but for a tied head."""
    expected = load_file(checkpoint / "model.safetensors")
    expected = {name.replace("backbone.", "model."): values for name, values in expected.items()}
    if "lm_head.weight" not in found:
        expected.pop("lm_head.weight", None)
    assert set(found) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name].read(), values, atol=1e-6, rtol=0, err_msg=name)
        np.testing.assert_array_equal(found[name].read(1, 3), found[name].read()[1:3])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", TEXTS)
def test_tensors_of_a_text_model_are_those_of_the_checkpoint(tmp_path, case, seed):
    checkpoint = TEXTS[case](tmp_path / "checkpoint", seed)
    with as_checkpoint(write_model(checkpoint, tmp_path / "model.gguf")) as folder:
        assert_same_tensors(linked_tensors(folder), checkpoint)


@pytest.mark.parametrize("case", WHOLES)
def test_tensors_of_a_whole_model_are_those_of_the_checkpoint(tmp_path, case):
    checkpoint = WHOLES[case](tmp_path / "checkpoint", 0)
    path = write_model(checkpoint, tmp_path / "model.gguf")
    with as_checkpoint(path, write_mmproj(checkpoint, tmp_path / "tower.gguf")) as folder:
        assert_same_tensors(linked_tensors(folder), checkpoint)


@pytest.mark.parametrize(("size", "keeps_blocks"), [(32, True), (16, False)])
def test_blocks_move_with_the_heads_of_values(tmp_path, size, keeps_blocks):
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": size}
    checkpoint = write_qwen3_5_checkpoint(
        tmp_path / "checkpoint", hidden_size=64, intermediate_size=64, head_dim=32, **sizes
    )
    (module,) = {name[: -len(".weight")] for name in load_file(checkpoint / "model.safetensors")
                 if name.endswith("layers.0.linear_attn.out_proj.weight")}  # fmt: skip
    expected = load_file(checkpoint / "model.safetensors")[f"{module}.weight"]
    with as_checkpoint(write_model(checkpoint, tmp_path / "model.gguf", "Q8_0")) as folder:
        tensors = linked_tensors(folder)
        floats, matrix = tensors[f"{module}.weight"].read(), GgufLayout(None).matrix(tensors, module)
    np.testing.assert_allclose(floats, expected, atol=0.02)
    assert (matrix is not None) == keeps_blocks
    if matrix is not None:
        np.testing.assert_array_equal(matrix.dequantized().T, floats)


def test_attention_comes_at_the_interval_of_a_file_without_a_list(tmp_path):
    kinds = ["linear_attention", "linear_attention", "full_attention"] * 2
    checkpoint = write_qwen3_5_checkpoint(tmp_path / "checkpoint", num_hidden_layers=6, layer_types=kinds)
    keys = {"qwen35.attention.recurrent_layers": None, "qwen35.full_attention_interval": 3}
    with as_checkpoint(write_model(checkpoint, tmp_path / "model.gguf", **keys)) as folder:
        assert json.loads((folder / "config.json").read_text())["layer_types"] == kinds


def test_an_mtp_head_is_exported(tmp_path):
    checkpoint = write_qwen3_5_with_head(tmp_path / "checkpoint")
    config = export(write_model(checkpoint, tmp_path / "model.gguf"), tmp_path / "engine")
    assert config.draft is not None


def test_limits_of_images_are_those_of_the_published_processor(tmp_path):
    checkpoint = write_qwen2_5_vl_checkpoint(tmp_path / "checkpoint")
    limits = {f"clip.vision.image_{name}_pixels": None for name in ("min", "max")}
    mmproj = write_mmproj(checkpoint, tmp_path / "tower.gguf", **limits)
    with as_checkpoint(write_model(checkpoint, tmp_path / "model.gguf"), mmproj) as folder:
        processor = json.loads((folder / "preprocessor_config.json").read_text())
    assert (processor["min_pixels"], processor["max_pixels"]) == (3136, 12845056)


@pytest.fixture
def files(tmp_path):
    """A model and a vision tower in one folder, and their checkpoint."""
    checkpoint = write_qwen3_vl_checkpoint(tmp_path / "checkpoint")
    (tmp_path / "files").mkdir()
    model = write_model(checkpoint, tmp_path / "files/model.gguf")
    return checkpoint, model, write_mmproj(checkpoint, tmp_path / "files/mmproj-model.gguf")


def test_a_tower_beside_one_model_is_found(files, tmp_path):
    _, model, _ = files
    assert export(model, tmp_path / "engine").vision is not None
    assert export(model.parent, tmp_path / "engine").vision is not None


def test_one_of_several_towers_must_be_named(files, tmp_path, caplog):
    checkpoint, model, mmproj = files
    write_mmproj(checkpoint, model.parent / "mmproj-other.gguf")
    with caplog.at_level(logging.WARNING):
        assert export(model, tmp_path / "engine").vision is None
    assert "without images: name its vision tower with --mmproj" in caplog.text
    assert export(model, tmp_path / "engine", mmproj=mmproj).vision is not None


def test_a_model_beside_a_tower_that_is_not_supported_is_exported_as_text(files, tmp_path, caplog):
    _, _, mmproj = files
    write_gguf(tmp_path / "model.gguf", "llama")
    shutil.copy(mmproj, tmp_path / "mmproj.gguf")
    with caplog.at_level(logging.WARNING):
        assert export(tmp_path / "model.gguf", tmp_path / "engine").vision is None
    assert "model.gguf: without images: " in caplog.text
    assert "clip.projector_type 'qwen3vl_merger'" in caplog.text


def test_a_tower_is_not_exported_alone(files, tmp_path):
    _, model, mmproj = files
    message = (
        "general.architecture 'clip': a vision tower: give its language model, and this file with --mmproj"
    )
    with pytest.raises(ValueError, match=message):
        export(mmproj, tmp_path / "engine")
    model.unlink()
    with pytest.raises(
        ValueError, match=r"mmproj-model\.gguf is a vision tower: its language model is missing"
    ):
        export(mmproj.parent, tmp_path / "engine")


def test_a_tower_is_for_gguf_files_only(files, tmp_path):
    checkpoint, _, mmproj = files
    with pytest.raises(ValueError, match="checkpoint: --mmproj is for GGUF files"):
        export(checkpoint, tmp_path / "engine", mmproj=mmproj)


def test_a_tower_of_another_family_is_refused(files, tmp_path):
    _, _, mmproj = files
    for architecture, takes in (("llama", "takes no vision tower"), ("qwen2", "takes no vision tower")):
        model = write_gguf(tmp_path / f"{architecture}.gguf", architecture)
        message = (
            rf"clip\.projector_type 'qwen3vl_merger': .*{architecture}\.gguf is {architecture}, which {takes}"
        )
        with pytest.raises(ValueError, match=message):
            export(model, tmp_path / "engine", mmproj=mmproj)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"general.architecture": "qwen3"}, "general.architecture 'qwen3': no vision tower"),
        ({"clip.projector_type": "gemma3"}, "clip.projector_type 'gemma3': .* which takes qwen3vl_merger"),
        (
            {"clip.projector_type": "qwen2vl_merger"},
            "'qwen2vl_merger': .*qwen3vl, which takes qwen3vl_merger",
        ),
        (
            {"clip.has_audio_encoder": True},
            "clip.has_audio_encoder True: encoders of sound are not supported",
        ),
        ({"clip.use_gelu": None}, "clip.use_gelu None: expected true"),
        ({"clip.vision.projection_dim": 64}, "clip.vision.projection_dim 64: .* has embedding_length 48"),
        ({"clip.vision.patch_size": None}, "key 'clip.vision.patch_size' is missing"),
        ({"clip.vision.block_count": 10**9}, "clip.vision.block_count 1000000000: the file has"),
        ({"clip.vision.embedding_length": 64}, "tensor .* has shape .* but by the config it is"),
        ({"clip.vision.attention.layer_norm_epsilon": 1e-3}, "layer_norm_epsilon 0.001.*: expected 1e-06"),
        ({"clip.vision.is_deepstack_layers": [True] * 3}, "takes 2 deepstack features, got 3"),
        ({"clip.vision.image_mean": [0.5]}, "clip.vision.image_mean .*: expected 3 numbers"),
    ],
)
def test_a_tower_that_is_not_supported_is_refused_in_one_line(files, tmp_path, keys, message):
    checkpoint, model, mmproj = files
    write_mmproj(checkpoint, mmproj, **keys)
    with pytest.raises(ValueError, match=message) as error:
        export(model, tmp_path / "engine", mmproj=mmproj)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("case", "keys", "message"),
    [
        ("qwen35", {"qwen35.block_count": 10**9}, "qwen35.block_count 1000000000: the file has"),
        ("qwen35", {"qwen35.nextn_predict_layers": 99}, "nextn_predict_layers 99: expected less than"),
        ("qwen35", {"qwen35.ssm.inner_size": 1}, "ssm.inner_size 1: expected a multiple of"),
        ("qwen35", {"qwen35.rope.scaling.type": "yarn"}, "rope.scaling.type 'yarn': qwen35 is supported"),
        ("qwen35", {"qwen35.attention.recurrent_layers": [1]}, "recurrent_layers .*: expected 2 times true"),
        ("nemotron_h", {"nemotron_h.feed_forward_length": [8]}, "feed_forward_length .*: expected 0 in"),
        ("nemotron_h", {"nemotron_h.feed_forward_length": [8, 8]}, "expected an integer for each of"),
        ("nemotron_h", {"nemotron_h.expert_count": 8}, "expert_count 8: mixtures of experts are not"),
    ],
)  # fmt: skip
def test_a_hybrid_that_is_not_supported_is_refused_in_one_line(tmp_path, case, keys, message):
    sizes = {"linear_num_value_heads": 2, "num_hidden_layers": 2, "linear_num_key_heads": 2}
    sizes |= {"layer_types": ["linear_attention", "full_attention"]}
    checkpoint = TEXTS[case](tmp_path / "checkpoint", **(sizes if case == "qwen35" else {}))
    path = write_model(checkpoint, tmp_path / "model.gguf", **keys)
    with pytest.raises(ValueError, match=message) as error:
        export(path, tmp_path / "engine")
    assert "\n" not in str(error.value)


def test_states_that_grow_are_refused(tmp_path):
    """A is below 0; its logarithm would be no number."""
    checkpoint = write_nemotron_h_checkpoint(tmp_path / "checkpoint")
    tensors = load_file(checkpoint / "model.safetensors")
    name = next(name for name in tensors if name.endswith("A_log"))
    tensors[name][0] = -np.inf
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    path = write_model(checkpoint, tmp_path / "model.gguf")
    with pytest.raises(ValueError, match=r"tensor 'blk\.\d\.ssm_a': expected numbers below 0"):
        export(path, tmp_path / "engine")
