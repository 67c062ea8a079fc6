# SPDX-License-Identifier: Apache-2.0
"""RecurrentState: what recurrent layers carry from run to run, for each row.

Each layer has two tensors per row of the batch: the last inputs of its convolution and its state. An engine
reads the committed tensors and writes the next ones to other memory; `commit` copies the rows that accepted a
token:

  states       [L, max batch, n]   read by the engine    <-- commit: rows with counts[b] > 0 --+
  next states  [L, max batch, n]   written by the engine --------------------------------------+

So a step that yields no token leaves a row's state as it was, and all addresses stay the same, as recorded
steps need it.
The copy reads and writes each state once per step, beside the engine's own reading and writing.

A verification runs a chain of drafted tokens, of which only the first counts[b] are accepted. The engine
also outputs the values by which each token updates the states, far fewer than a state has. The commit applies
those of the accepted tokens to the committed states, in place: no state per token is stored.

  chain values [L, max batch, tokens, ...]   written by the engine   -- commit --> states
"""

from __future__ import annotations

from math import prod

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.engine_directory.recurrent_config import CHAIN_TOKENS, STRENGTHS, RecurrentConfig
from edgellm_ros.kernels import ChainInputs, Kernels, TreeKernels
from edgellm_ros.runtime.batch.sequence import GenerationSequence


class RecurrentState:
    """Owns the tensors; `committed`: convolutions and states, [L, max batch, n] each.

    verifies: whether the engine outputs the values of chains.
    """

    def __init__(
        self,
        device: Device,
        kernels: Kernels,
        config: RecurrentConfig,
        *,
        max_batch_size: int,
        conv_dtype: np.dtype,
        verifies: bool = False,
    ) -> None:
        self._device = device
        self._kernels = kernels
        layers = config.num_layers
        shapes = (config.conv_shape, conv_dtype), (config.state_shape, np.dtype(np.float32))
        self.committed, self._next = (
            [device.zeros((layers, max_batch_size, prod(shape)), dtype) for shape, dtype in shapes]
            for _ in range(2)
        )
        inputs, outputs = (
            (names.conv_state, names.recurrent_state),
            (names.present_conv_state, names.present_recurrent_state),
        )
        self._bindings: list[tuple[str, Tensor]] = []
        for name_of, tensors in ((inputs, self.committed), (outputs, self._next)):
            for name, tensor, (shape, _) in zip(name_of, tensors, shapes, strict=True):
                for i in range(layers):
                    layer = tensor.rows(i, i + 1).view(max_batch_size, *shape)
                    self._bindings.append((name(i), layer))
        self._shapes = [(layers, max_batch_size, *shape) for shape, _ in shapes]
        self._chain = {
            kind: device.zeros((layers, max_batch_size, CHAIN_TOKENS, width), np.float32)
            for kind, width in (config.chain_widths.items() if verifies else ())
        }
        self._verified: tuple[TreeKernels, int] | None = None  # the run before the next commit

    @property
    def nbytes(self) -> int:
        """Size of the committed tensors in bytes."""
        return self.row_bytes * self.committed[0].shape[1]

    @property
    def row_bytes(self) -> int:
        """Size of the committed tensors of one row in bytes."""
        return sum(tensor.shape[0] * tensor.shape[2] * tensor.dtype.itemsize for tensor in self.committed)

    def open(self, row: int, sequence: GenerationSequence) -> None:
        """Begin a sequence.

        The caller loads the state after its first tokens, or the first run on its prompt begins with zeros
        (`clear_row`).
        """

    def clear_row(self, row: int) -> None:
        """Zero the committed state of a row."""
        for tensor in self.committed:
            for layer in range(tensor.shape[0]):
                one = tensor.rows(layer, layer + 1).view(*tensor.shape[1:])
                self._device.fill_zero(one.rows(row, row + 1))

    def move(self, source: int, target: int) -> None:
        """Copy a row's state to another row."""
        for tensor in self.committed:
            self._copy(tensor, source, tensor, target)

    def close(self, row: int) -> None:
        """End a row; the next sequence begins with a state of its own."""

    def commit(self, counts: Tensor) -> None:
        """Queue the commit of the last run's first counts[b] tokens of each row b."""
        if self._verified is None:
            self.commit_rows(range(counts.shape[0]), counts)
            return
        (kernels, tokens), self._verified = self._verified, None
        others = {kind: tensor for kind, tensor in self._chain.items() if kind != STRENGTHS}
        inputs = ChainInputs(**others, strengths=self._chain.get(STRENGTHS))
        windows, states = (
            tensor.view(*shape) for tensor, shape in zip(self.committed, self._shapes, strict=True)
        )
        kernels.advance_states(states, inputs, tokens, counts)
        kernels.advance_windows(windows, inputs.conv_inputs, tokens, counts)

    def verified(self, kernels: TreeKernels, tokens: int) -> None:
        """Make the next `commit` that of a verification of `tokens` tokens per row."""
        self._verified = kernels, tokens

    def forget_verified(self) -> None:
        """Undo `verified`: its run has failed."""
        self._verified = None

    def commit_rows(self, rows: range, counts: Tensor) -> None:
        """Queue the commit of the last run's states of the given rows with counts > 0."""
        for tensor, new in zip(self.committed, self._next, strict=True):
            self._kernels.commit_states(tensor, new, rows.start, counts)

    def bindings(self, rows: range, tokens: int = 1) -> dict[str, Tensor]:
        """Return the tensors of a run of `tokens` tokens per row, by binding name."""
        tensors = {name: tensor.rows(rows.start, rows.stop) for name, tensor in self._bindings}
        for kind, tensor in self._chain.items():
            shape = len(rows), min(tokens, CHAIN_TOKENS), tensor.shape[3]
            for i in range(tensor.shape[0]):
                tensors[names.chain_value(kind, i)] = tensor.rows(i, i + 1).view(*shape)
        return tensors

    def save(self, row: int, pool: list[Tensor], place: int) -> None:
        """Copy a row's state to place `place` of a pool of two tensors [L,places,n]."""
        for tensor, target in zip(self.committed, pool, strict=True):
            self._copy(tensor, row, target, place)

    def load(self, row: int, pool: list[Tensor], place: int) -> None:
        """Copy a state that `save` has stored to a row."""
        for tensor, source in zip(self.committed, pool, strict=True):
            self._copy(source, place, tensor, row)

    def clear(self) -> None:
        """Zero all states: NaN in a closed row would stay there."""
        self._verified = None
        for tensor in (*self.committed, *self._next):
            self._device.fill_zero(tensor)

    def _copy(self, source: Tensor, source_row: int, target: Tensor, target_row: int) -> None:
        views = []
        for tensor in (source, target):
            layers, rows, size = tensor.shape
            views.append(tensor.view(layers, rows, 1, 1, size))
        self._kernels.copy_cache_rows(views[0], (source_row, 0), views[1], (target_row, 0), 1)
