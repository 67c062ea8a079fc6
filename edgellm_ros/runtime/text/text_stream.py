# SPDX-License-Identifier: Apache-2.0
"""TextStream: converts the tokens of one answer to text, with stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from edgellm_ros.runtime.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # the decoder's character for bytes that are not valid UTF-8


class TextStream:
    """The text of one answer.

    - text: the answer so far, cut before a stop string
    - stopped: whether a stop string was found
    - visible: `text` without an end that may become a stop string, so shown text is never withdrawn

    A character whose bytes are spread over several tokens is added once it is complete. `before`: tokens that
    the answer continues; some decoders remove a space from the first token that they see.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], before: Sequence[int] = ()) -> None:
        self.text = ""
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = stop
        self._longest_stop = max(map(len, stop), default=0)
        self._ids = list(before)
        # ids[start:done] are decoded again with the following ids, because a decoder may use their context
        self._start, self._done = 0, len(self._ids)
        self._done_text = tokenizer.decode(self._ids) if before else ""

    @property
    def visible(self) -> str:
        """The text without an end that may become a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:length]):
                    longest = length
                    break
        return self.text[: len(self.text) - longest]

    def push(self, token_id: int) -> None:
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids[self._start :])
        if len(text) > len(self._done_text) and not text.endswith(REPLACEMENT):
            self._append(text[len(self._done_text) :])
            self._start, self._done = self._done, len(self._ids)
            waiting = self._ids[self._start :]
            one = len(waiting) == 1  # nearly always
            self._done_text = self._tokenizer.piece(waiting[0]) if one else self._tokenizer.decode(waiting)

    def finish(self) -> None:
        """End the answer: bytes of an incomplete character are added as U+FFFD."""
        if not self.stopped:
            self._append(self._tokenizer.decode(self._ids[self._start :])[len(self._done_text) :])
            self._start = self._done = len(self._ids)
            self._done_text = ""

    def _append(self, new: str) -> None:
        if not self._stop:
            self.text += new
            return
        search_from = max(0, len(self.text) - self._longest_stop + 1)
        self.text += new
        found = [position for stop in self._stop if (position := self.text.find(stop, search_from)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True
