# SPDX-License-Identifier: Apache-2.0
"""GGUF files: keys and tensors that are read, and files that are damaged."""

from __future__ import annotations

import struct
import tracemalloc

import gguf
import numpy as np
import pytest

from edgellm_ros.builder import export
from edgellm_ros.builder.gguf.blocks import TYPES
from edgellm_ros.builder.gguf.reader import read_gguf
from fixtures.draws import draws
from fixtures.gguf_files import QUANTISED, random_blocks, write_gguf

MUTATIONS = draws(150, 500)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf")


def test_keys_and_tensors_are_those_of_llama_cpps_own_reader(path):
    found, expected = read_gguf(path), gguf.GGUFReader(path)
    assert found.keys == {
        name: field.contents() for name, field in expected.fields.items() if not name.startswith("GGUF.")
    }
    assert {name: (t.type.name, t.offset, t.size) for name, t in found.tensors.items()} == {
        each.name: (each.tensor_type.name, each.data_offset, each.n_bytes) for each in expected.tensors
    }
    assert found.tensors["blk.0.ffn_down.weight"].shape == (256, 512)


def test_the_parts_of_a_model_are_read_together(tmp_path):
    for part, name in enumerate(("a", "b"), start=1):
        writer = gguf.GGUFWriter(tmp_path / f"m-{part:05d}-of-00002.gguf", "llama")
        writer.add_uint32("split.tensors.count", 2)
        writer.add_tensor(name, np.full((2, 4), part, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    assert sorted(read_gguf(tmp_path / "m-00001-of-00002.gguf").tensors) == ["a", "b"]
    with pytest.raises(ValueError, match=r"part 2 of 2: give the first, m-00001-of-00002\.gguf"):
        read_gguf(tmp_path / "m-00002-of-00002.gguf")
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(FileNotFoundError, match=r"m-00002-of-00002\.gguf not found"):
        read_gguf(tmp_path / "m-00001-of-00002.gguf")


@pytest.mark.parametrize("kind", QUANTISED)
def test_weights_are_those_of_llama_cpps_own_arithmetic_to_the_last_bit(kind):
    number, block = next((number, each) for number, each in TYPES.items() if each.name == kind)
    data = random_blocks(kind, 16, 512, np.random.default_rng(0))
    codes = block.unpack(data.reshape(16, -1, block.bytes))
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(number))
    np.testing.assert_array_equal(codes.weights(block.centre), expected)
    assert codes.scales.shape == (16, 512 // block.group)
    assert (codes.minima is not None) == block.has_minima
    around = codes.values.astype(int) - block.centre
    assert -(1 << block.bits - 1) <= around.min()
    assert around.max() < 1 << block.bits - 1


def header(*parts: bytes, tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + b"".join(parts)


def string(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


def tensor(name: bytes, shape, kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


NUMBER = struct.pack("<II", 4, 7)  # an entry's type and value
DAMAGED = {
    "another format": (b"GGML" + bytes(40), "no GGUF file"),
    "a short file": (b"GGUF", "a file of 4 bytes"),
    "version 1": (header(bytes(40), version=1), "version 1, supported: 2, 3"),
    "10**12 tensors": (header(tensors=10**12), "1000000000000 tensors would not fit"),
    "10**12 keys": (header(keys=10**12), "1000000000000 keys would not fit"),
    "a key of 2**60 bytes": (header(string(b"k", 2**60), bytes(40), keys=1), "a key would have"),
    "a key twice": (header(string(b"k"), NUMBER, string(b"k"), NUMBER, keys=2), "key 'k' twice"),
    "no UTF-8": (header(string(b"\xff\xfe"), NUMBER, bytes(9), keys=1), "a key is no UTF-8"),
    "an unknown type": (header(string(b"k"), struct.pack("<II", 77, 0), keys=1), "values of type 77"),
    "an array of arrays": (
        header(string(b"k"), struct.pack("<IIQ", 9, 9, 3), bytes(30), keys=1), "values of type 9"
    ),
    "an array of 2**63": (
        header(string(b"k"), struct.pack("<IIQ", 9, 4, 2**63), bytes(30), keys=1), "would not fit"
    ),
    "a bool of 2": (header(string(b"k"), struct.pack("<IB", 7, 2), bytes(9), keys=1), "key 'k' is 2, exp"),
    "an alignment of 3": (
        header(string(b"general.alignment"), struct.pack("<II", 4, 3), keys=1),
        "general.alignment 3: expected a power of two",
    ),
    "five dimensions": (header(tensor(b"t", (1, 1, 1, 1, 1)), bytes(40), tensors=1), "has 5 dimensions"),
    "no row": (header(tensor(b"t", (4, 0)), bytes(40), tensors=1), r"has the shape \[0, 4\]"),
    "2**64 values": (header(tensor(b"t", (2**33, 2**33)), bytes(40), tensors=1), "has the shape"),
    "codes of a book": (header(tensor(b"t", (256,), 16), bytes(99), tensors=1), "is IQ2_XXS; supported: F32"),
    "half a block": (header(tensor(b"t", (48,), 8), bytes(99), tensors=1), "rows of 48 in blocks of 32"),
    "an odd offset": (header(tensor(b"t", (8,), 0, 3), bytes(99), tensors=1), "is at 3, no multiple of 32"),
    "a tensor beyond the file": (header(tensor(b"t", (999,)), bytes(40), tensors=1), "ends at byte"),
    "two tensors in one place": (
        header(tensor(b"a", (8,)), tensor(b"b", (8,)), bytes(200), tensors=2), "'b' overlaps another"
    ),
    "a tensor twice": (
        header(tensor(b"a", (8,)), tensor(b"a", (8,), 0, 32), bytes(200), tensors=2), "'a' twice"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused_in_one_line(tmp_path, name):
    data, message = DAMAGED[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message) as error:
        read_gguf(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_mutated_files_are_refused_in_one_line_or_read(path, tmp_path):
    """Bytes of the header change, or the file is cut."""
    original = bytearray(path.read_bytes())
    end = min(place.offset for place in read_gguf(path).tensors.values())
    rng, refused = np.random.default_rng(0), []
    mutated = tmp_path / "mutated.gguf"
    tracemalloc.start()
    for _ in range(MUTATIONS):
        data = bytearray(original)
        if rng.random() < 0.2:
            del data[int(rng.integers(len(data))) :]
        else:
            for at in rng.integers(0, end, int(rng.integers(1, 4))):
                width = int(rng.choice([1, 4, 8]))
                data[at : at + width] = rng.bytes(width) if rng.random() < 0.7 else b"\xff" * width
        mutated.write_bytes(data)
        try:
            export(mutated, tmp_path / "engine")
        except (ValueError, FileNotFoundError) as error:
            refused.append(str(error))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(refused) > MUTATIONS / 2
    assert not [message for message in refused if "\n" in message]
    assert peak < 200e6
