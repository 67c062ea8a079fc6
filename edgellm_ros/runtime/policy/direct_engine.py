# SPDX-License-Identifier: Apache-2.0
"""DirectEngine: one engine from images and state to actions, as that of ACT."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgellm_ros.diffusion.policy_config import ACTConfig
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine_directory.binding_names import ACTIONS
from edgellm_ros.runtime.metrics import RuntimeMetrics, StageClock
from edgellm_ros.runtime.opening import Opening
from edgellm_ros.runtime.policy.camera_engine import CameraEngine
from edgellm_ros.runtime.policy.sequence import PolicySequence
from edgellm_ros.runtime.request import LLMGenerationRequest


class DirectEngine:
    """An engine without text, noise and steps; see `PolicyEngines`."""

    def __init__(self, opening: Opening, config: ACTConfig, metrics: RuntimeMetrics) -> None:
        self._config = config
        self._metrics = metrics
        self._device = opening.device
        self._engine = CameraEngine(opening, "action", config, config.cameras)

    def tokens(self, request: LLMGenerationRequest, state: np.ndarray | None) -> list[int]:
        if request.denoise_steps is not None:
            kind = self._config.kind
            raise ValueError(f"denoise_steps is {request.denoise_steps}, but {kind} has no steps from noise")
        self._engine.tell_unused(request)
        return []

    def rows(self, images: Sequence[np.ndarray], tokens: int) -> int:
        self._engine.check(images)
        return self._config.max_prefix_rows

    def compute(self, sequence: PolicySequence, clock: StageClock) -> np.ndarray | None:
        if not sequence.report("action", 0):
            return None
        metrics = self._metrics
        self._engine.run(sequence, metrics.multimodal)
        values = self._device.copy_to_host(self._engine.tensors[ACTIONS]).wait()
        if not np.isfinite(values).all():
            raise EngineError("the actions are not finite")
        metrics.multimodal.total_image_tokens += sum(self._config.cameras.tokens)
        metrics.action.total_runs += 1
        clock.end("action_s")
        return values[None]
