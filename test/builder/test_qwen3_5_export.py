# SPDX-License-Identifier: Apache-2.0
"""Exports of Qwen3.5 with its vision tower.

test_vision_families.py has what all such families refuse.
"""

from __future__ import annotations

import dataclasses
import re

import pytest
from safetensors.numpy import load_file, save_file

from edgellm_ros.builder import check, export
from fixtures.changed_json import change
from fixtures.hybrid_checkpoints import write_qwen3_5_checkpoint
from fixtures.qwen3_5_checkpoint import write_whole_qwen3_5_checkpoint

TEXT = {"head_dim": 64, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint with 16 rotated pairs in each head; `mrope_section` is [11, 3, 2]."""
    directory = write_whole_qwen3_5_checkpoint(tmp_path / "checkpoint", rope_parameters=ROPE, **TEXT)
    change(directory / "config.json", ["text_config", "rope_parameters", "mrope_section"], [11, 3, 2])
    return directory


def change_tensors(checkpoint, edit) -> None:
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def test_the_report_of_a_check_is_that_of_the_export(checkpoint, tmp_path):
    report = check(checkpoint)
    config = export(checkpoint, tmp_path / "engine")
    assert report.config == dataclasses.replace(config, files=())
    assert report.files == {entry.path: entry.size for entry in config.files}
    assert [part.name for part in report.parts] == ["llm", "llm/verify", "visual"]
    assert config.vision is not None
    assert config.vision.num_deepstack_features == config.llm.num_deepstack_features == 0
    assert config.llm.rope.rotary_dim == 32
    assert (config.llm.rope.mrope_section, config.llm.rope.mrope_interleaved) == ((11, 3, 2), True)


@pytest.mark.parametrize(
    ("share", "section"), [(0.125, (2, 1, 1)), (0.5, (6, 5, 5)), (1.0, (11, 11, 10))], ids=str
)
def test_without_a_section_height_and_width_take_what_fits_of_11_and_10_pairs(tmp_path, share, section):
    rope = ROPE | {"partial_rotary_factor": share}
    checkpoint = write_whole_qwen3_5_checkpoint(tmp_path / "c", seed=3, rope_parameters=rope, **TEXT)
    assert check(checkpoint).config.llm.rope.mrope_section == section


def test_the_embedding_table_is_the_head_only_if_the_config_ties_them(checkpoint):
    change_tensors(checkpoint, lambda tensors: tensors.pop("lm_head.weight", None))
    change(checkpoint / "config.json", ["tie_word_embeddings"], True)
    check(checkpoint)
    change(checkpoint / "config.json", ["tie_word_embeddings"], False)
    with pytest.raises(ValueError, match=r"tensor 'lm_head\.weight' is missing"):
        check(checkpoint)


@pytest.mark.parametrize(
    "name",
    [
        "patch_embed.proj.weight",
        "patch_embed.proj.bias",
        "pos_embed.weight",
        "blocks.0.norm1.weight",
        "blocks.0.attn.qkv.weight",
        "blocks.0.mlp.linear_fc2.bias",
        "merger.norm.weight",
        "merger.linear_fc1.weight",
        "merger.linear_fc2.weight",
    ],
)
def test_a_tensor_of_the_tower_that_is_missing_or_of_another_shape_is_refused(checkpoint, name):
    full = f"model.visual.{name}"
    shape = load_file(checkpoint / "model.safetensors")[full].shape

    def cut(tensors):
        tensors[full] = tensors[full][:-1].copy()

    change_tensors(checkpoint, cut)
    cut_shape = [shape[0] - 1, *shape[1:]]
    message = f"tensor '{full}' has shape {cut_shape}, but by the config it is {list(shape)}"
    with pytest.raises(ValueError, match=re.escape(message)):
        check(checkpoint)
    change_tensors(checkpoint, lambda tensors: tensors.pop(full))
    with pytest.raises(ValueError, match=re.escape(f"tensor '{full}' is missing")):
        check(checkpoint)


def test_a_tower_without_an_image_processor_is_refused(checkpoint):
    (checkpoint / "preprocessor_config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"preprocessor_config\.json"):
        check(checkpoint)


def test_a_whole_without_a_vision_config_is_exported_as_its_text_alone(tmp_path):
    checkpoint = write_whole_qwen3_5_checkpoint(tmp_path / "checkpoint")
    change(checkpoint / "config.json", ["vision_config"], ...)
    whole = export(checkpoint, tmp_path / "whole")
    alone = export(write_qwen3_5_checkpoint(tmp_path / "text"), tmp_path / "alone")
    assert whole.vision is None
    assert whole.llm == alone.llm
    assert whole.llm.rope.mrope_section == ()  # positions are 0, 1, 2, ...
    data = [(tmp_path / engine / "llm/model.onnx.data").read_bytes() for engine in ("alone", "whole")]
    assert data[0] == data[1]


def test_a_kind_of_layer_that_is_no_text_is_refused(checkpoint, tmp_path):
    change(checkpoint / "config.json", ["text_config", "layer_types"], [["full_attention"]] * 4)
    with pytest.raises(ValueError, match=r"config\.json: text_config: layer_types .*: expected \d+ of"):
        export(checkpoint, tmp_path / "engine")
