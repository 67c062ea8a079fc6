# SPDX-License-Identifier: Apache-2.0
"""The parameters of the CUDA kernels, by name."""

from __future__ import annotations

import re

import pytest

from edgellm_ros.kernels.cuda import signatures
from edgellm_ros.kernels.cuda.compiler import KERNELS, TREE_KERNELS, source
from edgellm_ros.kernels.cuda.signatures import in_order


def test_every_kernel_of_the_sources_is_found():
    program = source(tuple(dict.fromkeys(KERNELS + TREE_KERNELS)))
    assert len(signatures.signatures()) == len(re.findall("__global__ void", program))


def test_values_are_in_the_order_of_the_source():
    assert in_order("commit_rows", {"batch": 3, "counts": 2, "lengths": 1}) == (1, 2, 3)


def test_kernels_for_units_of_all_widths_have_one_signature():
    given = {"out": 1, "parents": 2, "lengths": 3, "size": 4, "units": 5}
    assert in_order("tree_mask_16", given) == in_order("tree_mask_1", given) == (1, 2, 3, 4, 5)


@pytest.mark.parametrize("kernel", ["commit", "commit_rows_of_none", "no_kernel_16"])
def test_an_unknown_kernel_is_an_error_that_tells_it(kernel):
    with pytest.raises(TypeError, match=f"^unknown kernel {kernel}$"):
        in_order(kernel, {"lengths": 1})


@pytest.mark.parametrize(
    "given, message",
    [
        ({"lengths": 1, "counts": 2}, r"kernel commit_rows: parameters missing: \['batch'\], unknown: \[\]"),
        ({"lengths": 1, "counts": 2, "rows": 3}, r"missing: \['batch'\], unknown: \['rows'\]"),
    ],
)
def test_another_name_is_an_error_that_tells_it(given, message):
    with pytest.raises(TypeError, match=message):
        in_order("commit_rows", given)
