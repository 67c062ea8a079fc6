# SPDX-License-Identifier: Apache-2.0
"""DiffusionEngines: the engines of Diffusion Policy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from edgellm_ros.diffusion.action_head import PrefixContext
from edgellm_ros.diffusion.action_runner import ActionRunner
from edgellm_ros.diffusion.diffusion_policy_config import DiffusionConfig
from edgellm_ros.diffusion.heads.diffusion import DiffusionHead
from edgellm_ros.engine_directory.binding_names import CONDITION
from edgellm_ros.engine_directory.files import PREFIX
from edgellm_ros.kernels import load_kernels
from edgellm_ros.runtime.metrics import RuntimeMetrics, StageClock
from edgellm_ros.runtime.opening import Opening
from edgellm_ros.runtime.policy.camera_engine import CameraEngine
from edgellm_ros.runtime.policy.sequence import PolicySequence
from edgellm_ros.runtime.request import LLMGenerationRequest


class DiffusionEngines:
    """Encoders of observations, and the U-Net; see `PolicyEngines`."""

    def __init__(self, opening: Opening, config: DiffusionConfig, metrics: RuntimeMetrics) -> None:
        self._config = config
        self._metrics = metrics
        device = opening.device
        self._encoder = CameraEngine(opening, PREFIX, config, config.cameras)
        self._action = ActionRunner(
            opening.policy_engine("action"),
            DiffusionHead(config),
            device,
            load_kernels(device),
            opening.config.builder.max_action_samples,
        )
        if not opening.options.cuda_graphs:
            self._action.stop_recording()

    def tokens(self, request: LLMGenerationRequest, state: np.ndarray | None) -> list[int]:
        most = self._config.schedule.train_steps
        if request.denoise_steps is not None and request.denoise_steps > most:
            raise ValueError(
                f"denoise_steps must be at most {most}, the steps of the policy's training, got "
                f"{request.denoise_steps}"
            )
        self._encoder.tell_unused(request)
        return []

    def rows(self, images: Sequence[np.ndarray], tokens: int) -> int:
        self._encoder.check(images)
        return self._config.max_prefix_rows

    def compute(self, sequence: PolicySequence, clock: StageClock) -> np.ndarray | None:
        config, metrics = self._config, self._metrics
        if not sequence.report("vision", 0):
            return None
        self._encoder.run(sequence, metrics.multimodal)
        clock.end("vision_s")
        condition = PrefixContext({CONDITION: self._encoder.tensors[CONDITION]}, {})
        steps = sequence.request.denoise_steps or config.num_denoise_steps
        report = partial(sequence.report, "action")
        values = self._action.execute(condition, sequence.samples, steps, sequence.noise_seed, report)
        clock.end("action_s")
        if values is None:
            return None
        metrics.action.total_runs += steps
        # the first ones are for the times of the older observations
        return values[:, config.first_action : config.first_action + config.action_space.horizon]
