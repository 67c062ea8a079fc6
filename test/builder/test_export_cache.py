# SPDX-License-Identifier: Apache-2.0
"""export_if_needed: an engine directory is exported again only after a change."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edgellm_ros.builder.export_cache import export_if_needed, export_to_cache, source_hash
from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.runtime.adapters.lora import find_adapters
from fixtures.gguf_files import write_gguf
from fixtures.tiny_adapter import write_adapter


@pytest.fixture
def checkpoint(tiny_checkpoint, tmp_path):
    shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    write_adapter(tmp_path / "checkpoint" / "lora" / "wild", tiny_checkpoint)
    return tmp_path / "checkpoint"


def test_an_up_to_date_engine_is_not_exported_again(checkpoint, tmp_path):
    export_if_needed(checkpoint, tmp_path / "engine")
    export_if_needed(checkpoint, tmp_path / "engine", lambda: pytest.fail("exported again"))


def test_an_engine_of_another_precision_is_exported_again(checkpoint, tmp_path):
    export_if_needed(checkpoint, tmp_path / "engine")
    assert export_if_needed(checkpoint, tmp_path / "engine", precision="fp16").precision == "fp16"


def test_a_renamed_adapter_is_exported_under_its_new_name(checkpoint, tmp_path):
    export_if_needed(checkpoint, tmp_path / "engine")
    (checkpoint / "lora" / "wild").rename(checkpoint / "lora" / "odd")
    export_if_needed(checkpoint, tmp_path / "engine")
    assert "odd" in find_adapters(tmp_path / "engine")


def test_another_option_is_a_reason_to_export_again(checkpoint, tmp_path):
    export_if_needed(checkpoint, tmp_path / "engine")
    config = export_if_needed(checkpoint, tmp_path / "engine", max_kv_cache_capacity=400)
    assert config.builder.max_kv_cache_capacity == 400


def test_a_vision_tower_beside_a_gguf_file_is_a_reason_to_export_again(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf")
    before = source_hash(path, ExportOptions())
    (tmp_path / "mmproj-tiny.gguf").write_bytes(b"GGUF")
    assert source_hash(path, ExportOptions()) != before


def test_of_two_processes_that_need_an_engine_one_exports(tmp_path, monkeypatch):
    """Here they are threads, whose locks are of different open files too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_gguf(tmp_path / "tiny.gguf")
    exported: list[Path] = []
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda _: export_to_cache(path, exported.append), range(2)))
    assert found == exported * 2
    assert EngineConfig.load(found[0]).precision == "fp32"
