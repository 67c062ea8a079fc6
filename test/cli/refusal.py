# SPDX-License-Identifier: Apache-2.0
"""What it means that the command refuses its input."""

from __future__ import annotations


def assert_refused(run, *words: str) -> None:
    assert run.code == 2
    assert run.out == ""
    assert len(run.err.splitlines()) == 1, run.err
    for word in words:
        assert word in run.err
