# SPDX-License-Identifier: Apache-2.0
"""FlowEngines: the engines of a policy with a prefix and actions from noise."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from edgellm_ros.diffusion.action_runner import ActionRunner
from edgellm_ros.diffusion.groot_config import GrootConfig
from edgellm_ros.diffusion.heads.policy_heads import make_policy_head
from edgellm_ros.diffusion.policy_config import FlowPolicyConfig, PaddedCameraConfig
from edgellm_ros.diffusion.samplers import FlowTime
from edgellm_ros.diffusion.step_tables import StepConditions
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.engine_directory.files import MODULATION, PREFIX
from edgellm_ros.kernels import Kernels, load_kernels
from edgellm_ros.runtime.metrics import RuntimeMetrics, StageClock
from edgellm_ros.runtime.opening import Opening
from edgellm_ros.runtime.policy.camera_rows import CameraRows, PaddedCameraRows
from edgellm_ros.runtime.policy.cropped_rows import CroppedCameraRows
from edgellm_ros.runtime.policy.prefix_engine import PrefixEngine
from edgellm_ros.runtime.policy.sequence import PolicySequence
from edgellm_ros.runtime.request import LLMGenerationRequest
from edgellm_ros.runtime.text.tokenizer import Tokenizer


class FlowEngines:
    """Vision tower, prefix and velocity, or prediction; see `PolicyEngines`."""

    def __init__(self, opening: Opening, config: FlowPolicyConfig, metrics: RuntimeMetrics) -> None:
        self._config = config
        self._metrics = metrics
        self._head = make_policy_head(config)
        self._tokenizer = Tokenizer(opening.root / "tokenizer.json")
        visual, prefix, action = (opening.policy_engine(part) for part in ("visual", PREFIX, "action"))
        device = opening.device
        kernels = load_kernels(device)
        self._cameras = _camera_rows(opening, config, visual, kernels)
        appends = names.LAST_ACTION_ROW in action.bindings
        self._prefix = PrefixEngine(prefix, config, device, self._head.shape[0] if appends else 0)
        conditions = None
        if names.MODULATION in action.bindings:
            assert isinstance(self._head.sampler, FlowTime)
            conditions = StepConditions(opening.policy_engine(MODULATION), device, self._head.sampler)
        samples = opening.config.builder.max_action_samples
        self._action = ActionRunner(action, self._head, device, kernels, samples, conditions=conditions)
        if not opening.options.cuda_graphs:
            self._action.stop_recording()

    def tokens(self, request: LLMGenerationRequest, state: np.ndarray | None) -> list[int]:
        config = self._config
        assert state is not None
        text = self._head.prompt(request.prompt, state)
        tokens = [*config.prompt_before, *self._tokenizer.encode(text), *config.prompt_after]
        if len(tokens) > config.max_prompt_tokens:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens; the policy takes at most {config.max_prompt_tokens}"
            )
        return tokens

    def rows(self, images: Sequence[np.ndarray], tokens: int) -> int:
        return self._head.prefix_rows(self._cameras.count(images), tokens)

    def compute(self, sequence: PolicySequence, clock: StageClock) -> np.ndarray | None:
        images, metrics = sequence.images, self._metrics
        if not sequence.report("vision", 0):
            return None
        rows = self._cameras.encode(images)  # camera frames -> rows of the prefix
        metrics.multimodal.total_images += len(images)
        metrics.multimodal.total_image_tokens += self._cameras.count(images)
        clock.end("vision_s")
        if not sequence.report("prefill", 0):
            return None
        assert sequence.state is not None
        layout = self._cameras.layout(images, len(sequence.token_ids))
        others = {**layout, **self._head.prefix_inputs(sequence.state)}
        # rows, task and state -> what actions attend to
        context = self._prefix.compute(rows, sequence.token_ids, others, sequence.prefix_rows)
        metrics.prefill.total_runs += 1
        metrics.prefill.computed_tokens += sequence.prefix_rows
        clock.end("prefill_s")
        request, samples = sequence.request, sequence.samples
        steps = request.denoise_steps or self._config.num_denoise_steps
        # noise and context -> actions
        values = self._action.execute(
            context,
            samples,
            steps,
            sequence.noise_seed,
            partial(sequence.report, "action"),
            sequence.condition,
        )
        clock.end("action_s")
        if values is not None:
            metrics.action.total_runs += steps
        return values


def _camera_rows(
    opening: Opening, config: FlowPolicyConfig, visual: EngineExecutor, kernels: Kernels
) -> CameraRows:
    """Make what turns the images of a policy into rows of its prefix."""
    if isinstance(config, GrootConfig):
        assert opening.config.llm is not None
        return CroppedCameraRows(visual, config, opening.config.llm.rope, opening.device, kernels)
    if isinstance(config.cameras, PaddedCameraConfig):
        return PaddedCameraRows(visual, config.cameras, opening.device, kernels)
    raise ValueError(f"unknown policy {config.kind!r}")
