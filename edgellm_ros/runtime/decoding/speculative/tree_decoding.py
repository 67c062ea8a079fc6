# SPDX-License-Identifier: Apache-2.0
"""TreeDecoding: a round of drafting yields 1 to D tokens per row and step.

  propose   drafter                 -> a tree of M nodes; the root is the newest token
  verify    base model, M rows      -> logits of every node, as if its path were the text
  sample    each request's sampler  -> tokens along a path, until a token has no node
  commit    KV rows of the path move to the next free slots; tokens, lengths and drafter follow

Each token is sampled from the logits, at the position and with the random number that a vanilla step would
have. So the answer is the same for every tree, and a bad draft costs time only.

A round takes no input from the host, so rounds can be queued one after another. Vanilla steps take the place
of rounds where the KV cache has no room for a tree, where a request turns drafting off, where drafting is
slower (fallback.py), and for good after the drafter has failed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels import DraftTree, TreeKernels
from edgellm_ros.runtime.batch.batch import Batch
from edgellm_ros.runtime.batch.input_embedder import InputEmbedder
from edgellm_ros.runtime.batch.sampling_rows import SamplingRows
from edgellm_ros.runtime.batch.step_result import StepResult
from edgellm_ros.runtime.decoding.recorded_steps import RecordedSteps, Step
from edgellm_ros.runtime.decoding.speculative.drafting_config import SpecDecodeDraftingConfig
from edgellm_ros.runtime.decoding.speculative.fallback import Fallback
from edgellm_ros.runtime.decoding.speculative.guarded_drafter import GuardedDrafter
from edgellm_ros.runtime.decoding.vanilla import VanillaDecoding
from edgellm_ros.runtime.engines.llm_engine_runner import LLMEngineRunner
from edgellm_ros.runtime.lora import LoraAdapter
from edgellm_ros.runtime.metrics import SpecDecodeGenerationMetrics


def tree_sizes(largest: int) -> list[int]:
    """Return the sizes of trees in falling order: the largest, then halves of it, down to 2."""
    sizes = [largest]
    while sizes[-1] > 3:
        sizes.append(sizes[-1] // 2)
    return sizes


class TreeDecoding:
    """Decodes with a drafter; `vanilla` does the steps without one."""

    def __init__(
        self,
        device: Device,
        kernels: TreeKernels,
        config: SpecDecodeDraftingConfig,
        batch: Batch,
        embedder: InputEmbedder,
        runner: LLMEngineRunner,
        sampling: SamplingRows,
        drafter: GuardedDrafter,
        vanilla: VanillaDecoding,
        metrics: SpecDecodeGenerationMetrics,
    ) -> None:
        self.tokens_per_step = config.tokens_per_round
        self._fallback = Fallback() if config.falls_back else None
        self.kernels = kernels
        self.batch = batch
        self.embedder = embedder
        self.runner = runner
        self.sampling = sampling
        self.drafter = drafter
        self._vanilla = vanilla
        self._metrics = metrics
        self._is_synchronous = device.max_queued_steps == 0
        rows, size, tokens = batch.max_size, config.tree_size, config.tokens_per_round
        vocabulary = runner.config.output_vocab_size
        self._sizes = tree_sizes(size)
        self.recorded: RecordedSteps[TreeRound] = RecordedSteps(device, rows)  # of the largest trees
        self.tree = DraftTree.zeros(device, rows, size)
        self.logits = device.empty((rows, size, vocabulary), np.float32)
        self._path_logits = device.empty((rows, tokens, vocabulary), np.float32)
        self.path = device.zeros((rows, tokens), np.int64)
        self._root = device.zeros((rows, 1), np.int64)  # the path of a vanilla step
        self.offered = device.zeros((rows,), np.int64)
        embedder.resize(size)

    def prefilled(self, rows: range) -> None:
        """Give the first tokens of admitted rows to the drafter."""
        if self._fallback is not None:
            self._fallback.new_text()
        tokens = self.sampling.begin_step(len(rows), 1)[1]
        self.drafter.started(rows, tokens, self.sampling.counts(len(rows)))

    def begin(self, batch: Batch) -> None:
        """Prepare for steps of these sequences."""
        self._adapters = [sequence.adapter for sequence in batch.sequences]
        self._logprobs = max(sequence.request.logprobs for sequence in batch.sequences)
        self._wanted = not any(sequence.request.disable_spec_decode for sequence in batch.sequences)
        self._vanilla.begin(batch)
        self._round = self.recorded.select(self._adapters, self._make_round)
        if self._fallback is not None:
            self._fallback.begin(len(batch))

    def queue(self, room: int) -> StepResult:
        """Queue a round of drafting, or a vanilla step; see `DecodeMethod`."""
        size = next((size for size in self._sizes if size <= room), 1)
        if size > 1 and self._wanted and not self.drafter.failed and self._is_worth_it():
            drafted = self._round
            if size == self._sizes[0]:
                self.recorded.queue()
            else:
                drafted = self._make_round(self._adapters, size)
                drafted.run()
            if not self.drafter.failed:
                return self._finish_round(drafted)
        return self._vanilla_step(room)

    def delivered(self, result: StepResult, counts: Sequence[int]) -> None:
        """Count and measure a delivered step."""
        drafted = result.most_tokens > 1
        if drafted:
            self._metrics.total_runs += 1
            self._metrics.verified_trees += len(counts)
            self._metrics.generated_tokens += sum(counts)
        else:
            self._metrics.vanilla_runs += 1
        if self._fallback is not None and counts:
            self._fallback.delivered(drafted, sum(counts) / len(counts))

    def capture(self, adapters: Sequence[LoraAdapter]) -> bool:
        """Record vanilla steps, and rounds with the largest trees, as graphs; see `DecodeMethod`."""
        done = self._vanilla.capture(adapters)
        return self.recorded.capture(adapters, self._make_round) and done

    def drop(self, adapter: LoraAdapter) -> None:
        """Drop the graphs of a removed adapter."""
        self._vanilla.drop(adapter)
        self.recorded.drop(adapter)

    def _make_round(self, adapters: Sequence[LoraAdapter], size: int = 0) -> TreeRound:
        return TreeRound(self, adapters, size or self._sizes[0])

    def _finish_round(self, drafted: TreeRound) -> StepResult:
        """Queue the copy of a round's tokens to the host."""
        self.drafter.round_queued()
        path_logits = self._path_logits.rows(0, drafted.path.shape[0])
        if self._logprobs:
            self.kernels.take_rows(drafted.logits, drafted.path, path_logits)
        return self.sampling.copy_to_host(path_logits, self._logprobs)

    def _vanilla_step(self, room: int) -> StepResult:
        result = self._vanilla.queue(room)
        batch = len(self._adapters)
        self.tell_drafter(self._root.rows(0, batch))
        return result

    def tell_drafter(self, path: Tensor) -> None:
        """Give the tokens that the last step has committed to the drafter."""
        tokens = self.sampling.begin_step(*path.shape)[1]
        self.drafter.accepted(tokens, path, self.sampling.counts(path.shape[0]))

    def _is_worth_it(self) -> bool:
        return self._fallback is None or self._fallback.drafts()

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time of the block to a metric, if the device works while it is called."""
        start = time.perf_counter()
        yield
        if self._is_synchronous:
            setattr(self._metrics, name, getattr(self._metrics, name) + time.perf_counter() - start)


class TreeRound(Step):
    """One round of the first len(adapters) rows, with trees of `size` nodes.

    `logits` [B,M,V] of the nodes; `path` [B,D]: nodes whose tokens were sampled.
    """

    def __init__(self, method: TreeDecoding, adapters: Sequence[LoraAdapter], size: int) -> None:
        batch, tree = len(adapters), method.tree
        self.logits = method.logits.view(batch, size, method.logits.shape[2])
        self.path = method.path.rows(0, batch)
        self._method = method
        self._adapters = adapters
        self._tree = DraftTree(*(each.view(batch, size) for each in (tree.tokens, tree.parents, tree.depths)))
        self._offered = method.offered.rows(0, batch)

    def run(self) -> None:
        """Queue the round; nothing but a part of the draft after the drafter has failed."""
        method, tree = self._method, self._tree
        with method.timed("draft_seconds"):
            method.drafter.propose(tree)
        if method.drafter.failed:
            return
        with method.timed("verify_seconds"):
            embeds = method.embedder.embed_tokens(tree.tokens)
            method.runner.execute_tree_decoding_step(
                embeds, tree, method.kernels, self.logits, self._adapters
            )
        with method.timed("accept_seconds"):
            method.sampling.sample_path(method.kernels, self.logits, tree, self.path, self._offered)
            counts = method.sampling.count(offered=self._offered)
            method.runner.kv_cache.move_path(method.kernels, self.path, counts)
            method.batch.commit(counts)
            method.tell_drafter(self.path)

    def bind(self) -> tuple[Any, Any]:
        """Bind the base model to this round's tensors; all rows have one adapter."""
        embeds = self._method.embedder.token_embeds(*self._tree.tokens.shape)
        return self._method.runner.bind_tree_decoding_step(embeds, self.logits, self._adapters[0])
