# SPDX-License-Identifier: Apache-2.0
"""TreeRound: one round of drafting for fixed rows and adapters.

Everything that a round reads is on the device, at fixed addresses. So a round can be recorded as one graph:
the draft, the verification, the sampling of a path, and the commit.

With a grammar in the batch, a round reads masks that the host computes from the drafted tokens:

  device   draft | verify ->  logits |          masks -> path -> counts -> commit
  host           | copy of the tree, masks  | upload

Then the draft and the verification are recorded each for itself, when they first run. Where the parts of
rounds are measured, all three are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgellm_ros.engine.device import Device, HostCopy
from edgellm_ros.engine.executor import BoundRun
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels import DraftTree, TreeKernels
from edgellm_ros.runtime.adapters.lora import LoraAdapter
from edgellm_ros.runtime.batch.batch import Batch
from edgellm_ros.runtime.batch.input_embedder import InputEmbedder
from edgellm_ros.runtime.batch.sampling_rows import SamplingRows
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.batch.step_result import StepResult
from edgellm_ros.runtime.batch.token_states import copy_states
from edgellm_ros.runtime.decoding.recorded_steps import Step
from edgellm_ros.runtime.decoding.speculative.guarded_drafter import GuardedDrafter
from edgellm_ros.runtime.engines.llm_engine_runner import LLMEngineRunner


class TreeRounds:
    """Makes rounds, and owns their tensors.

    - size: maximum number of nodes of a tree; tokens: maximum number of tokens of a round
    - only_chains: whether every tree is a chain, whose accepted KV rows are in their slots already
    """

    def __init__(
        self,
        device: Device,
        kernels: TreeKernels,
        size: int,
        tokens: int,
        batch: Batch,
        embedder: InputEmbedder,
        runner: LLMEngineRunner,
        sampling: SamplingRows,
        drafter: GuardedDrafter,
        only_chains: bool = False,
    ) -> None:
        self.device = device
        self.kernels = kernels
        self.only_chains = only_chains
        self.batch = batch
        self.embedder = embedder
        self.runner = runner
        self.sampling = sampling
        self.drafter = drafter
        rows, vocabulary = batch.max_size, runner.config.output_vocab_size
        self._tree = DraftTree.zeros(device, rows, size)
        self._logits = device.empty((rows, size, vocabulary), np.float32)
        self.path_logits = device.empty((rows, tokens, vocabulary), np.float32)
        self.path = device.zeros((rows, tokens), np.int64)
        self.offered = device.zeros((rows,), np.int64)
        embedder.resize(size)

    def tree(self, batch: int, size: int) -> DraftTree:
        """Return views of the tree: always the same memory."""
        tree = self._tree
        return DraftTree(*(tensor.view(batch, size) for tensor in (tree.tokens, tree.parents, tree.depths)))

    def logits(self, batch: int, size: int) -> Tensor:
        """Return the logits of a tree [batch,size,V]: always the same memory."""
        return self._logits.view(batch, size, self._logits.shape[2])


class TreeRound(Step):
    """A round of the first len(adapters) rows with trees of `size` nodes."""

    def __init__(self, rounds: TreeRounds, adapters: Sequence[LoraAdapter], size: int) -> None:
        self._rounds = rounds
        self._adapters = adapters
        batch = len(adapters)
        self._tree, self._logits = rounds.tree(batch, size), rounds.logits(batch, size)
        self._path, self._offered = rounds.path.rows(0, batch), rounds.offered.rows(0, batch)
        self._path_logits = rounds.path_logits.rows(0, batch)

    def run(self) -> None:
        """Queue the round.

        DraftingError if there is no draft: then nothing has been committed.
        """
        self.draft()
        self.verify()
        self.accept()

    def draft(self) -> None:
        """Queue the first part of the round."""
        self._rounds.drafter.propose(self._tree)

    def verify(self) -> None:
        """Queue the second part of the round, up to the logits."""
        rounds, tree = self._rounds, self._tree
        embeds = rounds.embedder.embed_tokens(tree.tokens)
        rounds.runner.execute_tree_decoding_step(embeds, tree, rounds.kernels, self._logits, self._adapters)

    def mask(self, sequences: Sequence[GenerationSequence], tree: TreeCopy) -> None:
        """Exclude the tokens that grammars do not allow at the nodes of the tree.

        The caller does so between the last two parts.
        """
        self._rounds.sampling.mask(self._logits, sequences, tree.wait)

    def accept(self) -> None:
        """Queue the last part of the round."""
        rounds, tree = self._rounds, self._tree
        rounds.sampling.sample_path(rounds.kernels, self._logits, tree, self._path, self._offered)
        counts = rounds.sampling.count(offered=self._offered)
        rounds.runner.verified(rounds.kernels, tree.tokens.shape[1])
        if not rounds.only_chains:
            rounds.runner.kv_cache.move_path(rounds.kernels, self._path, counts)
        rounds.batch.commit(counts)
        tokens = rounds.sampling.tokens(*self._path.shape)
        rounds.drafter.accepted(tokens, self._path, counts)

    def bind(self) -> list[BoundRun]:
        """Bind the engines to this round's tensors."""
        return [*self.bind_draft(), *self.bind_verification(), *self.bind_acceptance()]

    def bind_draft(self) -> list[BoundRun]:
        """Bind the engines of the first part."""
        return self._rounds.drafter.bind(len(self._adapters))

    def bind_verification(self) -> list[BoundRun]:
        """Bind the engines of the second part."""
        rounds = self._rounds
        embeds = rounds.embedder.token_embeds(*self._tree.tokens.shape)
        return rounds.runner.bind_tree_decoding_step(embeds, self._logits, self._adapters)

    def bind_acceptance(self) -> list[BoundRun]:
        """Bind the engines of the last part."""
        return self._rounds.drafter.bind_acceptance(*self._tree.tokens.shape)

    def copy_tree(self) -> TreeCopy:
        """Queue a copy of the tree to the host."""
        device, tree = self._rounds.device, self._tree
        return TreeCopy(device.copy_to_host(tree.tokens), device.copy_to_host(tree.parents))

    def copy_to_host(self, logprobs: int, hidden_states: bool = False) -> StepResult:
        """Queue a copy of the tokens that the round has yielded.

        hidden_states: with the states of the nodes from which they were sampled.
        """
        rounds = self._rounds
        if logprobs:
            rounds.kernels.take_rows(self._logits, self._path, self._path_logits)
        result = rounds.sampling.copy_to_host(self._path_logits, logprobs)
        if hidden_states:
            (batch, nodes), layers = self._tree.tokens.shape, rounds.runner.config.hidden_state_layers
            states = rounds.runner.step_hidden_states(batch, nodes, layers)
            result.states = copy_states(rounds.device, states, self._path)
        return result


