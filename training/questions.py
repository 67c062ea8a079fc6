# SPDX-License-Identifier: Apache-2.0
"""Questions that a text model is asked when it writes texts for training.

A random generator puts them together from the parts in `questions.txt`: chat, code, and passages to
summarise. None of them is a line of `unseen_prompts.txt`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

PARTS = Path(__file__).with_name("questions.txt")


def read_parts(path: Path = PARTS) -> dict[str, list[str]]:
    """Read the sections of a file: name -> lines."""
    parts: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("[") and line.endswith("]"):
            section = parts.setdefault(line[1:-1], [])
        elif line:
            section.append(line)
    return parts


class Questions:
    """Makes questions.

    Half of them are chat, the others code and, if there are passages, summaries.
    """

    def __init__(self, seed: int) -> None:
        self._rng, self._parts = Random(seed), read_parts()

    def _any(self, section: str) -> str:
        return self._rng.choice(self._parts[section])

    def chat(self) -> str:
        """Return a question about one or two subjects."""
        form = self._any("chat")
        return form.format(*self._rng.sample(self._parts["subjects"], form.count("{}")))

    def code(self) -> str:
        """Return a question about code."""
        kind, language = self._rng.random(), self._any("languages")
        if kind < 0.65:
            return self._any("code").format(language=language, task=self._any("tasks"))
        if kind < 0.75:
            return f"How do I {self._any('topics')} in {language}?"
        if kind < 0.85:
            return f"Explain what this code does: {self._any('snippets')}"
        if kind < 0.93:
            table, other = self._rng.sample(self._parts["tables"], 2)
            return f"Write an SQL query that {self._any('queries').format(table=table, other=other)}."
        return f"Write a shell command that {self._any('shell')}."

    def make(self, count: int, passages: Sequence[str]) -> list[str]:
        """Return `count` questions.

        passages: texts to summarise.
        """
        makers = [self.chat, self.code]
        if passages:
            makers.append(lambda: self._any("summaries").format(self._rng.choice(passages)))
        weights = [2, 1, 1][: len(makers)]
        return [make() for make in self._rng.choices(makers, weights, k=count)]
