# SPDX-License-Identifier: Apache-2.0
"""FusedChain: a draft head's chain of tokens, as one launch of a kernel.

A sequence has a cluster of CTAs.
"""

from __future__ import annotations

from typing import Any

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.fused.params import DraftChainParams
from edgellm_ros.fused.plan.chain import CLUSTER, CLUSTERS, ChainPlan
from edgellm_ros.fused.plan.shape import FusedDraftShape
from edgellm_ros.fused.variants import Compile, compiler_for
from edgellm_ros.fused.weights import FusedWeights
from edgellm_ros.kernels.capability import compute_capability
from edgellm_ros.kernels.chain_protocol import ChainDraft
from edgellm_ros.kernels.tree_protocol import check_tree_size


class FusedChain:
    """Drafts of chains with one head on one device.

    - rows: most accepted tokens of a round
    - levels: tokens of a draft
    - compile, device: as of `FusedDecoder`

    EngineError, with the reason, if device or head are not supported.
    """

    def __init__(
        self,
        device: Any,
        shape: FusedDraftShape,
        weights: FusedWeights,
        rows: int,
        levels: int,
        compile: Compile | None = None,
        cluster: int = CLUSTER,
    ) -> None:
        if compute_capability(device.arch) < CLUSTERS:
            raise EngineError(f"no kernel for whole chains: {device.arch} has no clusters of blocks")
        self.plan = ChainPlan(shape, rows, levels, device.most_shared_memory, cluster)
        self._weights = weights
        self._program = (compile or compiler_for(device))(self.plan)
        self.max_batch = self._program.most_clusters(self.plan.launch(1, False))
        if not self.max_batch:
            raise EngineError(f"no kernel for whole chains: no room for {cluster} blocks at once")

    def run(self, draft: ChainDraft) -> None:
        """Queue a draft of at most `max_batch` sequences; see `ChainDrafter`."""
        weights, layer = self._weights, self._weights.layers[0]
        table, tree, rope = draft.table, draft.tree, draft.rope
        batch, rows = draft.tokens.shape
        check_tree_size(table, tree)
        if (rows, table.levels, table.top_k) != (self.plan.rows, self.plan.levels, 1):
            raise EngineError(
                f"a draft of {table.levels} levels with {table.top_k} candidates after {rows} tokens; the "
                f"kernel is for {self.plan.levels} levels with one after {self.plan.rows}"
            )
        params = DraftChainParams(
            qkv=layer.qkv,
            qkv_bias=layer.qkv_bias,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            o=layer.o,
            o_bias=layer.o_bias,
            gate_up=layer.gate_up,
            gate_up_bias=layer.gate_up_bias,
            down=layer.down,
            down_bias=layer.down_bias,
            lm_head=weights.lm_head,
            embed_norm=layer.input_norm,
            state_norm=layer.state_norm,
            post_norm=layer.post_norm,
            norm=weights.norm,
            embedding=draft.embedding.pointer,
            tokens_of_embedding=draft.embedding.shape[0],
            token_of_logit=0 if draft.token_of_logit is None else draft.token_of_logit.pointer,
            cos_table=rope.cos.pointer,
            sin_table=rope.sin.pointer,
            radians=rope.frequencies.pointer,
            positions=rope.cos.shape[0],
            lengths=draft.lengths.pointer,
            deltas=draft.deltas.pointer,
            key_cache=draft.caches["key_cache_0"].pointer,
            value_cache=draft.caches["value_cache_0"].pointer,
            pending=draft.tokens.pointer,
            counts=draft.counts.pointer,
            states=draft.states.pointer,
            newest=draft.newest.pointer,
            table_tokens=table.tokens.pointer,
            table_scores=table.scores.pointer,
            table_parents=table.parents.pointer,
            table_nodes=table.nodes.pointer,
            table_levels=table.levels,
            last_tokens=draft.last_tokens.pointer,
            tree_tokens=tree.tokens.pointer,
            tree_parents=tree.parents.pointer,
            tree_depths=tree.depths.pointer,
            tree_size=tree.size,
        )
        self._program.launch(self.plan.launch(batch, True), params)
