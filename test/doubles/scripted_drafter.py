# SPDX-License-Identifier: Apache-2.0
"""A drafter that knows the answers and proposes random trees.

Some tokens of a tree are right.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgellm_ros.kernels import DraftTree, load_tree_kernels
from edgellm_ros.runtime.decoding.speculative.drafting_config import SpecDecodeDraftingConfig
from edgellm_ros.runtime.decoding.speculative.tree_decoding import TreeDecoding
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest


class ScriptedTrees(SpecDecodeDraftingConfig):
    """Prompt lookup for a drafter that proposes trees.

    The runtime loads graphs that take trees.
    """

    is_chain = False


class ScriptedDrafter:
    """A drafter that proposes random trees with tokens of known answers.

    `answers`: request -> tokens of its answer; `right`: share of right tokens of right parents. `drafter`:
    gets all calls too; its proposals are replaced. `back`: how far before a node its parent may be, 1 for
    chains.
    """

    name = "scripted"

    def __init__(
        self, drafter, device, cache, last_tokens, seed: int = 0, right: float = 0.8, back: int = 3
    ) -> None:
        self.drafter = drafter
        self.answers: Callable[[LLMGenerationRequest], list[int]] = lambda request: []
        self._device, self._cache, self._last_tokens = device, cache, last_tokens
        self._rng, self._right, self.back = np.random.default_rng(seed), right, back
        self._sequences: dict = {}

    def __getattr__(self, name):
        return getattr(self.drafter, name)

    def open(self, row, sequence) -> None:
        self.drafter.open(row, sequence)
        self._sequences[row] = sequence

    def move(self, source, target) -> None:
        self.drafter.move(source, target)
        self._sequences[target] = self._sequences[source]

    def propose(self, tree: DraftTree) -> None:
        self.drafter.propose(tree)
        batch, size = tree.tokens.shape
        lengths = self._device.download(self._cache.lengths(range(batch)))
        tokens, parents, depths = (np.zeros((batch, size), np.int64) for _ in range(3))
        tokens[:, 0], parents[:, 0] = self._device.download(self._last_tokens(range(batch))), -1
        for row in range(batch):
            sequence = self._sequences[row]
            answer = self.answers(sequence.request)
            place = int(lengths[row]) - len(sequence.token_ids)  # of the newest token in the answer
            is_right = [True]
            for node in range(1, size):
                parent = int(self._rng.integers(max(0, node - self.back), node))
                depth = depths[row, parent] + 1
                known = answer[place + depth] if 0 <= place + depth < len(answer) else -1
                right = is_right[parent] and self._rng.random() < self._right
                parents[row, node], depths[row, node] = parent, depth
                tokens[row, node] = known if right else self._rng.integers(300)
                is_right.append(right)
        for target, values in ((tree.tokens, tokens), (tree.parents, parents), (tree.depths, depths)):
            self._device.upload(target, values)


def draft_by_script(
    runtime: LLMInferenceRuntime, steps: int, size: int, seed: int = 0, right: float = 0.8
) -> ScriptedDrafter:
    """Let a runtime that drafts decode with trees of `size` nodes.

    A round gives up to steps + 1 tokens. A runtime that was made for chains gets chains: on CUDA, its graphs
    take no mask. So one that drafts by prompt lookup gets trees if it was made with ScriptedTrees. A draft
    head must draft with the same number of steps.
    """
    pipeline = runtime.pipeline
    config = SpecDecodeDraftingConfig(32, steps, size, falls_back=False)
    cache, last_tokens = pipeline.runner.kv_cache, pipeline.sampling.last_tokens
    inner = pipeline.drafter.drafter
    if isinstance(inner, ScriptedDrafter):
        inner, back = inner.drafter, inner.back
    else:
        back = 1 if pipeline.method._rounds.only_chains else 3
    drafter = ScriptedDrafter(inner, pipeline.device, cache, last_tokens, seed, right, back)
    pipeline.drafter.drafter = drafter
    pipeline.drafter.failed = False
    method = TreeDecoding(
        pipeline.device,
        load_tree_kernels(pipeline.device),
        config,
        pipeline.batch,
        pipeline.embedder,
        pipeline.runner,
        pipeline.sampling,
        pipeline.drafter,
        pipeline.vanilla,
        runtime.spec_decode_generation_metrics,
    )
    pipeline.use_decode_method(method)
    return drafter
