# SPDX-License-Identifier: Apache-2.0
"""What the demo shows: much of a few episodes, little of many."""

from __future__ import annotations

import io

from edgellm_arena.ros.display import Display

COMMAND = {"event": "command", "number": 0, "seed": 5, "family": "random", "command": "go to it",
    "person": "Annie (en), rain 20 dB below",
}  # fmt: skip
PLAN = {
    "event": "plan", "number": 0, "time": 0.8, "text": "the way is clear.", "drives": True,
    "first_words_s": 0.1, "plan_s": 0.3,
}  # fmt: skip
OUTCOME = {
    "event": "outcome", "number": 0, "seed": 5, "outcome": "success", "time": 5.6, "plans": 7,
    "plan_seconds": [0.3, 0.5], "command": "go to it", "understood": True, "picture": "out/episode_000.png",
}  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(file: io.StringIO, episodes: int) -> str:
    display = Display(file, episodes)
    display.status("starting ...")
    for _ in range(episodes):
        for event in (COMMAND, PLAN, PLAN, OUTCOME):
            display.show(event)
    display.close()
    return file.getvalue()


def test_a_single_episode_is_shown_as_a_conversation_with_latencies():
    text = shown(io.StringIO(), 1)
    assert "person: go to it" in text
    assert text.count("the way is clear.") == 2
    assert "100 ms" in text
    assert "success" in text
    assert "out/episode_000.png" in text


def test_the_line_of_an_outcome_has_the_seed_that_plays_the_episode_again():
    for episodes in (1, 50):
        (line, *_) = [line for line in shown(io.StringIO(), episodes).splitlines() if "success" in line]
        assert "(episode seed 5)" in line


def test_many_episodes_get_one_line_each():
    lines = shown(io.StringIO(), 50).splitlines()
    assert len(lines) == 51  # and one at the start
    assert all("success" in line for line in lines[1:])


def test_on_a_terminal_the_status_line_is_rewritten():
    text = shown(Terminal(), 50)
    assert text.count("\n") == 50
    assert "[0/0 of 50]" in text
    assert text.endswith("\x1b[2K")


def test_an_answer_that_does_not_drive_is_marked():
    file = io.StringIO()
    Display(file, 1).show({**PLAN, "drives": False})
    assert "does not drive" in file.getvalue()
