# SPDX-License-Identifier: Apache-2.0
"""Tensors of an engine directory that are mapped into memory."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgellm_ros.builder.exporter.export import export
from edgellm_ros.engine_directory.tensor_file import map_tensor

SHAPE = 5, 3


def table(dtype=np.float32):
    return np.arange(15).reshape(SHAPE).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_mapped_tensor_is_that_of_the_file(tmp_path, dtype):
    path = tmp_path / "table.safetensors"
    save_file({"embedding": table(dtype)}, path)
    mapped = map_tensor(path, "embedding", SHAPE)
    assert mapped.dtype == dtype
    np.testing.assert_array_equal(mapped, table(dtype))


def test_changes_of_a_mapped_tensor_do_not_reach_the_file(tmp_path):
    path = tmp_path / "table.safetensors"
    save_file({"embedding": table()}, path)
    map_tensor(path, "embedding", SHAPE)[:] = 7
    np.testing.assert_array_equal(load_file(path)["embedding"], table())


@pytest.mark.parametrize(
    ("tensors", "found"),
    [
        ({"other": table()}, r"found \{'other': 'F32 \[5, 3\]'\}"),
        ({"embedding": table().T.copy()}, r"found \{'embedding': 'F32 \[3, 5\]'\}"),
        ({"embedding": table(np.int32)}, r"found \{'embedding': 'I32 \[5, 3\]'\}"),
        ({"embedding": table(), "more": table()}, r"found \{.*'more'"),
    ],
)
def test_another_tensor_is_refused_with_what_was_found(tmp_path, tensors, found):
    save_file(tensors, tmp_path / "table.safetensors")
    expected = rf"table\.safetensors: expected one tensor 'embedding' \[5, 3\] of floats, {found}"
    with pytest.raises(ValueError, match=expected):
        map_tensor(tmp_path / "table.safetensors", "embedding", SHAPE)


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "table.safetensors"
    save_file({"embedding": table()}, path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"table\.safetensors: not a readable safetensors file"):
        map_tensor(path, "embedding", SHAPE)


def test_a_new_export_leaves_the_mapped_file_to_those_who_map_it(tmp_path, tiny_checkpoint):
    export(tiny_checkpoint, tmp_path / "engine")
    path, link = tmp_path / "engine/embedding.safetensors", tmp_path / "link"
    before = path.read_bytes()
    link.hardlink_to(path)  # the same file, as a map has it
    export(tiny_checkpoint, tmp_path / "engine", precision="fp16")
    assert link.read_bytes() == before
    assert len(path.read_bytes()) < len(before)
