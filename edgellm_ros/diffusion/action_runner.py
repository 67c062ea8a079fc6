# SPDX-License-Identifier: Apache-2.0
"""ActionRunner: samples trajectories with a flow-matching head of any kind."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

import numpy as np

from edgellm_ros.diffusion.action_head import ActionHead
from edgellm_ros.diffusion.chunking import ChunkCondition, ConditionedRun, conditioned_run
from edgellm_ros.diffusion.fused_actions import FusedActions
from edgellm_ros.engine.device import Device, DeviceGraph, HostCopy, on_device
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine.graph_recorder import GraphRecorder
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels import ConditionedStep, Kernels
from edgellm_ros.kernels.random import normal_noise

logger = logging.getLogger(__name__)

STEPS_PER_GRAPH = 20  # most Euler steps of one graph; its memory grows with them
KEPT_GRAPHS = 16
KEPT_NOISE = 64  # of requests whose trajectories have not been sampled


class QueuedActions:
    """Actions that the device computes."""

    def __init__(self, copy: HostCopy, origin: str) -> None:
        self._copy = copy
        self._origin = origin  # for errors

    def read(self) -> np.ndarray:
        """Wait for the actions [samples, T, A] float32.

        EngineError if they are not finite.
        """
        actions = self._copy.wait()
        if not np.isfinite(actions).all():
            raise EngineError(f"the actions are not finite ({self._origin})")
        return actions


class ActionRunner:
    """Samples the trajectories of one sequence at a time, all samples in one run.

    So the result of a request cannot depend on the other requests of the batch: products of two activations
    may round differently in another shape (see OnnxRuntimeBackend). All samples have one context, which the
    head binds to the engine.

    All Euler steps are one graph, if the device supports graphs: it is recorded after their first run with
    the same tensors, and launched with one call from then on. Runs that continue a chunk have graphs of their
    own, which read what differs between such runs from the device.

    fused: kernels that run the steps in place of the engine while `uses_fused` is true.
    """

    def __init__(
        self,
        executor: EngineExecutor,
        head: ActionHead,
        device: Device,
        kernels: Kernels,
        max_samples: int,
        fused: FusedActions | None = None,
    ) -> None:
        self.max_samples = max_samples
        self.default_steps = head.config.num_denoise_steps
        self.action_space = head.space
        self.uses_fused = fused is not None
        self._fused = fused
        self._executor = executor
        self._head = head
        self._device = device
        self._kernels = kernels
        self._trajectory = device.empty((max_samples, *head.shape), np.float32)
        self._velocity = device.empty((max_samples, *head.shape), np.float32)
        times = tuple(int(size) for size in executor.bindings["time"].shape)
        self._time = device.empty(times, np.float32)
        self._noise_time = on_device(device, np.full(times, head.flow.noise, np.float32))
        self._previous = device.empty(head.shape, np.float32)
        self._factors = device.empty((STEPS_PER_GRAPH, 3, head.shape[0]), np.float32)
        self._clean = device.empty((1,), np.int64)
        self._recorder = GraphRecorder()
        # by tensors, whether a chunk is continued, steps of the request, first step of the graph; latest last
        self._graphs: OrderedDict[tuple[Hashable, bool, int, int], tuple[DeviceGraph, Any]] = OrderedDict()
        self._times: OrderedDict[int, Tensor] = OrderedDict()  # embeddings, by steps of the request
        self._noise: OrderedDict[tuple[int, int], np.ndarray] = OrderedDict()  # by seed and samples

    def prepare(self, samples: int, seed: int) -> None:
        """Compute the noise of a later `execute`, if it is not computed yet.

        The noise is computed on the host.
        """
        if (seed, samples) not in self._noise:
            actions, values = self._head.shape
            self._noise[seed, samples] = normal_noise(seed, samples, actions * values)
            if len(self._noise) > KEPT_NOISE:
                self._noise.popitem(last=False)

    def stop_recording(self) -> None:
        """Launch the kernels of steps one by one from now on."""
        self._recorder.active = False

    def check(self, condition: ChunkCondition) -> None:
        """Check a condition against the action head. ValueError."""
        condition.check(self._head.config)

    def execute(
        self,
        context: Any,
        samples: int,
        steps: int,
        seed: int,
        report: Callable[[int], bool],
        condition: ChunkCondition | None = None,
    ) -> np.ndarray | None:
        """Sample normalised actions, float32 [samples, T, A].

        The arguments are those of `queue`. EngineError if they are not finite.
        """
        queued = self.queue(context, samples, steps, seed, report, condition)
        return None if queued is None else queued.read()

    def queue(
        self,
        context: Any,
        samples: int,
        steps: int,
        seed: int,
        report: Callable[[int], bool],
        condition: ChunkCondition | None = None,
    ) -> QueuedActions | None:
        """Queue the sampling of normalised actions, to be read before the next call.

        With `condition`, they continue a chunk. context: what the kind of head takes. `report(step)` is
        called before every Euler step is queued; if it returns False, sampling ends and the result is None.
        Equal contexts, seeds and steps give equal bits.
        """
        device = self._device
        trajectory, velocity = self._trajectory.rows(0, samples), self._velocity.rows(0, samples)
        run: ConditionedRun | None = None
        if condition is not None:
            run = conditioned_run(condition, self.action_space.normalise(condition.actions), steps)
        self.prepare(samples, seed)
        start = self._noise.pop((seed, samples)).reshape(trajectory.shape)
        if run is not None:
            start[:, : run.kept] = run.previous[: run.kept]
            device.upload(self._previous, run.previous)
        device.upload(trajectory, start)
        bound, flow = self._head.bind(context), self._head.flow
        tensors = {"trajectory": trajectory, "time": self._time, "velocity": velocity, **bound.tensors}
        if self.uses_fused:
            key: Hashable = tuple(tensor.pointer for tensor in tensors.values()), samples
            kept: Any = self._time_rows(steps)
            step = partial(self._fused_step, steps, kept, tensors, run is not None)
            if run is not None:
                device.upload(self._clean, np.array([run.clean], np.int64))
        else:
            self._executor.prepare(0, {"n": samples, **bound.dims}, tensors, device.stream)
            if run is None:
                device.copy(self._time, self._noise_time)
            else:
                device.upload(self._time, flow.at(run.times(0)[: self._time.size]))
            key = kept = self._executor.bound_run
            step = partial(self._engine_step, steps, trajectory, velocity, run is not None)

        def queue(number: int, first: bool) -> None:
            if not number and bound.begin is not None:
                bound.begin()
            step(number, first)

        for first in range(0, steps, STEPS_PER_GRAPH):
            chunk = range(first, min(first + STEPS_PER_GRAPH, steps))
            if run is not None:
                factors = flow.factors(run.factors(chunk.start, chunk.stop))
                device.upload(self._factors.rows(0, len(chunk)), factors)
            if not self._run(chunk, (key, run is not None, steps, first), queue, kept, report):
                return None
        return QueuedActions(device.copy_to_host(trajectory), f"noise seed {seed}, {steps} Euler steps")

    def _run(
        self,
        chunk: range,
        key: tuple[Hashable, bool, int, int],
        step: Callable[[int, bool], None],
        kept: Any,
        report: Callable[[int], bool],
    ) -> bool:
        """Queue some Euler steps; return False if `report` ended them.

        Steps that have a graph are queued with it. step(number, whether it is the first one); kept: what must
        live as long as a graph of the steps.
        """
        graph, _ = self._graphs.get(key, (None, None))

        def run() -> None:
            for number in chunk:
                step(number, number == chunk.start)

        for number in chunk:
            if not report(number):
                return False
            if graph is None:
                step(number, number == chunk.start)
        if graph is not None:
            self._graphs.move_to_end(key)
            graph.launch(self._device.stream)
        elif self._recorder.active:
            graph = self._recorder.capture(
                lambda: self._device.capture(run),
                lambda reason: logger.warning("%s runs without graphs: %s", self._executor.name, reason),
            )
            if graph is not None:
                self._graphs[key] = graph, kept
            if len(self._graphs) > KEPT_GRAPHS:
                self._graphs.popitem(last=False)
        return True

    def _engine_step(
        self, steps: int, trajectory: Tensor, velocity: Tensor, conditioned: bool, number: int, first: bool
    ) -> None:
        """Queue one Euler step, which also writes the time of the next one."""
        self._executor.execute(self._device.stream)
        if conditioned:
            previous, factors = self._previous, self._step_factors(number)
            self._kernels.conditioned_step(trajectory, velocity, previous, factors, 1.0 / steps, self._time)
        else:
            flow = self._head.flow
            next_time = flow.at((number + 1) / steps)
            self._kernels.euler_step(trajectory, velocity, flow.direction / steps, self._time, next_time)

    def _fused_step(
        self,
        steps: int,
        times: Tensor,
        tensors: Mapping[str, Tensor],
        conditioned: bool,
        number: int,
        first: bool,
    ) -> None:
        """Queue one Euler step of the fused kernels."""
        assert self._fused is not None
        row, clean = (times.rows(i, i + 1).view(times.shape[1]) for i in (number, steps))
        condition = None
        if conditioned:
            condition = ConditionedStep(self._previous, self._step_factors(number), self._clean, clean)
        self._fused.expert.step(tensors, row, 1.0 / steps, first, condition)

    def _step_factors(self, number: int) -> Tensor:
        """View the factors [3,T] of a step among those of its graph."""
        place = number % STEPS_PER_GRAPH
        return self._factors.rows(place, place + 1).view(*self._factors.shape[1:])

    def _time_rows(self, steps: int) -> Tensor:
        """Return the embeddings of the times of `steps` steps, and of time 1.

        The rows are on the device.
        """
        assert self._fused is not None
        if steps not in self._times:
            times = self._fused.times
            rows = np.concatenate([times.rows(steps), times.at(np.ones(1, np.float32))])
            self._times[steps] = on_device(self._device, rows)
            if len(self._times) > KEPT_GRAPHS:
                self._times.popitem(last=False)
        self._times.move_to_end(steps)
        return self._times[steps]
