# SPDX-License-Identifier: Apache-2.0
"""ACT as LeRobot saves it.

A ResNet, an encoder and a decoder compute actions of images and state.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.policies import Policy, PolicyModel, PolicySources
from edgellm_ros.builder.policies.act.config import read_architecture, read_policy
from edgellm_ros.builder.policies.act.graph import build_act
from edgellm_ros.builder.weights.weights import Weights


def read(checkpoint: Path, config: ConfigSection, weights: Weights, sources: PolicySources) -> PolicyModel:
    """Read a checkpoint; see `Policy`."""
    if sources.vlm is not None:
        raise config.fail("type", "a policy without a vision language model (--vlm)")
    architecture = read_architecture(checkpoint, config, weights)
    policy = read_policy(checkpoint, config, architecture, weights, sources.dataset)
    return PolicyModel(policy, None, None, {"action": partial(build_act, architecture, weights)})


POLICY = Policy("act", read)
