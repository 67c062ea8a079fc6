# SPDX-License-Identifier: Apache-2.0
"""The tables from steps to the sizes of the fused kernels."""

from __future__ import annotations

import dataclasses
import json

import pytest

from edgellm_ros.fused.plan.quantized import Quantized
from edgellm_ros.fused.plan.shape import FusedShape
from edgellm_ros.fused.plan.tuning import TABLES, load_tuning, nearest_table, read_tuning, write_tuning
from fixtures.small_tuning import H200

SHAPE = FusedShape("fp16", 28, 2048, 16, 8, 128, 6144, 151936, 128, 8192, max_rows=16)


def of_size(hidden: int) -> FusedShape:
    return dataclasses.replace(SHAPE, hidden=hidden)


@pytest.mark.parametrize("path", sorted(TABLES.glob("*.json")), ids=lambda path: path.stem)
@pytest.mark.parametrize("hidden", [64, 1024, 2048, 4096, 16384])
def test_every_table_has_sizes_for_every_step(path, hidden):
    tuning, shape = read_tuning(path), of_size(hidden)
    quantized = dataclasses.replace(shape, quantized=(("qkv", Quantized(4, 128)),))
    for rows in range(1, 17):
        for adapted in (False, True):
            assert tuning.config(shape, rows, adapted).threads % 32 == 0
            assert tuning.config(quantized, rows, adapted).threads % 32 == 0


def test_the_first_row_that_fits_a_step_counts():
    first = H200.changed(lambda step: {"threads": 32 * step.rows})
    assert [first.config(SHAPE, rows).threads for rows in (1, 2, 8, 9, 16)] == [32, 512, 512, 512, 512]
    assert [first.config(of_size(1024), rows).threads for rows in (1, 2, 8, 9)] == [32, 128, 256, 512]


def test_rows_beyond_the_table_have_no_sizes():
    with pytest.raises(ValueError, match="no tuning of dense weights for 17 rows and hidden size 2048"):
        H200.config(SHAPE, 17)


def test_a_written_table_is_read_as_it_was(tmp_path):
    tuning = H200.changed(lambda step: {"stages": step.rows, "prefetched": None})
    write_tuning(tmp_path / "sm_100.json", tuning)
    assert read_tuning(tmp_path / "sm_100.json") == tuning


@pytest.mark.parametrize(
    "change, message",
    [
        ({"steps": []}, "expected a row of dense weights with rows 16, hidden null"),
        ({"steps": {}}, "steps: expected a list of objects"),
        ({"steps": [{"weights": "sparse", "rows": 1, "hidden": None}]}, "must be one of dense, adapted"),
        ({"steps": [{"weights": "dense", "rows": 1, "hidden": None, "tiles": 64}]}, "unknown key 'tiles'"),
        ({"steps": [{"weights": "dense", "rows": "1", "hidden": None}]}, "rows: expected int"),
        ({"common": {}}, "missing key 'tensor_cores'"),
    ],
)
def test_a_table_that_cannot_be_read_names_file_and_key(tmp_path, change, message):
    data = json.loads((TABLES / "sm_90.json").read_text())
    path = tmp_path / "sm_90.json"
    path.write_text(json.dumps(data | change))
    with pytest.raises(ValueError, match=message) as error:
        read_tuning(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    "arch, used", [("sm_80", "sm_87"), ("sm_87", "sm_87"), ("sm_90", "sm_90"), ("sm_110", "sm_90")]
)
def test_an_architecture_without_a_table_takes_the_nearest_older_one(monkeypatch, tmp_path, arch, used):
    for name in ("sm_87", "sm_90"):
        (tmp_path / f"{name}.json").touch()
    monkeypatch.setattr("edgellm_ros.fused.plan.tuning.TABLES", tmp_path)
    assert nearest_table(arch).stem == used


def test_the_shipped_table_is_loaded_for_its_architecture():
    assert load_tuning("sm_90").gpu == "NVIDIA H200"
