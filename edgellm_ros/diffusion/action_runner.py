# SPDX-License-Identifier: Apache-2.0
"""ActionRunner: samples trajectories with a flow-matching head over the KV cache."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgellm_ros.diffusion.action_space import UnicycleActionSpace
from edgellm_ros.diffusion.config import ActionConfig
from edgellm_ros.engine.device import Device, on_device
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.kernels import Kernels, RopeTable, SequenceCache
from edgellm_ros.kernels.random import normal_noise

ROWS_STEP = 64  # sizes of the part of the cache that a run reads: few sizes, so that few graphs are recorded


class ActionRunner:
    """Samples the trajectories of one sequence at a time, all samples in one run.

    So the result of a request cannot depend on the other requests of the batch: products of two activations
    may round differently in another shape (see OnnxRuntimeBackend). The engine reads the filled rows of the
    KV cache in place; their number is rounded up to a multiple of ROWS_STEP.
    """

    def __init__(
        self,
        executor: EngineExecutor,
        config: ActionConfig,
        device: Device,
        kernels: Kernels,
        rope_table: RopeTable,
        max_samples: int,
    ) -> None:
        self.max_samples = max_samples
        self.default_steps = config.num_denoise_steps
        self.action_space = UnicycleActionSpace(config.action_space)
        self._executor = executor
        self._config = config
        self._device = device
        self._kernels = kernels
        self._rope_table = rope_table
        space = config.action_space
        self._trajectory = device.empty((max_samples, space.horizon, space.dim), np.float32)
        self._velocity = device.empty((max_samples, space.horizon, space.dim), np.float32)
        capacity = executor.bindings[names.key_cache(config.kv_caches[0])].shape[2]
        self._row_numbers = on_device(device, np.arange(int(capacity)))
        self._time = device.empty((1,), np.float32)
        self._times = device.empty((self.default_steps,), np.float32)  # of all Euler steps of a request
        rope_shape = (1, space.horizon, rope_table.cos.shape[1])
        self._rope_cos, self._rope_sin = (
            device.empty(rope_shape, np.float32),
            device.empty(rope_shape, np.float32),
        )

    def execute(
        self, cache: SequenceCache, samples: int, steps: int, seed: int, report: Callable[[int], bool]
    ) -> np.ndarray | None:
        """Sample normalised actions, float32 [samples, T, A].

        `report(step)` is called before every Euler step; if it returns False, sampling ends and the result is
        None. The cache must hold the KV rows up to and including the future-start token. Equal caches, seeds
        and steps give equal bits. EngineError if the result is not finite.
        """
        device, space = self._device, self._config.action_space
        trajectory, velocity = self._trajectory.rows(0, samples), self._velocity.rows(0, samples)
        noise = normal_noise(seed, samples, space.horizon * space.dim)
        device.upload(trajectory, noise.reshape(trajectory.shape))
        self._kernels.rope_rows(
            self._rope_table, cache.length, cache.rope_delta, self._rope_cos, self._rope_sin
        )
        keys, values = cache.keys, cache.values
        rows = min(-(-cache.host_length // ROWS_STEP) * ROWS_STEP, self._row_numbers.shape[0])
        tensors = {
            names.TRAJECTORY: trajectory,
            names.TIME: self._time,
            names.ROPE_COS: self._rope_cos,
            names.ROPE_SIN: self._rope_sin,
            names.KV_LENGTH: cache.length,
            names.CACHE_ROWS: self._row_numbers.rows(0, rows),
            names.VELOCITY: velocity,
            **{names.key_cache(i): keys[i] for i in self._config.kv_caches},
            **{names.value_cache(i): values[i] for i in self._config.kv_caches},
        }
        if steps > self._times.shape[0]:
            self._times = device.empty((steps,), np.float32)
        device.upload(self._times.rows(0, steps), (np.arange(steps) / steps).astype(np.float32))
        self._executor.prepare(0, {"n": samples, "P": rows}, tensors, device.stream)
        for step in range(steps):
            if not report(step):
                return None
            device.copy(self._time, self._times.rows(step, step + 1))
            self._executor.execute(device.stream)
            if step == 0:
                self._executor.record(device.stream)
            self._kernels.euler_step(trajectory, velocity, 1.0 / steps)
        result = device.download(trajectory)
        if not np.isfinite(result).all():
            raise EngineError(f"the actions are not finite (noise seed {seed}, {steps} Euler steps)")
        return result
