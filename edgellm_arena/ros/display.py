# SPDX-License-Identifier: Apache-2.0
"""Output of `edgellm demo`: the conversation of few episodes, or one line each."""

from __future__ import annotations

from typing import Any, TextIO

from edgellm_ros.ros.demo_display import FEW, DemoDisplay


class Display(DemoDisplay):
    """Shows commands, plans and outcomes."""

    def __init__(self, file: TextIO, episodes: int) -> None:
        super().__init__(file, episodes)
        self._number = -1  # of the episode on show

    def _command(self, event: dict[str, Any]) -> None:
        if self._episodes <= FEW:
            if event["number"] != self._number:
                self._number = event["number"]
                self.line(f"episode {self._number}")
                self.line(f"  {'time':>6}  {'first words':>11}  {'plan':>7}")
            self.line(f"{'':>30}  person: {event['command']}")
            if event["person"]:
                self.line(f"{'':>30}          (spoken by {event['person']})")

    def _plan(self, event: dict[str, Any]) -> None:
        text = event["text"] + ("" if event["drives"] else " (does not drive)")
        times = f"{event['first_words_s'] * 1e3:>8.0f} ms  {event['plan_s'] * 1e3:>4.0f} ms"
        if self._episodes <= FEW:
            self.line(f"  {event['time']:>4.1f} s  {times}  robot: {text}")
        elif self._terminal:
            done = f"[{self._won}/{self._played} of {self._episodes}]"
            self.status(f"{done} episode {event['number']}, {event['time']:.1f} s, {times}: {text}")

    def _outcome(self, event: dict[str, Any]) -> None:
        self._played += 1
        self._won += event["outcome"] == "success"
        plan_ms = 1e3 * sum(event["plan_seconds"]) / max(1, len(event["plan_seconds"]))
        self.line(
            f"episode {event['number']:>2} (episode seed {event['seed']}) {event['outcome']:<9} "
            f"after {event['time']:>4.1f} s simulated, "
            f'{event["plans"]:>2} plans of {plan_ms:.0f} ms on average: "{event["command"]}"'
            + ("" if event["understood"] else " (not understood)")
            + (f" -> {event['picture']}" if event["picture"] and self._episodes <= FEW else "")
        )
