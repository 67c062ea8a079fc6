# SPDX-License-Identifier: Apache-2.0
"""Slots: how many requests are answered at a time."""

from __future__ import annotations

from edgellm_ros.serving.openai.errors import ApiError


class Slots:
    """Counts the requests that have a slot; for one thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.taken = 0

    def take(self) -> None:
        """Take a slot. ApiError 429 if none is free."""
        if self.taken >= self._most:
            message = f"{self._most} requests are answered at a time: try again later"
            raise ApiError(429, message, code="rate_limit_exceeded")
        self.taken += 1

    def give_back(self) -> None:
        self.taken -= 1
