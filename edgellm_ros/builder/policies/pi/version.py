# SPDX-License-Identifier: Apache-2.0
"""Tells which LeRobot a pi0 or pi0.5 was trained with.

LeRobot 0.5.0 changed what surrounds an image that is not square (-1, before -3), and which numbers of the
state a prompt of pi0.5 has (those of the robot, before 32). Neither is in a configuration.
"""

from __future__ import annotations

from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection, read_section
from edgellm_ros.builder.policies.processors import PREPROCESSOR, RELATIVE, read_steps
from edgellm_ros.engine_directory.choices import LEROBOTS

LeRobotVersion = str  # one of LEROBOTS
OLD, NEW = LEROBOTS
TRAINING = "train_config.json"
SINCE_0_5, SINCE_0_5_1 = "cudnn_deterministic", "use_relative_actions"  # keys of TRAINING and config.json


def find_version(checkpoint: Path, config: ConfigSection, given: LeRobotVersion | None) -> LeRobotVersion:
    """Find the version: the given one, or the one that the folder tells.

    ValueError, which names the option, for a folder that does not tell, or whose files differ.
    """
    if given is not None:
        return given
    found = {}
    if SINCE_0_5_1 in config.data:
        found[config.where] = NEW
    if any(step.name == RELATIVE for step in read_steps(checkpoint / PREPROCESSOR)):
        found[PREPROCESSOR] = NEW
    if (checkpoint / TRAINING).is_file():
        training = read_section(checkpoint / TRAINING)
        found[TRAINING] = NEW if SINCE_0_5 in training.data else OLD
    if not found:
        raise config.fail(
            "type",
            "LeRobot 0.4 and 0.5 prepare images and prompts of this policy differently, and nothing in the "
            "folder tells which one it was trained with: name it (--lerobot 0.4, or 0.5 for later ones and "
            "for weights of openpi)",
        )
    if len(set(found.values())) > 1:
        told = ", ".join(f"{Path(file).name}: {version}" for file, version in found.items())
        raise config.fail("type", f"its files are of different LeRobots ({told}): name one (--lerobot)")
    return next(iter(found.values()))
