# SPDX-License-Identifier: Apache-2.0
"""Engine directories, made once per run of the tests: a tiny one with random weights, and the demo's."""

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


@pytest.fixture(scope="session")
def arena_engine(tmp_path_factory) -> Path:
    """The demo checkpoint, exported."""
    from edgellm_ros.builder.freshness import ARENA_CHECKPOINT, export_if_needed

    directory = tmp_path_factory.mktemp("arena_engine")
    export_if_needed(ARENA_CHECKPOINT, directory)
    return directory
