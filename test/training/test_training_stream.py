# SPDX-License-Identifier: Apache-2.0
"""Samples from worker processes; no PyTorch needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from training.stream import SampleStream, slots_for

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


@pytest.mark.slow
def test_workers_start_where_opencv_has_threads_already():
    """In a process of its own: such a worker would hang."""
    program = """
import cv2, numpy as np
from test_training_stream import FIELDS, SampleStream, counting

cv2.setNumThreads(4)
cv2.GaussianBlur(np.zeros((2000, 2000, 3), np.float32), (21, 21), 3)
for _ in range(10):
    stream = SampleStream(FIELDS, counting, workers=2, chunk=3, slots=4)
    next(stream.take(wait=True))
    stream.close()
assert cv2.getNumThreads() == 4
print("ready")
"""
    folder = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{folder.parents[1]}"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "ready\n", done.stderr


def test_at_most_the_given_number_of_chunks_is_taken():
    """Even where the workers fill chunks faster than the trainer takes them."""
    stream = SampleStream(FIELDS, counting, workers=2, chunk=3, slots=4, seed=5)
    for most in (1, 2):
        assert len(list(stream.take(wait=True, most=most))) <= most
    assert len(list(stream.take(wait=True, most=1))) == 1
    stream.close()


@pytest.mark.parametrize(("capacity", "count"), [(3_200, 96), (256, 8), (40, 2)])
def test_no_more_chunks_wait_than_the_buffer_holds(capacity, count):
    assert slots_for(capacity, most=96, chunk=32) == count
