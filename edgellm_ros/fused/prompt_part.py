# SPDX-License-Identifier: Apache-2.0
"""PromptPart: the tokens of prompts that are in one run of the kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from edgellm_ros.engine.tensor import Tensor


class PromptPart:
    """Tokens first .. first + tokens - 1 of each sequence; all of several sequences.

    - tensors: of the whole run, by binding name
    - all_tokens: of each sequence in the run
    - parts_behind: number of parts of the run after this one
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        batch: int,
        all_tokens: int,
        first: int,
        tokens: int,
        parts_behind: int = 0,
    ) -> None:
        self.tensors, self.batch, self.all_tokens = tensors, batch, all_tokens
        self.first, self.tokens, self.parts_behind = first, tokens, parts_behind
        self.rows, self.behind = batch * tokens, all_tokens - first - tokens

    def of(self, name: str) -> int:
        """Return the address of the part's first token in a tensor [B,S,...].

        0 = there is no such tensor.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            return 0
        row = tensor.size // (self.batch * self.all_tokens) * tensor.dtype.itemsize
        return tensor.pointer + self.first * row


def cut_prompts(tensors: Mapping[str, Tensor], most_rows: int) -> Iterator[PromptPart]:
    """Cut a run into parts of at most `most_rows` tokens.

    Several sequences are one part.
    """
    batch, tokens, _ = tensors["inputs_embeds"].shape
    for first in range(0, tokens, most_rows):
        own = min(most_rows, tokens - first)
        behind = -(-(tokens - first - own) // most_rows)
        yield PromptPart(tensors, batch, tokens, first, own, behind)
