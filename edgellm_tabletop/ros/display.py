# SPDX-License-Identifier: Apache-2.0
"""Output of `edgellm demo --arm`: the chunks of few episodes, or one line each."""

from __future__ import annotations

from typing import Any

from edgellm_ros.ros.demo_display import FEW, DemoDisplay


class Display(DemoDisplay):
    """Shows chunks and outcomes."""

    def _plan(self, event: dict[str, Any]) -> None:
        refused = f" (refused: {event['refused']})" if event["refused"] else ""
        after = f" after {1e3 * event['seconds']:4.0f} ms" if event["seconds"] else ""  # none of the expert
        text = f"{event['time']:4.1f} s  chunk{after}{refused}"
        if self._episodes <= FEW:
            self.line(f"  {text}")
        elif self._terminal:
            done = f"[{self._won}/{self._played} of {self._episodes}]"
            self.status(f"{done} episode {event['number']}, {text}")

    def _outcome(self, event: dict[str, Any]) -> None:
        self._played += 1
        self._won += event["outcome"] == "placed"
        refused = ", ".join(f"{count} {reason}" for reason, count in event["refused"].items())
        self.line(
            f"episode {event['number']:>2} (seed {event['seed']}, mark {event['goal']:<5}) "
            f"{event['outcome']:<7} after {event['time']:>4.1f} s simulated, {event['plans']:>2} chunks"
            + (f", refused: {refused}" if refused else "")
            + f"; largest speed {event['largest_speed']:.0%}, acceleration "
            + f"{event['largest_acceleration']:.0%}, jerk {event['largest_jerk']:.0%} of the limits"
            + (f", {event['violations']} BEYOND" if event["violations"] else "")
            + (f" -> {event['picture']}" if "picture" in event else "")
        )
