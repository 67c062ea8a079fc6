# SPDX-License-Identifier: Apache-2.0
"""Runs the command in this process, and makes the files that are given to it."""

from __future__ import annotations

import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest

from edgellm_ros.cli import main
from fixtures.command_run import Run

EXECUTES = ("generate", "chat", "transcribe", "bench")  # the commands that execute engines


@pytest.fixture
def edgellm(capfd, request):
    """`edgellm(arguments...)`: exit code and output, that of native libraries too.

    Engines are executed on the device that the tests are for.
    """

    def run(*arguments: object) -> Run:
        if arguments[:1] and arguments[0] in EXECUTES:
            arguments = (*arguments, *request.getfixturevalue("device_arguments"))
        capfd.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as ended:  # argparse
            code = ended.code
        return Run(code, *capfd.readouterr())

    return run


@pytest.fixture(scope="session")
def image(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("images") / "frame.png"
    pixels = np.random.default_rng(0).integers(0, 256, (96, 128, 3), np.uint8)
    assert cv2.imwrite(str(path), pixels)
    return path


@pytest.fixture
def broken_engine(tiny_engine, tmp_path) -> Path:
    """A copy of the tiny engine that a test may damage."""
    return Path(shutil.copytree(tiny_engine, tmp_path / "engine"))
