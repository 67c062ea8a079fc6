# SPDX-License-Identifier: Apache-2.0
"""Alternative styles of answering and driving.

The base model uses a style when its system prompt requests it. An adapter makes a style the default.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgellm_arena.driving.expert import BRISK, CAREFUL, Manner
from edgellm_arena.words.german import is_german, to_english, to_german


@dataclass(frozen=True)
class Style:
    """A style of answering and driving."""

    prompt: str  # system prompt that requests the style
    manner: Manner = BRISK  # how the expert drives
    german: bool = False  # whether answers are in German

    def write(self, answer: str) -> str:
        """Write an answer in this style."""
        return to_german(answer) if self.german else answer

    def read(self, answer: str) -> str:
        """Translate an answer of this style to English; empty if in another language."""
        if not self.german:
            return answer
        return to_english(answer) if is_german(answer) else ""


PLAIN = Style("")
STYLES = {
    "german": Style("answer in german.", german=True),
    "cautious": Style("drive carefully.", CAREFUL),
}
