# SPDX-License-Identifier: Apache-2.0
"""A tiny engine directory with random weights, made once per run of the tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ("builder", "data")]


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory) -> Path:
    from tiny_checkpoint import write_tiny_checkpoint

    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def tiny_engine(tiny_checkpoint, tmp_path_factory) -> Path:
    from edgellm_ros.builder import export

    directory = tmp_path_factory.mktemp("engine")
    export(tiny_checkpoint, directory)
    return directory
