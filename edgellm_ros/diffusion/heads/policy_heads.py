# SPDX-License-Identifier: Apache-2.0
"""The interface of the heads of policies with a prefix, and the choice of one.

A configuration selects the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from edgellm_ros.diffusion.action_head import ActionHead
from edgellm_ros.diffusion.groot_config import GrootConfig
from edgellm_ros.diffusion.heads.groot import GrootHead
from edgellm_ros.diffusion.heads.pi import Pi0Head, Pi05Head
from edgellm_ros.diffusion.heads.smolvla import SmolVLAHead
from edgellm_ros.diffusion.heads.xvla import XVLAHead
from edgellm_ros.diffusion.policy_config import (
    FlowPolicyConfig,
    Pi0Config,
    Pi05Config,
    SmolVLAConfig,
    XVLAConfig,
)


class PolicyHead(ActionHead, Protocol):
    """The head of a policy of `FlowPolicyConfig`, whose context is a `PrefixContext`."""

    def prompt(self, task: str, state: np.ndarray) -> str:
        """Write the text of a request that is tokenized; state [1, model_dim]: normalised."""
        ...

    def prefix_rows(self, images: int, tokens: int) -> int:
        """Return the number of rows of a prefix.

        images: rows of all images.
        """
        ...

    def prefix_inputs(self, state: np.ndarray) -> Mapping[str, np.ndarray]:
        """Return the inputs besides images, tokens and noise, by name.

        Those that the prefix engine does not have are inputs of the action engine.
        """
        ...


def make_policy_head(config: FlowPolicyConfig) -> PolicyHead:
    """Make the head of a policy."""
    if isinstance(config, GrootConfig):
        return GrootHead(config)
    if isinstance(config, SmolVLAConfig):
        return SmolVLAHead(config)
    if isinstance(config, Pi0Config):
        return Pi0Head(config)
    if isinstance(config, Pi05Config):
        return Pi05Head(config)
    if isinstance(config, XVLAConfig):
        return XVLAHead(config)
    raise ValueError(f"unknown policy {config.kind!r}")
