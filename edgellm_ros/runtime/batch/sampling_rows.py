# SPDX-License-Identifier: Apache-2.0
"""SamplingRows: sampling parameters and last tokens of each row of a batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from edgellm_ros.engine.device import Device, on_device
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory.config import GenerationDefaults
from edgellm_ros.kernels import (
    RULES,
    DraftTree,
    Kernels,
    RowLimits,
    SamplingState,
    StopState,
    TreeKernels,
)
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.batch.step_result import StepResult
from edgellm_ros.runtime.grammar.grammar import (
    ALL_BITS,
    GrammarMatcher,
    tree_matchers,
    word_count,
    write_masks,
)
from edgellm_ros.runtime.request import MAX_LOGPROBS, SamplingParams

NO_LOGIT = -1
NO_TOKEN = -1
NO_LIMIT = 2**31  # of the tokens of a path
GREEDY = SamplingParams().resolved(GenerationDefaults())  # rows without a request


class SamplingRows:
    """Samples tokens [B,N] from logits [B,N,V], each row with its own parameters.

    N is 1 until `resize`. With a `vocab_map` [V] int64, logit j belongs to token vocab_map[j]. Each of
    `stop_token_ids` ends an answer. The sampled tokens stay on the device for the next step.
    """

    def __init__(
        self,
        device: Device,
        kernels: Kernels,
        *,
        max_batch_size: int,
        vocab_size: int,
        stop_token_ids: Collection[int],
        vocab_map: np.ndarray | None = None,
    ) -> None:
        self._device = device
        self._kernels = kernels
        self._vocab_map: Tensor | None = None
        self._token_of_logit, self._logit_of_token = np.arange(vocab_size), np.arange(vocab_size)
        if vocab_map is not None:
            self._vocab_map = device.empty(vocab_map.shape, np.int64)
            device.upload(self._vocab_map, vocab_map)
            self._token_of_logit, self._logit_of_token = vocab_map, np.full(vocab_size, NO_LOGIT)
            self._logit_of_token[vocab_map] = np.arange(len(vocab_map))
        logits = len(self._token_of_logit)
        self._state = SamplingState(
            **{
                name: on_device(device, np.full(max_batch_size, getattr(GREEDY, name), dtype))
                for name, dtype in RULES.items()
            },
            position=device.zeros((max_batch_size,), np.int64),
            path_limit=device.zeros((max_batch_size,), np.int64),
            seen=device.zeros((max_batch_size, logits), np.bool_),
        )
        self._stop = StopState(
            tokens_left=device.zeros((max_batch_size,), np.int64),
            trigger_token=device.zeros((max_batch_size,), np.int64),
            stop_ids=device.empty((max(1, len(stop_token_ids)),), np.int64),
        )
        device.upload(self._stop.stop_ids, np.array([*stop_token_ids] or [NO_TOKEN], np.int64))
        self._last_tokens = device.zeros((max_batch_size,), np.int64)
        self._max_batch_size = max_batch_size
        self._allocate_masks(max_batch_size)
        self.resize(tokens_per_step=1)

    def resize(self, tokens_per_step: int) -> None:
        """Allocate buffers for steps of `tokens_per_step` tokens; no step may be queued."""
        device, batch = self._device, self._max_batch_size
        tokens = batch * tokens_per_step
        # Tokens [B,N] of a step, and at a fixed offset their counts [B]: one copy takes both to the host.
        self._output = device.zeros((tokens + batch,), np.int64)
        self._counts_at, self._counts = tokens, self._output.rows(tokens, tokens + batch)
        self._sampled = self._output  # tokens as indices of logits
        if self._vocab_map is not None:
            self._sampled = device.zeros((tokens,), np.int64)
        self._all_offered = device.empty((batch,), np.int64)
        device.upload(self._all_offered, np.full(batch, tokens_per_step, np.int64))
        top = tokens * (MAX_LOGPROBS + 1)
        self._top_ids, self._top_values = device.zeros((top,), np.int64), device.zeros((top,), np.float32)
        self._step = (0, tokens_per_step)  # B and N of the step that is being queued

    def _allocate_masks(self, rows: int) -> None:
        shape = rows, word_count(len(self._token_of_logit))
        self._host_masks = np.empty(shape, np.uint32)
        self._masks = self._device.zeros(shape, np.uint32)

    def open(self, row: int, sequence: GenerationSequence) -> None:
        """Queue the write of a request's sampling parameters.

        With a repetition penalty its prompt's tokens are marked as seen; `seen` is not read without one.
        """
        trigger = sequence.action_trigger_token
        if sequence.sampling.repetition_penalty != 1:
            seen = np.zeros((1, self._state.seen.shape[1]), np.bool_)
            logits = self._logit_of_token[sequence.token_ids]
            seen[0, logits[logits != NO_LOGIT]] = True
            self._device.upload(self._state.seen.rows(row, row + 1), seen)
        rules = {name: getattr(sequence.sampling, name) for name in RULES}
        limits = RowLimits(
            path_limit=1 if sequence.request.disable_spec_decode else NO_LIMIT,
            tokens_left=sequence.tokens_left,
            trigger_token=NO_TOKEN if trigger is None else trigger,
        )
        self._kernels.open_row(row, rules, limits, self._state, self._stop)

    def move(self, source: int, target: int) -> None:
        """Copy a row's sampling parameters and last token to another row."""
        self._kernels.move_row(source, target, self._state, self._stop, self._last_tokens)

    def commit(self, counts: Tensor) -> None:
        """Queue the commit of the last step's first counts[b] tokens to row b."""
        self.commit_rows(range(counts.shape[0]), counts)

    def last_tokens(self, rows: range) -> Tensor:
        """Return each row's newest token id [B], on the device."""
        return self._last_tokens.rows(rows.start, rows.stop)

    def close(self, row: int) -> None:
        """End a row: its limit of tokens becomes 0."""
        self._device.fill_zero(self._stop.tokens_left.rows(row, row + 1))

    def resume(self, row: int, sequence: GenerationSequence) -> None:
        """Undo `close` in the row of a sequence."""
        left = np.array([sequence.tokens_left], np.int64)
        self._device.upload(self._stop.tokens_left.rows(row, row + 1), left)

    def begin_step(self, batch: int, width: int) -> tuple[Tensor, Tensor]:
        """Return the buffers of a step's logit indices and token ids [batch,width].

        Both are the same tensor without a `vocab_map`.
        """
        self._step = batch, width
        return self._sampled.view(*self._step), self._output.view(*self._step)

    def tokens(self, batch: int, width: int) -> Tensor:
        """Return the token ids [batch,width] of the last step."""
        return self._output.view(batch, width)

    def mask(
        self,
        logits: Tensor,
        sequences: Sequence[GenerationSequence],
        trees: Callable[[], tuple[np.ndarray, np.ndarray]] | None = None,
    ) -> None:
        """Exclude from logits [B,N,V] the tokens that grammars do not allow next.

        The grammars are those of sequences [B]. Without `trees`, N is 1. `trees` waits for the tokens and
        parents [B,N] of drafted trees, which are needed only with a grammar; the logits are those of their
        nodes. The host computes the masks while the device computes the logits. Nothing is queued without a
        grammar.
        """
        if all(sequence.grammar is None for sequence in sequences):
            return
        batch, nodes, _ = logits.shape
        if len(self._host_masks) < batch * nodes:
            self._allocate_masks(self._max_batch_size * nodes)
        masks = self._host_masks[: batch * nodes]
        masks[...] = ALL_BITS
        matchers: dict[int, GrammarMatcher] = {}  # by row of `masks`
        tokens, parents = trees() if trees is not None else (None, None)
        for row, sequence in enumerate(sequences):
            if sequence.grammar is None:
                continue
            # of nodes that no allowed path leads to, and those where the grammar has become too complex
            masks[row * nodes : (row + 1) * nodes] = sequence.grammar.stop_bits
            found = {0: sequence.grammar}
            if tokens is not None and parents is not None and not sequence.request.disable_spec_decode:
                found = tree_matchers(sequence.grammar, tokens[row].tolist(), parents[row].tolist())
            matchers.update((row * nodes + node, matcher) for node, matcher in found.items())
        is_asynchronous = self._device.max_queued_steps > 0
        write_masks([*matchers.values()], [masks[row] for row in matchers], in_parallel=is_asynchronous)
        uploaded = self._masks.rows(0, len(masks))
        self._device.upload(uploaded, masks)
        self._kernels.mask_logits(logits, uploaded.view(batch, nodes, uploaded.shape[1]))

    def sample(self, logits: Tensor, rows: range | None = None) -> None:
        """Queue the sampling of a step's tokens.

        logits [B,N,V]; rows: None = the first B.
        """
        rows = rows or range(logits.shape[0])
        sampled, tokens = self.begin_step(len(rows), logits.shape[1])
        self._kernels.sample(logits, self._state.rows(rows.start, rows.stop), sampled)
        if self._vocab_map is not None:
            self._kernels.map_tokens(sampled, self._vocab_map, tokens)

    def sample_path(
        self, kernels: TreeKernels, logits: Tensor, tree: DraftTree, path: Tensor, offered: Tensor
    ) -> None:
        """Queue the sampling of a path from each tree's root.

        logits [B,M,V] of the nodes; path [B,D] and offered [B] are written. See `TreeKernels.sample_path`.
        """
        sampled, tokens = self.begin_step(*path.shape)
        state = self._state.rows(0, path.shape[0])
        kernels.sample_path(logits, state, tree, self._vocab_map, sampled, tokens, path, offered)

    def counts(self, batch: int) -> Tensor:
        """Return the counts [batch] of the last step."""
        return self._counts.rows(0, batch)

    def count(self, rows: range | None = None, offered: Tensor | None = None) -> Tensor:
        """Queue the counting of the tokens that each row accepts; return counts [B].

        offered [B]: number of tokens that the decode method offers, None = all. A row accepts no token after
        a stop token, and at most as many as its sequence may still take.
        """
        batch, width = self._step
        rows = rows or range(batch)
        counts, stop = self._counts.rows(0, batch), self._stop.rows(rows.start, rows.stop)
        offered = offered or self._all_offered.rows(0, batch)
        self._kernels.count_tokens(self._output.view(batch, width), offered, stop, counts)
        return counts

    def commit_rows(self, rows: range, counts: Tensor) -> None:
        """Queue `commit` for the given rows."""
        sampled, tokens = self._sampled.view(*self._step), self._output.view(*self._step)
        state, last = self._state.rows(rows.start, rows.stop), self.last_tokens(rows)
        self._kernels.commit_tokens(sampled, tokens, counts, state, last)

    def copy_to_host(self, logits: Tensor, logprobs: int) -> StepResult:
        """Queue a copy of the step's tokens and counts to the host.

        logits [B,N,V]: of the step; logprobs: number of most likely tokens to copy with each token; 0 = none.
        """
        batch, width, _ = logits.shape
        likeliest = None
        if logprobs:
            ids = self._top_ids.view(batch, width, logprobs + 1)
            values = self._top_values.view(batch, width, logprobs + 1)
            self._kernels.log_probabilities(logits, self._sampled.view(batch, width), ids, values)
            likeliest = self._device.copy_to_host(ids), self._device.copy_to_host(values)
        output = self._device.copy_to_host(self._output)
        return StepResult(output, (batch, width), self._counts_at, likeliest, self._token_of_logit)
