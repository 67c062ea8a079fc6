# SPDX-License-Identifier: Apache-2.0
"""Our reader and writer of safetensors files against the safetensors library."""

from __future__ import annotations

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file, save, save_file

from edgellm_ros.builder.checkpoint.safetensors_file import TensorFile, read_header
from edgellm_ros.builder.checkpoint.strips import strips

TYPES = [np.float16, np.float32, ml_dtypes.bfloat16]


def make(dtype, shape=(7, 5)):
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_tensors_are_those_that_the_library_wrote(tmp_path, dtype):
    tensors = {"a": make(dtype), "b": make(dtype, (3,)), "c": make(dtype, ()), "d": make(dtype, (0, 4))}
    save_file(tensors, tmp_path / "file", metadata={"format": "pt"})
    found = read_header(tmp_path / "file")
    assert set(found) == set(tensors)
    for name, expected in tensors.items():
        tensor = found[name].read()
        assert tensor.dtype == expected.dtype
        np.testing.assert_array_equal(tensor, expected)


@pytest.mark.parametrize(("start", "stop"), [(0, 3), (3, 7), (5, 100), (7, 9)])
def test_rows_are_read_alone(tmp_path, start, stop):
    tensor = make(np.float16)
    save_file({"a": tensor, "b": tensor}, tmp_path / "file")
    np.testing.assert_array_equal(read_header(tmp_path / "file")["b"].read(start, stop), tensor[start:stop])


@pytest.mark.parametrize("dtype", [*TYPES, np.int32])
@pytest.mark.parametrize("name", ["embedding", "a longer name, \u00e4"])
def test_written_files_are_those_of_the_library(tmp_path, dtype, name):
    tensor = make(dtype)
    file = TensorFile(name, tensor.dtype, tensor.shape, lambda: [tensor[:4], tensor[4:]])
    file.write(tmp_path / "file")
    assert (tmp_path / "file").stat().st_size == file.size
    np.testing.assert_array_equal(load_file(tmp_path / "file")[name], tensor)
    if name.isascii():
        assert (tmp_path / "file").read_bytes() == save({name: tensor})


def pack(header: object, data: int) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


def entry(start: int, stop: int, shape=(4,), dtype="F16") -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


DAMAGED = [
    (b"", "its header would have 0 bytes, the file has 0"),
    (b"\x01\x02", "the file has 2"),
    (struct.pack("<Q", 2**40) + b"{}", "its header would have 1099511627776 bytes, the file has 10"),
    (pack(b"not JSON", 0), "no header of a safetensors file"),
    (pack([1, 2], 0), "no header of a safetensors file"),
    (pack({"a": {"dtype": "F16"}}, 0), "no header of a safetensors file"),
    (pack({"a": entry(0, 8, (4.0,))}, 8), "no header of a safetensors file"),
    (pack({"a": entry(0, 8, (5,))}, 8), "no header of a safetensors file"),
    (pack({"a": entry(8, 0)}, 8), "no header of a safetensors file"),
    (pack({"a": entry(0, 8)}, 9), "bytes, but it has"),
    (pack({"a": entry(0, 8)}, 7), "bytes, but it has"),
    (pack({"a": entry(0, 8), "b": entry(4, 12)}, 12), "tensor 'b' overlaps another or leaves a gap"),
    (pack({"a": entry(0, 8), "b": entry(10, 18)}, 18), "tensor 'b' overlaps another or leaves a gap"),
]


@pytest.mark.parametrize(("contents", "message"), DAMAGED)
def test_a_damaged_file_is_refused_as_by_the_library(tmp_path, contents, message):
    path = tmp_path / "file"
    path.write_bytes(contents)
    with pytest.raises(SafetensorError):
        load_file(path)
    with pytest.raises(ValueError, match=f"file: damaged.*{message}"):
        read_header(path)


def test_a_pointer_of_git_lfs_is_named(tmp_path):
    path = tmp_path / "file"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ValueError, match=r"a pointer of Git LFS.*git lfs pull"):
        read_header(path)


def test_a_file_cut_after_its_header_was_read_is_an_error(tmp_path):
    path = tmp_path / "file"
    save_file({"a": make(np.float32)}, path)
    tensor = read_header(path)["a"]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="cut short while it was read: tensor 'a'"):
        tensor.read()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_strips_are_the_rows_of_the_array(monkeypatch, dtype, transposed):
    monkeypatch.setattr("edgellm_ros.builder.checkpoint.strips.STRIP_BYTES", 0)
    array = make(np.float32, (150, 200))
    array = array.T if transposed else array
    parts = list(strips(array, np.dtype(dtype)))
    assert [len(part) for part in parts] == ([64, 64, 64, 8] if transposed else [64, 64, 22])
    assert all(part.flags.c_contiguous for part in parts)
    np.testing.assert_array_equal(np.concatenate(parts), array.astype(dtype))
