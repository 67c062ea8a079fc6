# SPDX-License-Identifier: Apache-2.0
"""The head of GR00T.

The actions attend to keys and values of images and of text, which the prefix computes.

Source of the model: LeRobot 0.6.1, policies/groot.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edgellm_ros.diffusion.action_head import BoundContext, PrefixContext
from edgellm_ros.diffusion.groot_config import GrootConfig
from edgellm_ros.diffusion.groot_space import GrootActionSpace
from edgellm_ros.diffusion.samplers import NOISE_AT_0


class GrootHead:
    """GR00T with one configuration; see `PolicyHead`."""

    sampler = NOISE_AT_0

    def __init__(self, config: GrootConfig) -> None:
        self.config = config
        self.space = GrootActionSpace(config.action_space)
        self.shape = config.action_space.model_horizon, config.action_space.model_dim

    def bind(self, context: PrefixContext) -> BoundContext:
        return BoundContext(dict(context.tensors), dict(context.dims))

    def prompt(self, task: str, state: np.ndarray) -> str:
        config, text = self.config, task or self.config.no_task
        if config.plain_words:
            text = "".join(each for each in text.lower() if each.isalnum() or each.isspace() or each == "_")
        return f"{config.task_before}{text}{config.task_after}"

    def prefix_rows(self, images: int, tokens: int) -> int:
        return images + tokens

    def prefix_inputs(self, state: np.ndarray) -> Mapping[str, np.ndarray]:
        return {"state": state}
