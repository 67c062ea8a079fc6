# SPDX-License-Identifier: Apache-2.0
"""The head beside a language model that answers.

The actions attend to the KV cache of prompt and answer. `builder/action/flow_expert.py` writes its engine.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from edgellm_ros.diffusion.action_head import BoundContext
from edgellm_ros.diffusion.action_space import UnicycleActionSpace
from edgellm_ros.diffusion.config import ActionConfig
from edgellm_ros.diffusion.samplers import NOISE_AT_0
from edgellm_ros.engine.device import Device, on_device
from edgellm_ros.kernels import Kernels, RopeTable, SequenceCache

ROWS_STEP = 64  # sizes of the part of the cache that a run reads: few sizes, so that few graphs are recorded


class FlowExpertHead:
    """An `ActionHead` whose context is a `SequenceCache`.

    The cache holds the KV rows up to and including the future-start token. The engine reads the filled rows
    in place; their number is rounded up to a multiple of ROWS_STEP.
    """

    sampler = NOISE_AT_0

    def __init__(
        self, config: ActionConfig, capacity: int, device: Device, kernels: Kernels, rope_table: RopeTable
    ) -> None:
        self.config = config
        self.space = UnicycleActionSpace(config.action_space)
        self.shape = config.action_space.horizon, config.action_space.dim
        self._kernels = kernels
        self._rope_table = rope_table
        self._row_numbers = on_device(device, np.arange(capacity))
        rope_shape = (1, config.action_space.horizon, rope_table.cos.shape[1])
        self._rope_cos, self._rope_sin = (
            device.empty(rope_shape, np.float32),
            device.empty(rope_shape, np.float32),
        )

    def bind(self, context: SequenceCache) -> BoundContext:
        """Return the engine's inputs; `begin` writes the actions' rotary rows."""
        angles = self._rope_cos, self._rope_sin
        rope = partial(self._kernels.rope_rows, self._rope_table, context.length, context.rope_delta, *angles)
        keys, values = context.keys, context.values
        rows = min(-(-context.host_length // ROWS_STEP) * ROWS_STEP, self._row_numbers.shape[0])
        tensors = {
            "rope_cos": self._rope_cos,
            "rope_sin": self._rope_sin,
            "kv_length": context.length,
            "cache_rows": self._row_numbers.rows(0, rows),
            **{f"key_cache_{i}": keys[i] for i in self.config.kv_caches},
            **{f"value_cache_{i}": values[i] for i in self.config.kv_caches},
        }
        return BoundContext(tensors, {"P": rows}, begin=rope)
