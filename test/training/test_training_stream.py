# SPDX-License-Identifier: Apache-2.0
"""Samples from worker processes; no PyTorch needed."""

from __future__ import annotations

import os

import numpy as np
import pytest

from training.stream import SampleStream

FIELDS = {"value": ((2,), np.int32)}


def counting(seed):
    def write(chunk, i):
        chunk["value"][i] = (seed, i)

    return write


def ending(seed):
    os._exit(3)


def test_every_worker_fills_whole_chunks():
    stream = SampleStream(FIELDS, counting, workers=2, chunk=3, slots=4, seed=5)
    seeds = set()
    while len(seeds) < 2:
        for chunk in stream.take(wait=True):
            assert chunk["value"][:, 1].tolist() == [0, 1, 2]
            assert len(set(chunk["value"][:, 0])) == 1
            seeds.add(int(chunk["value"][0, 0]))
    stream.close()
    assert seeds == {50_000, 50_001}


def test_a_worker_that_ended_is_an_error_instead_of_a_wait():
    stream = SampleStream(FIELDS, ending, workers=2, chunk=3, slots=4)
    with pytest.raises(RuntimeError, match="workers ended, exit codes"):
        list(stream.take(wait=True))
