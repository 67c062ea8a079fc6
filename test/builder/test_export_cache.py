# SPDX-License-Identifier: Apache-2.0
"""export_if_needed: an engine directory is exported again only after a change."""

from __future__ import annotations

import shutil

import pytest

from edgellm_ros.builder.export_cache import export_if_needed
from edgellm_ros.runtime.adapters.lora import find_adapters
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