@dataclass(frozen=True)
class TreeCopy:
    """Tokens and parents of trees [B,M], while they are copied to the host."""

    tokens: HostCopy
    parents: HostCopy

    def wait(self) -> tuple[np.ndarray, np.ndarray]:
        """Wait for the copies; may be called once."""
        return self.tokens.wait(), self.parents.wait()


class DraftPart(Step):
    """The first part of a round."""

    def __init__(self, step: TreeRound) -> None:
        self._step = step

    def run(self) -> None:
        """Queue the draft."""
        self._step.draft()

    def bind(self) -> list[BoundRun]:
        """Bind the engines to the draft's tensors."""
        return self._step.bind_draft()


class VerificationPart(Step):
    """The second part of a round."""

    def __init__(self, step: TreeRound) -> None:
        self._step = step

    def run(self) -> None:
        """Queue the verification."""
        self._step.verify()

    def bind(self) -> list[BoundRun]:
        """Bind the engines to the verification's tensors."""
        return self._step.bind_verification()


class AcceptancePart(Step):
    """The last part of a round."""

    def __init__(self, step: TreeRound) -> None:
        self._step = step

    def run(self) -> None:
        """Queue the acceptance."""
        self._step.accept()

    def bind(self) -> list[BoundRun]:
        """Bind the engines to the acceptance's tensors."""
        return self._step.bind_acceptance()
