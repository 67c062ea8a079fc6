# SPDX-License-Identifier: Apache-2.0
"""Trajectories of the sequences that have triggered the action head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from edgellm_ros.diffusion.action_head import Guidance
from edgellm_ros.diffusion.action_runner import QueuedActions
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.metrics import ActionMetrics

if TYPE_CHECKING:
    from edgellm_ros.runtime.pipeline import Pipeline


class Trajectories:
    """Trajectories and paths of one sequence at a time."""

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

    def queue(self, sequence: GenerationSequence, row: int) -> QueuedActions | None:
        """Queue the trajectories of a row's sequence; None if it wants none."""
        if self._action is None or not sequence.wants_actions_now:
            return None
        request, cache = sequence.request, self._cache.sequence(row)
        samples, steps = request.action_samples, request.denoise_steps or self._action.default_steps
        seed, report = sequence.noise_seed, partial(sequence.report, "action")
        if request.guidance is None:
            return self._action.queue(cache, samples, steps, seed, report, request.previous_chunk)
        with self._unguided(sequence) as second:
            guidance = Guidance(self._cache.sequence(second), request.guidance)
            return self._action.queue_guided(cache, guidance, samples, steps, seed, report)

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

    def deliver(self, sequence: GenerationSequence, queued: QueuedActions) -> None:
        """Wait for the trajectories of a sequence, and compute their paths."""
        assert self._action is not None
        space, request = self._action.action_space, sequence.request
        condition = request.previous_chunk
        sequence.actions = space.denormalise(queued.read())
        self._metrics.trajectories += request.action_samples
        self._metrics.total_runs += request.denoise_steps or self._action.default_steps
        if condition is not None:
            kept = condition.unchanged
            sequence.actions[:, : len(kept)] = space.clip(kept)
        sequence.paths = space.integrate(sequence.actions, sequence.speed)
