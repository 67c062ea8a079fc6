# SPDX-License-Identifier: Apache-2.0
"""The folder of a policy and its processors, as LeRobot writes and reads it."""

from __future__ import annotations

import copy
import json
from pathlib import Path

from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.processor import PolicyProcessorPipeline
from lerobot.processor.converters import policy_action_to_transition, transition_to_policy_action

from training.arm.act import Act
from training.arm.kind import PolicyKind, Processors
from training.arm.smolvla import SmolVla

KINDS: dict[str, PolicyKind] = {kind.name: kind for kind in (Act(), SmolVla())}


def save_policy(directory: Path, policy: PreTrainedPolicy, processors: Processors) -> None:
    """Write the folder as LeRobot does: configuration, weights in float16, processors."""
    copy.deepcopy(policy).half().save_pretrained(directory)
    for processor in processors:
        processor.save_pretrained(directory)


def load_policy(directory: Path, device: str) -> tuple[PreTrainedPolicy, Processors]:
    """Load a policy and its processors as LeRobot does.

    FileNotFoundError if the folder has no config.json, ValueError if its policy is none of KINDS.
    """
    file = directory / "config.json"
    name = json.loads(file.read_text()).get("type")
    if name not in KINDS:
        raise ValueError(f"{file}: expected the type {' or '.join(KINDS)}, got {name!r}")
    config = PreTrainedConfig.from_pretrained(directory)
    config.device = device
    policy, changes = KINDS[name].load(directory, config)
    before = PolicyProcessorPipeline.from_pretrained(
        directory,
        config_filename="policy_preprocessor.json",
        overrides={"device_processor": {"device": device}, **changes},
    )
    after = PolicyProcessorPipeline.from_pretrained(
        directory,
        config_filename="policy_postprocessor.json",
        to_transition=policy_action_to_transition,
        to_output=transition_to_policy_action,
    )
    return policy, (before, after)
