# SPDX-License-Identifier: Apache-2.0
"""Trajectories of the sequences that have triggered the action head."""

from __future__ import annotations

from functools import partial

from edgellm_ros.diffusion.action_runner import ActionRunner, QueuedActions
from edgellm_ros.runtime.batch.linear_kv_cache import LinearKVCache
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.metrics import ActionMetrics


class Trajectories:
    """Trajectories and paths of one sequence at a time.

    action: None = there is no action head.
    """

    def __init__(self, action: ActionRunner | None, cache: LinearKVCache, metrics: ActionMetrics) -> None:
        self._action = action
        self._cache = cache
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
        report = partial(sequence.report, "action")
        return self._action.queue(cache, samples, steps, sequence.noise_seed, report, request.previous_chunk)

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
