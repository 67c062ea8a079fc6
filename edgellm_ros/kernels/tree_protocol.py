# SPDX-License-Identifier: Apache-2.0
"""The protocol of speculative decoding's kernels; tensors of drafts and trees.

Letters in shapes, besides those of `protocol`: N levels of a draft, K candidates of each node that the draft
runs on, T entries of a table of candidates, M nodes of a tree, D most tokens of a round. All counts, indices
and token ids are int64, scores are float32. As in `Kernels`, the caller provides the output tensors, a kernel
waits for nothing, and the result of a row never depends on the other rows of the batch.

A round of decoding: `begin_accepted` and a run of the draft; `add_candidates`, and `begin_level` and a run of
the draft before each further level; `select_tree`; `tree_mask`, `tree_rope_rows` and a run of the base model
on the tree; `sample_path`; `Kernels.count_tokens`; `move_cache_rows`, `take_rows` and `Kernels.commit_rows`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels.protocol import RopeTable, SamplingState

# on a GPU, for the shared memory of the kernels
MOST_CANDIDATES = 32  # limit of K
MOST_TABLE_ENTRIES = 8192  # limit of T
MOST_TREE_NODES = 256  # limit of M and N
MOST_CHAIN_TOKENS = 8  # of a verification with recurrent layers; CHAIN_TOKENS of the graphs


@dataclass(frozen=True)
class DraftTable:
    """Candidates of a draft for the tokens after the newest one.

    Entry 0 stands for the newest token, the root. Level 1 has K entries, the candidates of the root. Each
    further level has K * K: the draft runs on K nodes of the level before, and each of them has K candidates.
    The candidates of a node are neighbours, the most likely first.
    """

    tokens: Tensor  # [B,T] i64, token ids of the base model; -1 where the score is -inf, and in entry 0
    scores: Tensor  # [B,T] f32, sums of natural log-probabilities from the root, which has 0
    parents: Tensor  # [B,T] i64, entries; -1 for the root
    nodes: Tensor  # [B,N-1,K] i64, entries that the draft runs on, level 1 first

    @classmethod
    def zeros(cls, device: Device, batch: int, top_k: int, levels: int) -> DraftTable:
        """Allocate a table of K = top_k candidates for each node and N = levels."""
        shape = (batch, entries(top_k, levels))
        return cls(
            tokens=device.zeros(shape, np.int64),
            scores=device.zeros(shape, np.float32),
            parents=device.zeros(shape, np.int64),
            nodes=device.zeros((batch, levels - 1, top_k), np.int64),
        )

    @property
    def top_k(self) -> int:
        """Candidates of each node: K."""
        return self.nodes.shape[2]

    @property
    def levels(self) -> int:
        """Levels of candidates: N."""
        return self.nodes.shape[1] + 1

    def rows(self, start: int, stop: int) -> DraftTable:
        """Return views of rows start..stop-1."""
        return DraftTable(**{name: tensor.rows(start, stop) for name, tensor in vars(self).items()})


@dataclass(frozen=True)
class ChainInputs:
    """What the tokens of a verification change the states of recurrent layers by.

    Each tensor has room for [L,B,MOST_CHAIN_TOKENS,width]. A run of `tokens` tokens of b sequences has
    written [b,tokens,width] to the beginning of each layer. All are float32.
    """

    conv_inputs: Tensor  # width: channels of the convolution
    keys: Tensor  # key heads * dk
    values: Tensor  # heads * dv
    decays: Tensor  # heads, natural logarithms
    strengths: Tensor | None  # heads; None for Mamba2


@dataclass(frozen=True)
class DraftTree:
    """Tokens that the base model verifies in one run, parents before their children."""

    tokens: Tensor  # [B,M] i64; node 0 is the newest token, -1 is never sampled
    parents: Tensor  # [B,M] i64, nodes; -1 for node 0
    depths: Tensor  # [B,M] i64, number of nodes above; 0 for node 0

    @classmethod
    def zeros(cls, device: Device, batch: int, size: int) -> DraftTree:
        """Allocate a tree of M = size nodes."""
        return cls(*(device.zeros((batch, size), np.int64) for _ in range(3)))

    @property
    def size(self) -> int:
        """Nodes, with the root: M."""
        return self.tokens.shape[1]

    def rows(self, start: int, stop: int) -> DraftTree:
        """Return views of rows start..stop-1."""
        return DraftTree(**{name: tensor.rows(start, stop) for name, tensor in vars(self).items()})


@dataclass(frozen=True)
class DraftInputs:
    """What a run of the draft on S tokens takes beside states.

    C is the capacity of the draft's cache. None: the draft does not have the input.
    """

    embeds: Tensor  # [B,S,H] of the tokens
    cos: Tensor  # [B,S,D/2] f32
    sin: Tensor  # [B,S,D/2] f32
    mask: Tensor | None  # [B,1,S,C] bool
    write_index: Tensor | None  # [B] i64: slot of the first token
    filled: Tensor | None  # [B] i64: KV rows with those of the run


def entries(top_k: int, levels: int) -> int:
    """Return T, the number of entries of a table with so many levels; 1 for none."""
    return 1 + (top_k + (levels - 1) * top_k * top_k if levels else 0)


class TreeKernels(Protocol):
    """The kernels of speculative decoding on one kind of device."""

    def add_candidates(
        self, logits: Tensor, token_of_logit: Tensor | None, table: DraftTable, level: int
    ) -> None:
        """Write the candidates of a level: tokens, scores and parents of the table.

        logits [B,R,Vd] f32 or f16 of the draft. Level 1 has R = 1: the K most likely tokens become the
        candidates of the root; entry 0 is written too. Level r > 1 has R = K: row k gives the candidates of
        nodes[:, r - 2, k]. A candidate's score is its parent's plus its log-probability, a log-softmax over
        all Vd logits. Equally likely tokens rank by logit index. token_of_logit [Vd] i64 gives the token ids,
        None if they are the indices. The candidates of a row that is not finite have score -inf. ValueError
        if K > Vd.
        """
        ...

    def begin_accepted(
        self,
        tokens: Tensor,
        counts: Tensor,
        embedding: Tensor,
        rope: RopeTable,
        lengths: Tensor,
        deltas: Tensor,
        newest: Tensor,
        out: DraftInputs,
    ) -> None:
        """Write the inputs of the draft's run on accepted tokens [B,S].

        Tokens after counts[b] are padding. Token s is in slot lengths[b] + s, at position lengths[b] + s +
        deltas[b], deltas [B] f32. It attends to the lengths[b] committed KV rows, to the tokens before it,
        and to itself. embedding [V,H]: a token outside takes the nearest row. newest [B,1] gets the index of
        the last of counts[b] tokens, 0 if there is none. out.write_index is not written: it is `lengths`.
        """
        ...

    def begin_level(
        self,
        table: DraftTable,
        level: int,
        states: Tensor,
        newest: Tensor,
        embedding: Tensor,
        rope: RopeTable,
        lengths: Tensor,
        deltas: Tensor,
        parents: Tensor,
        out: DraftInputs,
    ) -> None:
        """Select the level's K candidates of the highest scores, for the draft's run.

        Writes the inputs of this run on them. 1 <= level < N. Writes nodes[:, level - 1] in falling order of
        scores, the lower entry first among equals, and parents [B,K,H], the states of their parents.
        embedding [V,H] has a row for each token. states [B,S,H] are those of the run before: row newest[b,0]
        is that of the newest token, for level 1; later rows are those of nodes[:, level - 2], and S = K. A
        row outside of a tensor takes the nearest.

        Node k is in slot lengths[b] + (level - 1) * K + k of the draft's cache, at position lengths[b] +
        level - 1 + deltas[b], deltas [B] f32. It attends to the lengths[b] committed KV rows, to its
        ancestors below the root (the root's row is the last committed one), and to itself.
        """
        ...

    def select_tree(self, table: DraftTable, last_tokens: Tensor, tree: DraftTree) -> None:
        """Write the tree: the root and the M - 1 entries of the highest scores.

        The entries are in the table's order. last_tokens [B]: the token of node 0. Among equal scores the
        lower entry wins, so the parent of a selected entry is selected too. ValueError if M > T.
        """
        ...

    def tree_mask(self, tree: DraftTree, lengths: Tensor, out: Tensor) -> None:
        """Write out [B,1,M,C] bool: the attention mask of the run of the base model.

        Node m is in slot lengths[b] + m. A node attends to the lengths[b] committed KV rows, to its
        ancestors, and to itself.
        """
        ...

    def tree_rope_rows(
        self, table: RopeTable, lengths: Tensor, deltas: Tensor, depths: Tensor, cos: Tensor, sin: Tensor
    ) -> None:
        """Write cos, sin [B,S,D/2] of nodes at depths [B,S].

        Node s of sequence b has position lengths[b] + depths[b,s] + deltas[b], deltas [B] f32.
        """
        ...

    def sample_path(
        self,
        logits: Tensor,
        state: SamplingState,
        tree: DraftTree,
        vocab_map: Tensor | None,
        sampled: Tensor,
        tokens: Tensor,
        path: Tensor,
        offered: Tensor,
    ) -> None:
        """Sample a token at the root, go to the child with this token, and so on.

        logits [B,M,V] f32 of the tree's nodes. Token i of a sequence is sampled as `Kernels.sample` samples
        after a commit of the tokens before: at position state.position[b] + i, with these tokens seen. So the
        tokens are those of decoding without a draft, whatever the tree has. Only the logits of the path are
        read. The path ends after the first token without a child, after a token of -1 (its logits are not
        finite), or with min(D, state.path_limit[b]) tokens. Among children with the same token the first
        counts.

        offered [B], 1..D: number of tokens. sampled [B,D]: logit indices. tokens [B,D]: their token ids,
        vocab_map[sampled], or the same if vocab_map [V] is None; compared with tree.tokens. Both are -1 from
        offered[b] on. path [B,D]: the nodes where the tokens were sampled, path[b,0] = 0; from offered[b] on
        the last of them. Does not change the state: `Kernels.commit_tokens` does.
        """
        ...

    def move_cache_rows(
        self, cache: Tensor, first_row: int, lengths: Tensor, path: Tensor, counts: Tensor
    ) -> None:
        """Move KV rows of the path to the slots behind the committed ones, in place.

        cache [L,B,Hkv,C,D]; row b of lengths [b], path [b,n], counts [b <= B - first_row] belongs to sequence
        first_row + b of the cache. Slot lengths[b] + path[b,i] goes to slot lengths[b] + i for i < counts[b],
        in all layers and heads. The path rises (path[b,i] >= i). Slots from C on are left out.
        """
        ...

    def take_rows(self, source: Tensor, index: Tensor, out: Tensor) -> None:
        """Write out [B,R,H]: rows index [B,R] of source [B,S,H], of the same type.

        An index outside 0..S-1 takes the nearest row.
        """
        ...

    def take_accepted(
        self,
        tokens: Tensor,
        states: Tensor,
        path: Tensor,
        counts: Tensor,
        out_tokens: Tensor,
        out_states: Tensor,
        out_counts: Tensor,
        lengths: Tensor,
    ) -> None:
        """Write what a draft continues after a path.

        The kernel is `take_rows` of states, and copies of tokens and counts. tokens, out_tokens [B,R];
        counts, out_counts, lengths [B]; states [B,S,H], path [B,R], out_states [B,R,H]. A sequence with a
        count of 0 keeps what it had, and lengths[b] falls by the count that it keeps: the rows of its tokens
        are no longer committed.
        """
        ...

    def put_rows(self, source: Tensor, index: Tensor, out: Tensor) -> None:
        """Scatter: out[b, index[b, r]] = source[b, r].

        Both have the same type. The indices of a sequence differ. A row with an index outside 0..S-1 is left
        out.
        """
        ...

    def find_continuation(
        self, history: Tensor, lengths: Tensor, most_ngram: int, least_ngram: int, tree: DraftTree
    ) -> None:
        """Write a chain of tokens that followed earlier occurrences of the newest ones.

        history [B,C]: entry i is the token of KV row i; the newest token, entry lengths[b], has no KV row
        yet. Of the n-grams that end at the newest token, with most_ngram >= n >= least_ngram >= 1, the
        longest one that occurs before counts, and its latest occurrence (which may overlap it). An entry of
        -1 (not text) is part of no n-gram. Nodes 1.. get the tokens after the occurrence; where the history
        ends, the same tokens follow once more. Without an occurrence the tokens are -1.
        """
        ...

    def append_history(self, tokens: Tensor, counts: Tensor, lengths: Tensor, history: Tensor) -> None:
        """Append the newest counts[b] tokens of tokens [B,n] to history [B,C].

        The last of them becomes entry lengths[b]: see `find_continuation`. Entries outside 0..C-1 are left
        out. Call it after `Kernels.commit_rows`.
        """
        ...

    def advance_states(self, states: Tensor, inputs: ChainInputs, tokens: int, counts: Tensor) -> None:
        """Change states of the first b rows by the first counts[b] tokens of a run.

        The states are changed in place. states [L,B,groups,dk,columns] f32, as `RecurrentConfig.state_shape`
        has them; counts [b], at most `tokens`. Token t changes the state S [dk,dv] of a head, with key k,
        value v, decay g and strength s:

          S <- exp(g) S + k (s (v - exp(g) S^T k))^T      or, without strengths,      S <- exp(g) S + k v^T

        Heads share a key with those beside them if there are fewer keys. Sums are in fp32.
        """
        ...

    def advance_windows(self, windows: Tensor, inputs: Tensor, tokens: int, counts: Tensor) -> None:
        """Append the first counts[b] inputs of a run to the convolutions' last inputs.

        The windows are changed in place. windows [L,B,C,K-1] f32, the newest input last; inputs: those of
        `ChainInputs`.
        """
        ...


def check_candidates(table: DraftTable, level: int, rows: int, draft_vocab: int) -> None:
    """Raise ValueError unless logits can be added as a level.

    The logits have `rows` rows and `draft_vocab` tokens.
    """
    if not 1 <= level <= table.levels or rows != (1 if level == 1 else table.top_k):
        raise ValueError(
            f"level {level} of {table.levels} with {rows} rows of logits: expected 1 row for level 1, "
            f"{table.top_k} for each further level"
        )
    if not 1 <= table.top_k <= draft_vocab:
        raise ValueError(f"{table.top_k} candidates for each node of a draft with {draft_vocab} tokens")


def check_level(table: DraftTable, level: int) -> None:
    """Raise ValueError unless the draft runs on nodes of a level."""
    if not 1 <= level < table.levels:
        raise ValueError(f"a run of the draft on level {level} of {table.levels}")


def check_tree_size(table: DraftTable, tree: DraftTree) -> None:
    """Raise ValueError if a tree has more nodes than the table has entries."""
    if not 1 <= tree.size <= table.scores.shape[1]:
        raise ValueError(f"a tree of {tree.size} nodes from a table of {table.scores.shape[1]} entries")


def check_chain(tokens: int) -> None:
    """Raise ValueError for a run of more tokens than `ChainInputs` has room for."""
    if not 1 <= tokens <= MOST_CHAIN_TOKENS:
        raise ValueError(f"a chain of {tokens} tokens, expected 1 to {MOST_CHAIN_TOKENS}")
