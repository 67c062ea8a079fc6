# SPDX-License-Identifier: Apache-2.0
"""Damaged JSON in any file of a checkpoint is an error that names the file."""

from __future__ import annotations

import struct

import pytest

from edgellm_ros.builder import export
from edgellm_ros.engine_directory.config import EngineConfig
from fixtures.smolvla_checkpoint import write_smolvla
from fixtures.tiny_adapter import write_adapter
from fixtures.tiny_checkpoint import write_tiny_checkpoint

DEEP = '{"a": ' * 20_000 + "1" + "}" * 20_000
FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "special_tokens_map.json",
    "preprocessor_config.json",
    "processor_config.json",
    "chat_template.json",
    "model.safetensors.index.json",
    "hf_quant_config.json",
    "action_expert/config.json",
    "lora/polite/adapter_config.json",
]
DAMAGED = [
    (DEEP.encode(), "nested too deep"),
    (b'{"model_type": "\xff"}', "not valid JSON"),
    (b'{"model_type": ', "not valid JSON"),
    (b'{"vocab_size": ' + b"9" * 5000 + b"}", "not valid JSON"),
    (b"[]", "expected an object, got list"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), shards=1)
    write_adapter(directory / "lora" / "polite", directory)
    return directory


def changed(checkpoint, directory, name, contents):
    """Copy a checkpoint by links, with other contents of one file."""
    for path in checkpoint.rglob("*"):
        target = directory / path.relative_to(checkpoint)
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(path)
    (directory / name).unlink(missing_ok=True)
    (directory / name).write_bytes(contents)
    return directory


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(("contents", "message"), DAMAGED)
def test_a_damaged_file_is_named(checkpoint, tmp_path, name, contents, message):
    damaged = changed(checkpoint, tmp_path / "checkpoint", name, contents)
    with pytest.raises(ValueError, match=rf"{name}: .*{message}"):
        export(damaged, tmp_path / "engine")


@pytest.mark.parametrize(
    "name", ["config.json", "vlm/config.json", "vlm/tokenizer.json", "policy_preprocessor.json"]
)
def test_a_damaged_file_of_a_policy_is_named(tmp_path, name):
    checkpoint = write_smolvla(tmp_path / "checkpoint")
    (checkpoint / name).write_text(DEEP)
    with pytest.raises(ValueError, match=rf"{name}: .*nested too deep"):
        export(checkpoint, tmp_path / "engine")


@pytest.mark.parametrize("name", ["model.safetensors", "action_expert/model.safetensors"])
def test_a_header_of_weights_that_is_nested_too_deep_is_named(checkpoint, tmp_path, name):
    header = struct.pack("<Q", len(DEEP)) + DEEP.encode()
    damaged = changed(checkpoint, tmp_path / "checkpoint", name, header)
    with pytest.raises(ValueError, match=rf"{name}: damaged or cut short: no header.*: JSON that is nested"):
        export(damaged, tmp_path / "engine")


def test_a_config_of_an_engine_that_is_nested_too_deep_is_named(tmp_path):
    (tmp_path / "config.json").write_text(DEEP)
    with pytest.raises(ValueError, match=r"config\.json: JSON that is nested too deep"):
        EngineConfig.load(tmp_path)
