# SPDX-License-Identifier: Apache-2.0
"""The examples are short, and README shows them as they are."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

from edgellm_arena.episodes.episode import make_episode
from edgellm_arena.world.renderer import render

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LICENCE = "# SPDX-License-Identifier: Apache-2.0\n"


def test_every_python_block_of_readme_is_an_example():
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    examples = {path.read_text().removeprefix(LICENCE) for path in EXAMPLES}
    assert len(blocks) == 2
    for block in blocks:
        assert block in examples, block


def test_readme_names_every_example():
    readme = (ROOT / "README.md").read_text()
    for path in EXAMPLES:
        assert f"(examples/{path.name})" in readme


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_has_at_most_60_lines(path):
    assert len(path.read_text().splitlines()) <= 60


@pytest.mark.slow
@pytest.mark.only_on("cpu", reason="the example runs on the CPU")
def test_in_process_prints_an_answer_and_a_path(arena_engine, tmp_path, monkeypatch, capsys):
    episode = make_episode(1)
    frame = render(episode.scene, episode.start, np.random.default_rng(0))
    cv2.imwrite(str(tmp_path / "frame.png"), frame[..., ::-1])
    example = ROOT / "examples" / "in_process.py"
    monkeypatch.setattr(sys, "argv", [str(example), str(arena_engine), str(tmp_path / "frame.png")])
    variables = runpy.run_path(str(example))
    text, _, path = capsys.readouterr().out.partition("\n")
    assert text == variables["response"].text != ""
    assert len(path.splitlines()) == 41


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("no_engine", "FRAME"), "in_process.py: no_engine/config.json not found"),
        (("no_engine", "no.png"), "in_process.py: no.png: no such file"),
        ((), "Plan in this process, without ROS: `in_process.py ENGINE_DIR IMAGE`."),
    ],
)
def test_in_process_without_its_files_ends_with_one_line(monkeypatch, tmp_path, arguments, words):
    frame = str(ROOT / "examples" / "frame.png")
    monkeypatch.chdir(tmp_path)
    example = ROOT / "examples" / "in_process.py"
    monkeypatch.setattr(sys, "argv", [str(example), *(frame if a == "FRAME" else a for a in arguments)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(example))
    assert ended.value.code.startswith(words)
    assert len(ended.value.code.splitlines()) == 1
