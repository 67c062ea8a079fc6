# SPDX-License-Identifier: Apache-2.0
"""Trajectories of the sequences that have triggered the action head.

Trajectories are sampled part by part. Between two parts, rows may be decoded, moved, admitted and evicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from edgellm_ros.diffusion.action_head import Guidance
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.metrics import ActionMetrics

if TYPE_CHECKING:
    from edgellm_ros.runtime.pipeline import Pipeline


class Trajectories:
    """Samples trajectories, and computes their paths."""

    def __init__(self, pipeline: Pipeline, metrics: ActionMetrics) -> None:
        self._pipeline = pipeline
        self._action = pipeline.action  # None = there is no action head
        self._cache = pipeline.runner.kv_cache
        self._metrics = metrics

    def prepare(self, sequence: GenerationSequence) -> None:
        """Compute the noise of a sequence's trajectories on the host."""
        request = sequence.request
        if self._action is not None and request.action_samples:
            steps = request.denoise_steps or self._action.default_steps
            self._action.prepare(request.action_samples, steps, sequence.noise_seed)

    def queue_part(self, sequence: GenerationSequence) -> None:
        """Queue the next part of the trajectories of a sequence that wants a part.

        With guidance all parts are queued.
        """
        assert self._action is not None
        request = sequence.request
        if sequence.sampling_actions is None:
            sequence.sampling_actions = self._action.begin(
                request.action_samples,
                request.denoise_steps or self._action.default_steps,
                sequence.noise_seed,
                partial(sequence.report, "action"),
                request.previous_chunk,
            )
        sampling, row = sequence.sampling_actions, self._pipeline.batch.row_of(sequence)
        cache = self._cache.sequence(row)
        if request.guidance is None:
            self._action.queue_part(cache, sampling)
            return
        with self._unguided(sequence) as second:
            guidance = Guidance(self._cache.sequence(second), request.guidance)
            while not sampling.done:
                self._action.queue_guided(cache, guidance, sampling)

    @contextmanager
    def _unguided(self, sequence: GenerationSequence) -> Iterator[int]:
        """Compute prompt and answer without the instruction of navigation; yield the row.

        The row is free afterwards: what is queued until then reads it before a later prompt overwrites it.
        """
        pipeline = self._pipeline
        unguided = pipeline.preparer.prepare_unguided(sequence)
        pipeline.reuse.match([unguided], reuse=False)
        pipeline.encode_images([unguided])
        pipeline.encode_audio([unguided])
        rows = pipeline.batch.admit([unguided])
        pipeline.prefills.compute([unguided], rows)
        try:
            yield rows.start
        finally:
            pipeline.batch.evict([unguided])

    def deliver(self, sequence: GenerationSequence) -> None:
        """Wait for the trajectories of a sequence, and compute their paths.

        Without effect if the sequence wants none, or was cancelled. EngineError if they are not finite.
        """
        sampling = sequence.sampling_actions
        if self._action is None or sampling is None or not sequence.wants_actions_now:
            return
        space, condition = self._action.action_space, sequence.request.previous_chunk
        sequence.actions = space.denormalise(sampling.read())
        self._metrics.trajectories += sequence.request.action_samples
        self._metrics.total_runs += sampling.steps
        if condition is not None:
            kept = condition.unchanged
            sequence.actions[:, : len(kept)] = space.clip(kept)
        sequence.paths = space.integrate(sequence.actions, sequence.speed)
