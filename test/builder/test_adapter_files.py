# SPDX-License-Identifier: Apache-2.0
"""Adapters in a checkpoint's folder `lora` that are one file are exported."""

from __future__ import annotations

import shutil

import pytest
from safetensors.numpy import load_file, save_file

from edgellm_ros.builder import check, export, inspect
from fixtures.tiny_adapter import write_adapter


@pytest.fixture
def checkpoint(tiny_checkpoint, tmp_path):
    """A checkpoint with a directory, and with a file that has its configuration."""
    copy = shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    directory = write_adapter(copy / "lora" / "polite", copy, r=3)
    metadata = {"lora_adapter_metadata": (directory / "adapter_config.json").read_text()}
    tensors = load_file(directory / "adapter_model.safetensors")
    save_file(tensors, copy / "lora" / "short.safetensors", metadata)
    return copy


def adapter_files(engine):
    folder = engine / "lora"
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_file_is_copied_as_it_is_and_the_check_knows_its_size(checkpoint, tmp_path):
    report = check(checkpoint)
    export(checkpoint, tmp_path / "engine")
    expected = ["polite/adapter_config.json", "polite/adapter_model.safetensors", "short.safetensors"]
    assert adapter_files(tmp_path / "engine") == expected
    sizes = {f"lora/{name}": (tmp_path / "engine" / "lora" / name).stat().st_size for name in expected}
    assert {name: size for name, size in report.files.items() if name.startswith("lora/")} == sizes
    adapters = {each.name: each for each in inspect(tmp_path / "engine").adapters}
    assert (adapters["short"].rank, adapters["short"].modules) == (3, adapters["polite"].modules)


def test_a_file_with_its_configuration_beside_it_becomes_a_directory(checkpoint, tmp_path):
    polite = checkpoint / "lora" / "polite"
    (polite / "adapter_model.safetensors").rename(checkpoint / "lora" / "polite.safetensors")
    (polite / "adapter_config.json").rename(checkpoint / "lora" / "adapter_config.json")
    polite.rmdir()
    export(checkpoint, tmp_path / "engine")
    expected = ["polite/adapter_config.json", "polite/adapter_model.safetensors", "short.safetensors"]
    assert adapter_files(tmp_path / "engine") == expected
    assert [each.name for each in inspect(tmp_path / "engine").adapters] == ["polite", "short"]


def test_an_adapter_of_the_other_form_is_replaced(checkpoint, tmp_path):
    export(checkpoint, tmp_path / "engine")
    lora = checkpoint / "lora"
    shutil.rmtree(lora / "polite")
    (lora / "short.safetensors").rename(lora / "polite.safetensors")
    export(checkpoint, tmp_path / "engine")
    assert adapter_files(tmp_path / "engine") == ["polite.safetensors", "short.safetensors"]


def test_a_file_without_a_configuration_is_refused(checkpoint, tmp_path):
    path = checkpoint / "lora" / "short.safetensors"
    save_file(load_file(path), path)
    with pytest.raises(ValueError, match=r"short\.safetensors: rank and alpha are missing"):
        export(checkpoint, tmp_path / "engine")
    assert not (tmp_path / "engine").exists()
