# SPDX-License-Identifier: Apache-2.0
"""HeadDrafter: drafts trees with a draft head, of EAGLE-3 or MTP.

The head is a small decoder that continues the base model's states. Its input at row p is (state of token p,
token p + 1). For committed tokens the states are those that the base's graph outputs for the head; below the
newest token they are the head's own.

  pending   tokens without head rows yet: those of the last round, with the base's states
  propose   pending -> head -> candidates of level 1 -> best K -> head -> candidates of level 2 -> ... -> tree

The newest token is always pending, so each draft begins with the head's run on it. The tokens of vanilla
steps wait: the head runs on them when there are many, or before the next round, so that a pause of drafting
costs little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.executor import BoundRun
from edgellm_ros.engine.packed_arrays import Fields
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels import DraftTable, DraftTree, Kernels, TreeKernels
from edgellm_ros.runtime.batch.input_embedder import InputEmbedder
from edgellm_ros.runtime.batch.sampling_rows import SamplingRows
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.decoding.speculative.drafting_config import SpecDecodeDraftingConfig
from edgellm_ros.runtime.decoding.speculative.pending_tokens import PendingTokens
from edgellm_ros.runtime.engines.draft_engine_runner import DraftEngineRunner
from edgellm_ros.runtime.engines.llm_engine_runner import LLMEngineRunner
from edgellm_ros.runtime.engines.prompt_inputs import PromptRun, write_positions


class HeadDrafter:
    """Owns the pending tokens and the tensors of a draft.

    - name: kind of the head
    - most_waiting: number of tokens of vanilla steps after which the head runs on them
    - embedding [V,Hd]: the head's own table; None = the base's
    - token_of_logit [Vd] int64: None = logit i is that of token i
    """

    def __init__(
        self,
        name: str,
        device: Device,
        kernels: Kernels,
        tree_kernels: TreeKernels,
        config: SpecDecodeDraftingConfig,
        base: LLMEngineRunner,
        head: DraftEngineRunner,
        embedder: InputEmbedder,
        sampling: SamplingRows,
        max_prompt: int,
        most_waiting: int,
        embedding: Tensor | None = None,
        token_of_logit: Tensor | None = None,
    ) -> None:
        self.name = name
        self._device = device
        self._kernels = kernels
        self._tree_kernels = tree_kernels
        self._base = base
        self._head = head
        self.kv_cache = head.kv_cache
        self._sampling = sampling
        self._embedding = embedding
        self._token_table = embedder.table if embedding is None else embedding
        self._token_of_logit = token_of_logit
        batch, size, dtype = head.kv_cache.max_batch_size, head.hidden_size, head.dtype
        self._no_rows = device.zeros((1, size), dtype)  # encoder rows of a table of its own
        self._levels, self._top_k, self._width = (
            config.drafting_step,
            config.drafting_top_k,
            config.tokens_per_round,
        )
        parts = device, kernels, tree_kernels, batch
        self._pending = PendingTokens(*parts, self._width, size, dtype)
        self._waiting = PendingTokens(*parts, max(most_waiting, self._width), size, dtype)
        # a draft
        self._table = DraftTable.zeros(device, batch, self._top_k, self._levels)
        self._newest = device.zeros((batch, 1, size), dtype)
        self._parents = device.zeros((batch, self._top_k, size), dtype)
        tokens = max(max_prompt, self._top_k, self._waiting.width)
        self._embeds = device.zeros((batch * tokens, size), dtype)
        # of prompts that are computed in parts: long ones, and hybrids', whose states are saved in between
        self._shifted: Tensor | None = None  # made for the first of these
        self._shifted_shape = (batch * max_prompt, size), dtype

    def open(self, row: int, sequence: GenerationSequence) -> None:
        """Begin a sequence; the caller fills the head's rows of the reused prefix.

        The values of a head are not checked, so an earlier sequence may have left NaN in slots. A masked slot
        with NaN would enter a sum. `prefilled` clears the row of a prompt that reuses nothing.
        """
        if sequence.kv_length:
            self.kv_cache.clear_row(row)
        self.kv_cache.open(row, sequence)

    def move(self, source: int, target: int) -> None:
        """Copy a row's pending tokens and head rows to another row."""
        self.kv_cache.move(source, target)
        self._pending.move(source, target)
        self._waiting.move(source, target)
        newest = self._newest
        self._device.copy(newest.rows(target, target + 1), newest.rows(source, source + 1))

    def close(self, row: int) -> None:
        """End a row."""
        self.kv_cache.close(row)

    def clear_row(self, row: int) -> None:
        """Zero a row's KV rows and states."""
        self.kv_cache.clear_row(row)
        for pending in (self._pending, self._waiting):
            pending.clear_row(row)

    def commit(self, counts: Tensor) -> None:
        """Do nothing; see `Drafter`."""

    def prompt_fields(self, batch: int, tokens: int) -> Fields:
        """Return the arrays of the head's rows."""
        return {
            "head_positions": ((batch, 3, tokens), np.float32),
            "head_rows": ((batch,), np.int64),  # number of new rows
            "head_starts": ((batch,), np.int64),  # rows before them
            "following": ((batch, tokens), np.int64),  # index or id of the token after that of a row
            "before": ((batch, tokens), np.int64),  # index of the state of a row
            "of_part_before": ((batch, 1), np.int64),  # place of the state of the part before; -1 = none
        }

    def write_prompts(
        self,
        arrays: Mapping[str, np.ndarray],
        sequences: Sequence[GenerationSequence],
        rows: range,
        part: Sequence[range],
    ) -> None:
        """Write the head's rows of a part of prompts, up to the last token but one.

        The row of a part's last token needs the token after it: the next part begins with it.
        """
        for row in rows:  # `started` makes the first token of each answer pending
            self._pending.most[row], self._waiting.most[row] = 1, 0
        # rows of the head: from the last token of the part before on, if there is one
        firsts = [
            each.start - (each.start > one.reused_tokens) for each, one in zip(part, sequences, strict=True)
        ]
        heads = [range(first, max(first, each.stop - 1)) for first, each in zip(firsts, part, strict=True)]
        shifts = np.array([[each.start - first] for first, each in zip(firsts, part, strict=True)])
        positions = [
            one.positions[:, each.start : each.stop] for one, each in zip(sequences, heads, strict=True)
        ]
        write_positions(arrays["head_positions"], positions)
        arrays["head_rows"][:] = list(map(len, heads))
        arrays["head_starts"][:] = firsts
        places = np.arange(arrays["before"].shape[1])
        arrays["before"][:] = places - shifts
        arrays["of_part_before"][:] = shifts - 1
        if self._embedding is None:
            arrays["following"][:] = places + 1 - shifts
            return
        for ids, one, each in zip(arrays["following"], sequences, heads, strict=True):
            ids[: len(each)] = one.token_ids[each.start + 1 : each.stop + 1]
            ids[len(each) :] = 0

    def prefilled(self, run: PromptRun, embeds: Tensor, inputs: Mapping[str, Tensor]) -> list[BoundRun]:
        """Compute the head's rows of a part of prompts.

        That of the last token needs the first token of the answer; `started` makes it pending.
        """
        batch, tokens, _ = embeds.shape
        for row, is_first in zip(run.rows, run.first, strict=True):
            if is_first:
                self.kv_cache.clear_row(row)
        states = self._base.fused_hidden_states(batch, tokens)
        newest = self._newest.rows(run.rows.start, run.rows.stop)  # of the part before
        before = states
        if run.continues:
            if self._shifted is None:
                self._shifted = self._device.zeros(*self._shifted_shape)
            before = self._shifted.view(*states.shape)
            self._tree_kernels.take_rows(states, inputs["before"], before)
            self._tree_kernels.put_rows(newest, inputs["of_part_before"], before)
        following = self._embeds.view(batch, tokens, self._head.hidden_size)
        if self._embedding is None:  # encoder rows of the base included
            self._tree_kernels.take_rows(embeds, inputs["following"], following)
        else:
            self._kernels.embed(inputs["following"], self._embedding, self._no_rows, following)
        self.kv_cache.begin_rows(run.rows, inputs["head_starts"], inputs["deltas"])
        runs = self._head.execute_prompts(
            following, before, inputs["head_positions"], inputs["head_rows"], run.rows
        )
        self._tree_kernels.take_rows(states, inputs["last_token_ids"], newest)
        if run.ends:
            self._pending.begin_states(run.rows, newest)
        return runs

    def started(self, rows: range, tokens: Tensor, counts: Tensor) -> None:
        """Make the last tokens of prompts pending, with the answers' first tokens [B,1]."""
        self._pending.begin(rows, tokens, counts)

    def accepted(self, tokens: Tensor, path: Tensor, counts: Tensor) -> None:
        """Make tokens pending, with the states of the nodes before them."""
        batch, width = tokens.shape
        if width > 1:  # a round: `propose` has taken all pending tokens
            states = self._base.fused_hidden_states(batch, self._base.verified_nodes)
            self._pending.replace(tokens, states, path, counts, self.kv_cache.lengths(range(batch)))
            return
        waiting = self._waiting
        waiting.take_over(self._pending, batch)
        if max(waiting.most[:batch]) >= waiting.width:
            self._keep_newest(batch)
        waiting.append(tokens, self._base.fused_hidden_states(batch, 1), counts)

    def resume(self, batch: int) -> None:
        """Make the tokens of vanilla steps pending.

        The head runs on those that a round has no room for.
        """
        waiting = self._waiting
        if max(waiting.most[:batch]) > self._width:
            waiting.take_over(self._pending, batch)
            self._keep_newest(batch)
        self._pending.take_over(waiting, batch)

    def drafted(self, batch: int, size: int) -> None:
        """Expect the most pending tokens: only the device knows how many there are."""
        most, known = min(size, self._width), self._pending.most
        for row in range(batch):  # of several rows, held ones keep what they have
            known[row] = most if batch == 1 else max(most, known[row])

    def bind(self, batch: int) -> list[BoundRun]:
        """Bind the head to the tensors of a round."""
        if self._head.drafts_chains(batch):
            return []
        size, pending = self._head.hidden_size, self._pending
        embeds = self._embeds.view(batch, self._width, size)
        runs = self._head.bind_accepted(embeds, pending.states.rows(0, batch), pending.newest(batch))
        if self._levels > 1:
            embeds = self._embeds.view(batch, self._top_k, size)
            runs += self._head.bind_level(embeds, self._parents.rows(0, batch))
        return runs

    def bind_acceptance(self, batch: int, nodes: int) -> list[BoundRun]:
        """Return no runs: the head runs on accepted tokens with the next draft."""
        return []

    def propose(self, tree: DraftTree) -> None:
        """Draft a tree for each row from its pending tokens."""
        batch = tree.tokens.shape[0]
        if self._head.drafts_chains(batch):
            self._propose_chain(tree)
            return
        # the largest tree may be recorded, for any number of pending tokens
        tokens = self._pending.most[0] if batch == 1 and tree.size < self._width else self._width
        logits, states = self._run(self._pending, batch, tokens)
        self.kv_cache.commit_rows(range(batch), self._pending.counts.rows(0, batch))
        table, newest = self._table.rows(0, batch), self._pending.newest(batch)
        self._tree_kernels.add_candidates(logits, self._token_of_logit, table, 1)
        embeds = self._embeds.view(batch, self._top_k, self._head.hidden_size)
        parents = self._parents.rows(0, batch)
        levels = min(self._levels, tree.size - 1) if self._top_k == 1 else self._levels
        for level in range(1, levels):
            logits, states = self._head.execute_level(
                table,
                level,
                states=states,
                newest=newest,
                embedding=self._token_table,
                embeds=embeds,
                parents=parents,
            )
            self._tree_kernels.add_candidates(logits, self._token_of_logit, table, level + 1)
        self._tree_kernels.select_tree(table, self._sampling.last_tokens(range(batch)), tree)

    def _propose_chain(self, tree: DraftTree) -> None:
        pending, batch = self._pending, tree.tokens.shape[0]
        self._head.execute_chain(
            pending.tokens.view(batch, self._width),
            pending.counts.rows(0, batch),
            states=pending.states.view(batch, self._width, self._head.hidden_size),
            newest=pending.newest(batch),
            embedding=self._token_table,
            token_of_logit=self._token_of_logit,
            table=self._table.rows(0, batch),
            last_tokens=self._sampling.last_tokens(range(batch)),
            tree=tree,
        )

    def _run(self, pending: PendingTokens, batch: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Run the head on pending tokens, at most `tokens` of each row.

        Returns the logits of the newest and the states of all. Their rows are written, not committed.
        """
        shape = (batch, tokens, self._head.hidden_size)
        return self._head.execute_accepted(
            pending.tokens.view(batch, tokens),
            pending.counts.rows(0, batch),
            pending.states.view(*shape),
            self._token_table,
            self._embeds.view(*shape),
            pending.newest(batch),
        )

    def _keep_newest(self, batch: int) -> None:
        """Commit the head's rows of all waiting tokens but the newest.

        The newest one remains pending.
        """
        waiting = self._waiting
        tokens = waiting.width
        if batch == 1:
            tokens = min(1 << (waiting.most[0] - 1).bit_length(), tokens)
        self._run(waiting, batch, tokens)
        self.kv_cache.commit_rows(range(batch), waiting.newest(batch).view(batch))
        waiting.keep_newest(batch)
