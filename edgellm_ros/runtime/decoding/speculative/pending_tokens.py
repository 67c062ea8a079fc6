# SPDX-License-Identifier: Apache-2.0
"""PendingTokens: committed tokens whose KV rows a draft head has still to compute.

The state before each token is kept with it.
"""

from __future__ import annotations

from itertools import groupby

import numpy as np

from edgellm_ros.engine.device import Device, on_device
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels import Kernels, TreeKernels


class PendingTokens:
    """The first counts[b] of each row are pending.

    - tokens [B,W] int64, states [B,W,H], counts [B] int64; W = width
    - most [B]: upper bounds of the counts that the host knows; 0 = the tokens of the row are elsewhere
    """

    def __init__(
        self,
        device: Device,
        kernels: Kernels,
        tree_kernels: TreeKernels,
        batch: int,
        width: int,
        size: int,
        dtype: np.dtype,
    ) -> None:
        self._device = device
        self._kernels = kernels
        self._tree_kernels = tree_kernels
        self.width = width
        self.tokens = device.zeros((batch, width), np.int64)
        self.states = device.zeros((batch, width, size), dtype)
        self.counts = device.zeros((batch,), np.int64)
        self.most = [0] * batch
        self._kept_token = device.zeros((batch, 1, 1), np.int64)
        self._kept_state = device.zeros((batch, 1, size), dtype)
        self._places = on_device(device, np.tile(np.arange(width), (batch, 1)))
        self._first = device.zeros((batch, 1), np.int64)
        self._newest = device.zeros((batch, 1), np.int64)

    def move(self, source: int, target: int) -> None:
        """Copy a row to another row."""
        self.most[target] = self.most[source]
        for tensor in (self.tokens, self.states, self.counts):
            self._device.copy(tensor.rows(target, target + 1), tensor.rows(source, source + 1))

    def clear_row(self, row: int) -> None:
        """Zero the states of a row."""
        self._device.fill_zero(self.states.rows(row, row + 1))

    def begin_states(self, rows: range, states: Tensor) -> None:
        """Write the states [b,1,H] of the first tokens of these rows."""
        target = self.states.rows(rows.start, rows.stop)
        self._tree_kernels.put_rows(states, self._first.rows(0, len(rows)), target)

    def begin(self, rows: range, tokens: Tensor, counts: Tensor) -> None:
        """Write the first tokens [b,1] of these rows."""
        target, batch = self._tokens(rows), len(rows)
        self._tree_kernels.put_rows(tokens.view(batch, 1, 1), self._first.rows(0, batch), target)
        self._kernels.visible_rows(counts, 0, self.counts.rows(rows.start, rows.stop))

    def replace(self, tokens: Tensor, states: Tensor, path: Tensor, counts: Tensor, lengths: Tensor) -> None:
        """Make the first counts[b] of tokens [b,W] the pending ones.

        States of these tokens are the states path [b,W] of `states`. lengths [b]: of the cache in which the
        pending ones were committed. They remain pending where counts[b] is 0, as in a row that is held.
        """
        own = (tensor.rows(0, path.shape[0]) for tensor in (self.tokens, self.states, self.counts))
        kept = *own, lengths
        self._tree_kernels.take_accepted(tokens, states, path, counts, *kept)

    def append(self, tokens: Tensor, states: Tensor, counts: Tensor) -> None:
        """Append a token [b,1] to each of the first rows with counts[b] = 1.

        The token's state [b,1,H] is appended with it.
        """
        batch = tokens.shape[0]
        pending = self.counts.rows(0, batch)
        place = pending.view(batch, 1)
        self._tree_kernels.put_rows(tokens.view(batch, 1, 1), place, self._tokens(range(batch)))
        self._tree_kernels.put_rows(states, place, self.states.rows(0, batch))
        self._kernels.commit_rows(pending, counts)
        for row in range(batch):
            self.most[row] += 1

    def take_over(self, other: PendingTokens, batch: int) -> None:
        """Take over what the other has of the first rows, which must fit."""
        for is_there, group in groupby(range(batch), lambda row: other.most[row] > 0):
            if is_there:
                rows = [*group]
                self._take_over(other, range(rows[0], rows[-1] + 1))

    def _take_over(self, other: PendingTokens, rows: range) -> None:
        narrow = self if self.width < other.width else other
        places, between = narrow._places.rows(0, len(rows)), (rows.start, rows.stop)
        copy = self._tree_kernels.take_rows if narrow is self else self._tree_kernels.put_rows
        copy(other._tokens(rows), places, self._tokens(rows))
        copy(other.states.rows(*between), places, self.states.rows(*between))
        self._kernels.visible_rows(other.counts.rows(*between), 0, self.counts.rows(*between))
        for row in rows:
            self.most[row], other.most[row] = min(self.width, other.most[row]), 0

    def newest(self, batch: int) -> Tensor:
        """Return the index [b,1] of the newest pending token of the first rows.

        The tensor is the memory that `TreeKernels.begin_accepted` writes.
        """
        return self._newest.rows(0, batch)

    def keep_newest(self, batch: int) -> None:
        """Keep the token of index `newest` only."""
        index, first = self.newest(batch), self._first.rows(0, batch)
        token, state = self._kept_token.rows(0, batch), self._kept_state.rows(0, batch)
        for source, kept in ((self._tokens(range(batch)), token), (self.states.rows(0, batch), state)):
            self._tree_kernels.take_rows(source, index, kept)
            self._tree_kernels.put_rows(kept, first, source)
        self._kernels.visible_rows(first.view(batch), 1, self.counts.rows(0, batch))
        self.most[:batch] = [1] * batch

    def _tokens(self, rows: range) -> Tensor:
        return self.tokens.rows(rows.start, rows.stop).view(len(rows), self.width, 1)
