# SPDX-License-Identifier: Apache-2.0
"""Limits on message sizes: what one client may ask of the node's memory and time.

Every function raises ValueError with the value, the limit and its parameter. Nothing is decoded here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

MAX_CLIENT_LENGTH = 255  # characters of a full name in ROS


@dataclass(frozen=True)
class Limits:
    """Values of the parameters `limits.*`, which describes them (parameters.py)."""

    message_bytes: int
    image_pixels: int
    images: int
    messages: int
    text_length: int
    grammar_length: int
    choices: int
    goals: int

    def check_data(self, what: str, data: Iterable[Any]) -> None:
        """Check the bytes of images, sound and trajectories in one message."""
        size = sum(memoryview(each).nbytes for each in data)
        self._check("message_bytes", f"{what} has", size, "bytes of data")

    def check_text(self, what: str, texts: Iterable[str]) -> None:
        """Check the characters of texts for the model in one message."""
        self._check("text_length", f"{what} has", sum(map(len, texts)), "characters")

    def check_goal(self, goal: Any) -> None:
        """Check a goal of ~/plan; `goal`: Plan.Goal."""
        if len(goal.client) > MAX_CLIENT_LENGTH:
            length = len(goal.client)
            raise ValueError(f"client has {length} characters, at most {MAX_CLIENT_LENGTH} are taken")
        earlier, sampling = goal.earlier_messages, goal.sampling
        images = [*goal.images, *(image for message in earlier for image in message.images)]
        self._check("images", "the goal has", len(images), "images, with those of earlier messages")
        self._check("messages", "the goal has", len(earlier), "earlier messages")
        previous = [each.chunk.values for each in goal.previous_chunk]
        self.check_data("the goal", [*(each.data for each in (*images, *goal.audio)), *previous, goal.state])
        calls = [call for message in earlier for call in message.tool_calls]
        said = [*(each.text for each in earlier), *(call.name + call.arguments for call in calls)]
        self.check_text("the goal", [goal.prompt, goal.system_prompt, *said])
        for name, texts in (("choices", sampling.choices), ("stop", sampling.stop), ("tools", goal.tools)):
            self._check("choices", f"{name} has", len(texts), "texts")
            self._check("grammar_length", f"{name} has", sum(map(len, texts)), "characters")
        for name in ("json_schema", "regex"):
            self._check("grammar_length", f"{name} has", len(getattr(sampling, name)), "characters")

    def _check(self, limit: str, subject: str, value: int, unit: str) -> None:
        most = getattr(self, limit)
        if value > most:
            raise ValueError(f"{subject} {value} {unit}, at most {most} are taken (parameter limits.{limit})")
