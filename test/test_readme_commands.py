# SPDX-License-Identifier: Apache-2.0
"""README's commands run in a clone as they are written."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import cv2
import numpy as np
import pytest

from edgellm_arena.episodes.episode import World, make_episode
from edgellm_ros.cli import main
from edgellm_ros.cli.requests.request_files import CONVERSATION_KEYS, REQUEST_KEYS

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
GENERATE = re.compile(r"^\.venv/bin/edgellm (generate [^\n]*)", re.MULTILINE)
FILES = re.compile(r"(?:examples|out)/\S+")


def commands() -> list[str]:
    """Return README's commands `edgellm generate` whose files are in the repository.

    A demo writes those of the other commands.
    """
    found = GENERATE.findall((ROOT / "README.md").read_text())
    return [text for text in found if all(name.startswith("examples/") for name in FILES.findall(text))]


def test_readme_has_commands_for_the_files_of_the_examples():
    named = {name for text in commands() for name in FILES.findall(text)}
    assert named >= {"examples/frame.png", "examples/talk.json", "examples/requests.json"}


def test_the_example_frame_is_what_the_robot_sees():
    from tools.make_example_frame import EPISODE, FRAME

    frame = World(make_episode(EPISODE)).camera()
    stored = cv2.imread(str(FRAME))[..., ::-1]
    assert np.abs(stored.astype(int) - frame).max() <= 2


@pytest.mark.slow
@pytest.mark.only_on("cpu", reason="README's commands run on the CPU")
@pytest.mark.parametrize("text", commands())
def test_a_command_of_readme_runs_in_a_clone(arena_engine, tmp_path, monkeypatch, capsys, text):
    """In a folder with the examples and the demo's engine."""
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "arena").symlink_to(arena_engine)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    arguments = shlex.split(text, comments=True)
    assert main(arguments) == 0
    told = capsys.readouterr()
    if "--requests" in arguments:
        answers = json.loads((tmp_path / "answers.json").read_text())
        assert len(answers) == len(json.loads((EXAMPLES / "requests.json").read_text()))
    else:
        assert "box" in told.out


def test_the_page_of_formats_names_every_key():
    page = (ROOT / "docs" / "requests.md").read_text()
    for key in (*CONVERSATION_KEYS, *REQUEST_KEYS):
        assert f"`{key}`" in page, key


def test_help_of_generate_names_the_page_of_formats_and_the_examples(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    for name in ("docs/requests.md", "examples/talk.json", "examples/requests.json"):
        assert name in told
        assert (ROOT / name).is_file()
