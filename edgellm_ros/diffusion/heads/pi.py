# SPDX-License-Identifier: Apache-2.0
"""The heads of pi0 and pi0.5.

The actions attend to keys and values of a prefix of images and prompt. pi0 takes the state as a row beside
the actions, pi0.5 as numbers in the prompt.

Source of the models: LeRobot 0.4.4 and 0.6.1, policies/pi0 and policies/pi05.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edgellm_ros.diffusion.action_head import BoundContext, PrefixContext
from edgellm_ros.diffusion.affine_space import AffineActionSpace
from edgellm_ros.diffusion.heads.prompt_text import cleaned, line, state_bins
from edgellm_ros.diffusion.policy_config import FlowPolicyConfig, Pi0Config, Pi05Config
from edgellm_ros.diffusion.samplers import NOISE_AT_1


class _PiHead:
    """What pi0 and pi0.5 have in common; see `PolicyHead`."""

    sampler = NOISE_AT_1

    def __init__(self, config: FlowPolicyConfig) -> None:
        self.config = config
        self.space = AffineActionSpace(config.action_space)
        self.shape = config.action_space.horizon, config.action_space.model_dim

    def bind(self, context: PrefixContext) -> BoundContext:
        return BoundContext(dict(context.tensors), dict(context.dims))

    def prefix_rows(self, images: int, tokens: int) -> int:
        return images + tokens


class Pi0Head(_PiHead):
    """pi0 with one configuration."""

    config: Pi0Config

    def prompt(self, task: str, state: np.ndarray) -> str:
        return line(cleaned(task) if self.config.cleaned else task)

    def prefix_inputs(self, state: np.ndarray) -> Mapping[str, np.ndarray]:
        return {"state": state}


class Pi05Head(_PiHead):
    """pi0.5 with one configuration."""

    config: Pi05Config

    def prompt(self, task: str, state: np.ndarray) -> str:
        if not self.config.prompted_values:
            return line(cleaned(task) if self.config.cleaned else task)
        numbers = " ".join(map(str, state_bins(state[0, : self.config.prompted_values])))
        return f"Task: {cleaned(task)}, State: {numbers};\nAction: "

    def prefix_inputs(self, state: np.ndarray) -> Mapping[str, np.ndarray]:
        return {}
