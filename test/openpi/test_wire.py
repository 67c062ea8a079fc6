# SPDX-License-Identifier: Apache-2.0
"""Messages of openpi's protocol: arrays, limits, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm_ros.openpi.wire import MAX_DEPTH, MAX_ITEMS, pack, unpack
from fixtures.plain_msgpack import array_map, encoded

ARRAYS = {
    "image": np.arange(24, dtype=np.uint8).reshape(2, 4, 3),
    "float32": np.array([1.5, -2.0], "<f4"),
    "big endian": np.array([[1, -2, 300]], ">i2"),
    "float16": np.array([0.5], "<f2"),
    "no dimension": np.array(3.0),
    "empty": np.zeros((2, 0, 3), np.int64),
    "booleans": np.array([True, False]),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_that_another_encoder_wrote_are_read(name):
    array = ARRAYS[name]
    found = unpack(encoded({"x": array}))["x"]
    np.testing.assert_array_equal(found, array)
    assert found.shape == array.shape
    assert found.dtype == array.dtype.newbyteorder("=")


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_are_read_as_they_were_packed(name):
    np.testing.assert_array_equal(unpack(pack({"x": ARRAYS[name]}))["x"], ARRAYS[name])


def test_arrays_and_numbers_are_packed_as_openpi_packs_them():
    # of openpi-client 0.1.2: packb({"a": np.array([1, 2], "<i2"), "b": np.float32(0.5)})
    expected = (
        b"\x82\xa1a\x84\xc4\x0b__ndarray__\xc3\xc4\x04data\xc4\x04\x01\x00\x02\x00\xc4\x05dtype\xa3<i2\xc4\x05"
        b"shape\x91\x02\xa1b\x83\xc4\r__npgeneric__\xc3\xc4\x04data\xcb?\xe0\x00\x00\x00\x00\x00\x00\xc4\x05"
        b"dtype\xa3<f4"
    )
    assert pack({"a": np.array([1, 2], "<i2"), "b": np.float32(0.5)}) == expected
    found = unpack(expected)
    assert (found["a"].tolist(), found["b"], found["b"].dtype) == ([1, 2], 0.5, np.float32)


def test_texts_numbers_lists_and_maps_are_read():
    value = {"prompt": "näh", "images": {"top": [1, 2.5, None, True]}, "raw": b"\x00\xff"}
    assert unpack(encoded(value)) == value == unpack(pack(value))


def test_arrays_are_native_even_if_booleans_are_no_zeros_and_ones():
    found = unpack(encoded(array_map(b"\x00\x02\xff", "|b1", [3])))
    assert found.view(np.uint8).tolist() == [0, 1, 1]


REFUSED = {
    "nothing": (b"", "incomplete input"),
    "more than a message": (encoded({}) + b"\x00", "extra data"),
    "a code that msgpack does not have": (b"\xc1", "FormatError"),
    "an extension": (b"\xd4\x05a", "an extension of msgpack (type 5)"),
    "a time": (b"\xd6\xff\x00\x00\x00\x00", "values of type Timestamp"),
    "half of a character": (b"\xa1\xff", "'utf-8' codec can't decode"),
    "a number as a key": (b"\x81\x01\x02", "int is not allowed for map key"),
    "bytes as a key": (encoded({b"x": 1}), "keys must be texts, got b'x'"),
    "a list that is not there": (b"\xdd\xff\xff\xff\xff", "exceeds max_array_len"),
    "too many items": (encoded([[0] * (MAX_ITEMS // 2)] * 2), f"more than {MAX_ITEMS} items"),
    "very deep": (b"\x91" * 3000, "StackError"),
    "objects": (encoded(array_map(b"12345678", "|O", [1])), "a dtype must be of booleans"),
    "complex numbers": (encoded(array_map(b"12345678", "<c8", [1])), "integers or floats, such as '<f4'"),
    "fields": (encoded(array_map(b"1234", "f4,f4", [1])), "got 'f4,f4'"),
    "times of NumPy": (encoded(array_map(b"12345678", "<M8[s]", [1])), "got '<M8[s]'"),
    "a dtype that is no text": (encoded(array_map(b"1234", 4, [1])), "such as '<f4', got 4"),
    "too few bytes": (encoded(array_map(b"1234", "<f4", [2])), "an array [2] of float32 has not 4 bytes"),
    "a huge shape": (encoded(array_map(b"1234", "<f4", [2**62, 4])), "has not 4 bytes"),
    "an empty huge shape": (encoded(array_map(b"", "<f4", [2**63, 0])), "not a message"),
    "a negative size": (encoded(array_map(b"1234", "<f4", [-1])), "a shape must have at most 8 sizes from 0"),
    "nine dimensions": (encoded(array_map(b"1", "|u1", [1] * 9)), "a shape must have at most 8 sizes"),
    "a text as data": (encoded(array_map("1234", "<f4", [1])), "data of an array must be bytes, got str"),
    "an array without a shape": (encoded({b"__ndarray__": True}), "an array has the keys b'__ndarray__'"),
    "a number without data": (encoded({b"__npgeneric__": True}), "a number has the keys b'__npgeneric__'"),
    "a number too large": (
        encoded({b"__npgeneric__": True, b"data": 300, b"dtype": "|u1"}),
        "300 out of bounds for uint8",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_message_is_refused_in_one_line(what):
    message, expected = REFUSED[what]
    with pytest.raises(ValueError, match=r"^[^\n]{10,400}$") as refused:
        unpack(message)
    assert expected in str(refused.value)


def test_maps_and_lists_in_each_other_are_counted():
    value: object = 1
    for _ in range(MAX_DEPTH):
        value = {"x": [value]} if value == 1 else [value]
    with pytest.raises(ValueError, match=f"more than {MAX_DEPTH} maps and lists in each other"):
        unpack(encoded(value))
    assert unpack(encoded(value[0])) == value[0]


@pytest.mark.parametrize("array", [np.zeros(1, complex), np.array([None]), np.array(["text"])])
def test_other_arrays_are_not_packed(array):
    with pytest.raises(ValueError, match="arrays must be of booleans, integers or floats"):
        pack({"x": array})
