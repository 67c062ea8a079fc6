# SPDX-License-Identifier: Apache-2.0
"""Other ways to answer and to drive: the base model learns to take them up when its system prompt asks, an
adapter makes one of them the usual way.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgellm_ros.arena.expert import BRISK, CAREFUL, Manner
from edgellm_ros.arena.german import is_german, to_english, to_german


@dataclass(frozen=True)
class Style:
    """prompt: the system prompt that asks for it; manner: how the expert drives."""

    prompt: str
    manner: Manner = BRISK
    german: bool = False

    def write(self, answer: str) -> str:
        """The answer that is true of a situation, in this style."""
        return to_german(answer) if self.german else answer

    def read(self, answer: str) -> str:
        """What an answer says, in English; nothing if it is in another language than it should be."""
        if not self.german:
            return answer
        return to_english(answer) if is_german(answer) else ""


PLAIN = Style("")
STYLES = {
    "german": Style("answer in german.", german=True),
    "cautious": Style("drive carefully.", CAREFUL),
}
