# SPDX-License-Identifier: Apache-2.0
"""AttentionInputs: rotary rows of new tokens, and the KV rows they attend to.

There are two kinds of engines:

- without lengths: rope_cos, rope_sin [B,S,R/2], a row per token; attention_mask [B,1,S,C]; kv_write_index [B]
- with lengths: rope_cos, rope_sin [P,R/2], a table; position_ids [B,S], each token's row of the table;
  kv_length [B], the number of KV rows including the new tokens. One run of such an engine reads several
  tokens of one sequence, or one token of several sequences, or prompts of several sequences with nothing
  cached (`takes_first_prompts`). Engines that run on trees have a mask too.

R is the number of rotated values of a head. The table holds the rows of the first kind, one after another, so
both kinds get the same values.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.engine_directory.recurrent_config import CHAIN_TOKENS
from edgellm_ros.engine_directory.rope_config import RopeConfig
from edgellm_ros.kernels import DraftInputs, DraftTree, Kernels, RopeTable, TreeKernels
from edgellm_ros.runtime.batch.linear_kv_cache import LinearKVCache


class AttentionInputs:
    """Owns the attention inputs of one engine with the inputs `engine_inputs`.

    - max_tokens: most tokens per sequence of one run
    - masks_one_token: whether the engine reads its mask in runs of one token per sequence too
    """

    def __init__(
        self,
        engine_inputs: Container[str],
        rope: RopeConfig,
        *,
        device: Device,
        kernels: Kernels,
        cache: LinearKVCache,
        rope_table: RopeTable,
        max_tokens: int,
        masks_one_token: bool = True,
    ) -> None:
        self._device = device
        self._kernels = kernels
        self._cache = cache
        self._rope_table = rope_table
        self._rope = rope
        self._half = rope.rotary_dim // 2
        batch, tokens = cache.max_batch_size, max_tokens
        rows = batch * tokens
        table_shape = (max(rows, cache.capacity), self._half)
        self._cos, self._sin = device.empty(table_shape, np.float32), device.empty(table_shape, np.float32)
        self._has_rope = names.ROPE_COS in engine_inputs
        self._has_mask = names.ATTENTION_MASK in engine_inputs
        self._masks_one_token = masks_one_token
        self._has_write_index = names.KV_WRITE_INDEX in engine_inputs
        self._has_lengths = names.KV_LENGTH in engine_inputs
        self._write_index = device.empty((batch,), np.int64)  # of drafted tokens
        if self._has_mask:
            self._mask = device.empty((batch, 1, tokens, cache.capacity), np.bool_)
        if self._has_lengths:
            self._filled = device.empty((batch,), np.int64)
            self._row_numbers = device.empty((rows,), np.int64)
            device.upload(self._row_numbers, np.arange(rows))

    @property
    def has_mask(self) -> bool:
        """Whether the engine has a mask, so that it can run on trees that are no chains."""
        return self._has_mask

    @property
    def _unbatched(self) -> tuple[str, ...]:
        """Names of the inputs without a batch axis, which are never sliced by rows."""
        return (names.ROPE_COS, names.ROPE_SIN) if self._has_lengths else ()

    def needs_one_sequence_per_run(self, tokens: int) -> bool:
        """Whether a run with this many query tokens is limited to batch size 1.

        `takes_first_prompts` tells of an exception.
        """
        return self._has_lengths and tokens > 1

    @property
    def takes_first_prompts(self) -> bool:
        """Whether a run takes several prompts if nothing is cached of any of them.

        GroupQueryAttention does, which writes the KV rows itself. With an FP8 cache such a run would attend
        to keys and values before they are rounded, and a prompt would get other numbers than alone.
        """
        others = self._has_write_index or self._has_mask or self._cache.dtype.itemsize == 1
        return self._has_lengths and not others

    def part(self, tensors: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
        """Return the tensors of a run over rows start..stop-1 of a run's tensors [B,...]."""
        if (start, stop) == (0, tensors[names.INPUTS_EMBEDS].shape[0]):
            return tensors
        return {
            name: tensor if name in self._unbatched else tensor.rows(start, stop)
            for name, tensor in tensors.items()
        }

    def inputs(self, rows: range, tokens: int) -> dict[str, Tensor]:
        """Return views of the buffers for a run over these rows: always the same memory."""
        batch = len(rows)
        shape: tuple[int, ...] = (batch, tokens, self._half)
        visible = {}
        if self._has_mask:
            visible[names.ATTENTION_MASK] = self._mask.view(batch, 1, tokens, self._cache.capacity)
        if self._has_lengths:
            shape = (max(batch * tokens, self._cache.capacity), self._half)
            visible[names.KV_LENGTH] = self._filled.rows(0, batch)
            if self._has_rope:
                visible[names.POSITION_IDS] = self._row_numbers.view(batch, tokens)
        if self._has_write_index:
            visible[names.KV_WRITE_INDEX] = self._cache.lengths(rows)
        if self._has_rope:
            visible |= {names.ROPE_COS: self._cos.view(*shape), names.ROPE_SIN: self._sin.view(*shape)}
        return visible

    def for_prefill(self, rows: range, positions: Tensor) -> dict[str, Tensor]:
        """Write and return the inputs for prompts with positions [B,3,S] float32."""
        tokens = positions.shape[2]
        self.prompt_angles(positions)
        inputs = self.inputs(rows, tokens)
        self._write_visible(inputs, rows, tokens)
        return inputs

    def prompt_angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Write and return prompts' rotary rows [B,S,R/2]; positions [B,3,S] float32."""
        batch, _, tokens = positions.shape
        angles = self._angles(batch, tokens)
        section, interleaved = self._rope.mrope_section, self._rope.mrope_interleaved
        self._kernels.mrope_rows(self._rope_table, positions, section, interleaved, *angles)
        return angles

    def for_decode(self, inputs: Mapping[str, Tensor], rows: range) -> None:
        """Write `inputs` for one more token of each row."""
        self.for_continuation(inputs, rows, 1)

    def for_continuation(self, inputs: Mapping[str, Tensor], rows: range, tokens: int) -> None:
        """Write `inputs` for the next `tokens` text tokens of each row."""
        lengths, deltas = self._cache.lengths(rows), self._cache.rope_deltas(rows)
        angles = self._angles(len(rows), tokens)
        filled = inputs[names.KV_LENGTH] if self._has_lengths else None
        self._kernels.rope_rows(self._rope_table, lengths, deltas, *angles, filled)
        if self._has_mask:
            self._kernels.causal_mask(lengths, inputs[names.ATTENTION_MASK])

    def for_tree(
        self, inputs: Mapping[str, Tensor], rows: range, tree: DraftTree, kernels: TreeKernels
    ) -> None:
        """Write `inputs` for the nodes of a tree.

        For an engine without a mask the tree is a chain.
        """
        if not self._has_mask:
            self.for_continuation(inputs, rows, tree.size)
            return
        lengths, deltas = self._cache.lengths(rows), self._cache.rope_deltas(rows)
        kernels.tree_rope_rows(
            self._rope_table, lengths, deltas, tree.depths, *self._angles(*tree.depths.shape)
        )
        kernels.tree_mask(tree, lengths, inputs[names.ATTENTION_MASK])
        if self._has_lengths:
            self._kernels.visible_rows(lengths, tree.size, inputs[names.KV_LENGTH])

    def level_inputs(self, rows: range, nodes: int) -> dict[str, Tensor]:
        """Return views of the buffers for a draft's run on the nodes of any level."""
        inputs = self.inputs(rows, nodes)
        if self._has_write_index:
            inputs[names.KV_WRITE_INDEX] = self._write_index.rows(0, len(rows))
        return inputs

    def draft_inputs(self, inputs: Mapping[str, Tensor], embeds: Tensor) -> DraftInputs:
        """Return the tensors of `inputs` that `TreeKernels` writes for a draft's run.

        embeds [B,S,H]: the run's embeddings.
        """
        cos, sin = self._angles(*embeds.shape[:2])
        optional = (names.ATTENTION_MASK, names.KV_WRITE_INDEX, names.KV_LENGTH)
        return DraftInputs(embeds, cos, sin, *map(inputs.get, optional))

    def _angles(self, batch: int, tokens: int) -> tuple[Tensor, Tensor]:
        shape = (batch, tokens, self._half)
        return self._cos.view(*shape), self._sin.view(*shape)

    def _write_visible(self, inputs: Mapping[str, Tensor], rows: range, tokens: int) -> None:
        lengths = self._cache.lengths(rows)
        if self._has_mask and (tokens > 1 or self._masks_one_token):
            self._kernels.causal_mask(lengths, inputs[names.ATTENTION_MASK])
        if self._has_lengths:
            self._kernels.visible_rows(lengths, tokens, inputs[names.KV_LENGTH])


def run_sizes(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the sizes of the dimensions that all text decoders' runs share."""
    batch, tokens, _ = tensors[names.INPUTS_EMBEDS].shape
    sizes = {"B": batch, "S": tokens, "N": tensors[names.LOGITS].shape[1], "T": min(tokens, CHAIN_TOKENS)}
    if names.ROPE_COS in tensors:
        sizes["P"] = tensors[names.ROPE_COS].shape[0]
    return sizes
