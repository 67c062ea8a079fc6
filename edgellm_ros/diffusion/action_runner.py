# SPDX-License-Identifier: Apache-2.0
"""ActionRunner: samples trajectories with a head of any kind."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any

import numpy as np

from edgellm_ros.diffusion.action_head import ActionHead, BoundContext, Guidance
from edgellm_ros.diffusion.chunking import ChunkCondition, ConditionedRun, conditioned_run
from edgellm_ros.diffusion.engine_runs import EngineRuns, StepOfSamples
from edgellm_ros.diffusion.fused_actions import FusedActions
from edgellm_ros.diffusion.samplers import FlowTime, StepTensors
from edgellm_ros.diffusion.sampling import Sampling, parts_of
from edgellm_ros.diffusion.step_tables import StepConditions, StepTables
from edgellm_ros.engine.device import Device, DeviceGraph, on_device
from edgellm_ros.engine.executor import KEPT_BINDINGS, EngineExecutor
from edgellm_ros.engine.graph_recorder import GraphRecorder
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels import ConditionedStep, Kernels
from edgellm_ros.kernels.random import normal_noise

logger = logging.getLogger(__name__)

STEPS_PER_GRAPH = 20  # most steps of one graph; its memory grows with them
# Of one run on a CPU: the demo's expert takes 35 ms for ten steps of a sample in runs of 8, 51 ms in runs of
# one, and 44 ms in runs of 64.
SAMPLES_PER_PART = 8
KEPT_GRAPHS = 16
KEPT_NOISE = 64  # of requests whose trajectories have not been sampled


class ActionRunner:
    """Samples trajectories, part by part; a part has samples of one request.

    So the result of a request cannot depend on the other requests of the batch: products of two activations
    may round differently in another shape (see OnnxRuntimeBackend). All samples of a request have one
    context, which the head binds to the engine. Between two parts of a request the runner may queue parts of
    others.

    On a CPU a part has few samples and steps. Elsewhere a part has all samples and up to STEPS_PER_GRAPH
    steps, which are one graph, if the device supports graphs: it is recorded after their first run with the
    same tensors, and launched with one call from then on. Runs that continue a chunk, which only a flow can,
    have graphs of their own. What differs between runs of a graph, such as the noise that steps add, is read
    from the device.

    fused: kernels that run the steps in place of the engine while `uses_fused` is true. conditions: computes
    what the engine takes in place of `time`; all rows of such an engine have one time.
    """

    def __init__(
        self,
        executor: EngineExecutor,
        head: ActionHead,
        device: Device,
        kernels: Kernels,
        max_samples: int,
        fused: FusedActions | None = None,
        *,
        conditions: StepConditions | None = None,
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
        self._output = device.empty((max_samples, *head.shape), np.float32)
        self._unguided = device.empty((max_samples, *head.shape), np.float32)
        times = (1,) if conditions is not None else map(int, executor.bindings["time"].shape)
        self._time = device.empty(tuple(times), np.float32)
        self._conditions = conditions
        of_time = {"time": self._time} if conditions is None else conditions.inputs
        self._runs = EngineRuns(executor, device, of_time)
        self._times = lru_cache(KEPT_GRAPHS)(  # contents of `time` at the first step of a part
            lambda time: on_device(device, np.full(self._time.shape, time, np.float32))
        )
        added = STEPS_PER_GRAPH * max_samples if head.sampler.noises(STEPS_PER_GRAPH) else 0
        self._added = device.empty((added, *head.shape), np.float32)  # noise of the steps of a graph
        self._previous = device.empty(head.shape, np.float32)
        self._factors = device.empty((STEPS_PER_GRAPH, 3, head.shape[0]), np.float32)
        self._clean = device.empty((1,), np.int64)
        self._loaded: Sampling | None = None  # whose next part begins with the tensors as they are
        self._recorder = GraphRecorder()
        # by tensors, whether a chunk is continued, steps of the request, first step of the graph; latest last
        self._graphs: OrderedDict[tuple[Hashable, bool, int, int], tuple[DeviceGraph, Any]] = OrderedDict()
        self._tables = StepTables(self._embeddings)
        # by seed, samples and arrays of each sample
        self._noise: OrderedDict[tuple[int, int, int], np.ndarray] = OrderedDict()

    def prepare(self, samples: int, steps: int, seed: int) -> None:
        """Compute the noise of a later `execute`, if it is not computed yet.

        The noise is computed on the host: that of the start, then that which the steps add.
        """
        key = self._noise_key(samples, steps, seed)
        if key not in self._noise:
            drawn = 1 if self._head.sampler.adds_start else key[2]
            noise = normal_noise(seed, samples, drawn * prod(self._head.shape))
            noise = noise.reshape(samples, drawn, *self._head.shape)
            self._noise[key] = np.repeat(noise, key[2] // drawn, axis=1)
            if len(self._noise) > KEPT_NOISE:
                self._noise.popitem(last=False)

    def _noise_key(self, samples: int, steps: int, seed: int) -> tuple[int, int, int]:
        return seed, samples, 1 + self._head.sampler.noises(steps)

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
        """Sample normalised actions, float32 [samples, T, A]; None if `report` ended it.

        The arguments are those of `begin` and `queue_part`. EngineError if they are not finite.
        """
        sampling = self.begin(samples, steps, seed, report, condition)
        while not sampling.done:
            self.queue_part(context, sampling)
        return None if sampling.is_cancelled else sampling.read()

    def begin(
        self,
        samples: int,
        steps: int,
        seed: int,
        report: Callable[[int], bool],
        condition: ChunkCondition | None = None,
    ) -> Sampling:
        """Begin to sample normalised actions; nothing is queued.

        With `condition`, they continue a chunk. `report(number)` is called before every step is queued; if it
        returns False, sampling ends. Equal contexts, numbers of samples, seeds and steps give equal bits,
        whatever is queued between two parts.
        """
        run: ConditionedRun | None = None
        if condition is not None:
            left = self.action_space.normalise(condition.actions[condition.executed :])
            run = conditioned_run(condition, left, steps, self._head.shape[0])
        self.prepare(samples, steps, seed)
        noise = self._noise.pop(self._noise_key(samples, steps, seed))
        if run is not None:
            noise[:, 0, : run.kept] = run.previous[: run.kept]
        most = samples * STEPS_PER_GRAPH if self._device.max_queued_steps else SAMPLES_PER_PART
        return Sampling(noise, seed, steps, report, parts_of(samples, steps, most, STEPS_PER_GRAPH), run)

    def queue_part(self, context: Any, sampling: Sampling) -> None:
        """Queue the next part of a sampling; `context`: what the kind of head takes."""
        device, part, run = self._device, sampling.part, sampling.run
        samples, steps = len(part.samples), sampling.steps
        trajectory, output = self._trajectory.rows(0, samples), self._output.rows(0, samples)
        self._load(sampling, trajectory)
        if run is not None:
            factors = self._flow.factors(run.factors(part.steps.start, part.steps.stop))
            device.upload(self._factors.rows(0, len(part.steps)), factors)
        added = sampling.added()
        if added.size:
            rows = self._added.rows(0, len(added) * samples)
            device.upload(rows, added.reshape(rows.shape))
        bound, sampler = self._head.bind(context), self._head.sampler
        if self.uses_fused:
            tensors = {"trajectory": trajectory, "time": self._time, sampler.output: output, **bound.tensors}
            bindings: Hashable = tuple(tensor.pointer for tensor in tensors.values()), samples
            times = self._tables.of(steps)
            kept: Sequence[Any] = (times,)
            step = partial(self._fused_step, steps, times, tensors, run is not None)
        else:
            samples_step = StepOfSamples(trajectory, output, sampler.output)
            tables = () if self._conditions is None else (self._conditions.table(steps),)
            bindings = kept = (*self._runs.prepare(samples_step, bound), *tables)
            step = partial(self._engine_step, steps, samples_step, bound, run is not None)

        def queue(number: int, place: int) -> None:
            if not place and bound.begin is not None:
                bound.begin()
            step(number, place)

        key = bindings, run is not None, steps, part.steps.start
        if self._run(part.steps, key, queue, kept, sampling.report):
            self._queued(sampling, trajectory)

    def queue_guided(self, context: Any, guidance: Guidance, sampling: Sampling) -> None:
        """Queue the next part of a sampling with two contexts; see `queue_part`.

        Each step is two runs of the engine, whatever the fused kernels could do, and none is recorded.
        """
        flow, part, steps = self._flow, sampling.part, sampling.steps
        samples = len(part.samples)
        trajectory = self._trajectory.rows(0, samples)
        outputs = [each.rows(0, samples) for each in (self._output, self._unguided)]
        self._load(sampling, trajectory)
        size = flow.direction / steps
        for number in part.steps:
            if not sampling.report():
                return
            for each, output in zip((context, guidance.context), outputs, strict=True):
                bound = self._head.bind(each)
                if bound.begin is not None:
                    bound.begin()
                self._runs.execute(StepOfSamples(trajectory, output, flow.output), bound)
            shares = guidance.weight, 1 - guidance.weight
            for share, output in zip(shares, outputs, strict=True):
                self._kernels.euler_step(
                    trajectory, output, share * size, self._time, flow.time(number + 1, steps)
                )
        self._queued(sampling, trajectory)

    def _load(self, sampling: Sampling, trajectory: Tensor) -> None:
        """Write the tensors with which the next part of a sampling begins.

        Nothing is queued if the part before has left them there.
        """
        device, run, number = self._device, sampling.run, sampling.part.steps.start
        loaded, self._loaded = self._loaded, None
        if loaded is sampling:
            return
        if loaded is not None:
            loaded.save(device.copy_to_host(self._trajectory.rows(0, len(loaded.part.samples))))
        device.upload(trajectory, sampling.start())
        if run is None:
            device.copy(self._time, self._times(self._head.sampler.time(number, sampling.steps)))
        else:
            device.upload(self._previous, run.previous)
            device.upload(self._clean, np.array([run.clean], np.int64))
            device.upload(self._time, self._flow.at(run.times(number)[: self._time.size]))

    def _queued(self, sampling: Sampling, trajectory: Tensor) -> None:
        """Take note of a queued part; copy the trajectory after its last step."""
        is_last = sampling.part.steps.stop == sampling.steps
        self._loaded = None if is_last else sampling
        sampling.queued(self._device.copy_to_host(trajectory) if is_last else None)

    def _run(
        self,
        chunk: range,
        key: tuple[Hashable, bool, int, int],
        step: Callable[[int, int], None],
        kept: Sequence[Any],
        report: Callable[[], bool],
    ) -> bool:
        """Queue some steps; return False if `report` ended them.

        Steps that have a graph are queued with it. step(number, its place among them); kept: what must
        live as long as a graph of the steps. More runs than the executor keeps bindings of have no graph.
        """
        graph, _ = self._graphs.get(key, (None, None))

        def run() -> None:
            for place, number in enumerate(chunk):
                step(number, place)

        for place, number in enumerate(chunk):
            if not report():
                return False
            if graph is None:
                step(number, place)
        if graph is not None:
            self._graphs.move_to_end(key)
            graph.launch(self._device.stream)
        elif self._recorder.active and len(kept) <= KEPT_BINDINGS + 1:
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
        self,
        steps: int,
        step: StepOfSamples,
        context: BoundContext,
        conditioned: bool,
        number: int,
        place: int,
    ) -> None:
        """Queue one step, which also writes the time of the next one."""
        if self._conditions is not None:
            self._conditions.select(steps, number)
        self._runs.execute(step, context)
        trajectory, output = step.trajectory, step.output
        if conditioned:
            previous, factors = self._previous, self._step_factors(place)
            self._kernels.conditioned_step(trajectory, output, previous, factors, 1.0 / steps, self._time)
            return
        sampler, noise = self._head.sampler, None
        if number < sampler.noises(steps):
            samples = trajectory.shape[0]
            noise = self._added.rows(place * samples, (place + 1) * samples)
        sampler.queue(self._kernels, StepTensors(trajectory, output, self._time, noise), number, steps)

    def _fused_step(
        self,
        steps: int,
        times: Tensor,
        tensors: Mapping[str, Tensor],
        conditioned: bool,
        number: int,
        place: int,
    ) -> None:
        """Queue one Euler step of the fused kernels."""
        assert self._fused is not None
        row, clean = (times.rows(i, i + 1).view(times.shape[1]) for i in (number, steps))
        condition = None
        if conditioned:
            condition = ConditionedStep(self._previous, self._step_factors(place), self._clean, clean)
        self._fused.expert.step(tensors, row, 1.0 / steps, not place, condition)

    @property
    def _flow(self) -> FlowTime:
        """The flow of a run that continues a chunk; `check` refuses it without one."""
        assert isinstance(self._head.sampler, FlowTime)
        return self._head.sampler

    def _step_factors(self, place: int) -> Tensor:
        """View the factors [3,T] of a step among those of its part."""
        return self._factors.rows(place, place + 1).view(*self._factors.shape[1:])

    def _embeddings(self, steps: int) -> Tensor:
        """Return the embeddings of the times of `steps` steps, and of time 1."""
        assert self._fused is not None
        times = self._fused.times
        return on_device(self._device, np.concatenate([times.rows(steps), times.at(np.ones(1, np.float32))]))
