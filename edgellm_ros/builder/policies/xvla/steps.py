# SPDX-License-Identifier: Apache-2.0
"""Reads the steps of an X-VLA's processors.

Sources: LeRobot 0.4.4 and 0.6.1, policies/xvla/processor_xvla.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.policies.processors import (
    DEVICE,
    DOMAIN,
    IMAGE_TO_FLOAT,
    IMAGENET,
    NORMALIZER,
    POSTPROCESSOR,
    PREPROCESSOR,
    RENAMER,
    SUPPORTED,
    TO_AXIS_ANGLE,
    TO_BATCH,
    TOKENIZER,
    UNNORMALIZER,
    check_steps,
    read_steps,
)

NEEDED = TOKENIZER, IMAGENET, DOMAIN  # without them the policy would have other inputs


@dataclass(frozen=True)
class Steps:
    """What the processors of an X-VLA do."""

    renamed: dict[str, str]  # observations: the policy's name -> the robot's
    domain: int
    is_target: bool  # whether actions become targets of the arm's tip


def read_xvla_steps(checkpoint: Path, config: ConfigSection, domains: int) -> Steps:
    """Read the steps of both processors.

    domains: how many the policy has. FileNotFoundError if there are no processors; the errors of
    `check_steps`, and ValueError if a needed step is missing.
    """
    for file in (PREPROCESSOR, POSTPROCESSOR):
        if not (checkpoint / file).is_file():
            raise FileNotFoundError(f"{checkpoint / file} not found: LeRobot saves it with an X-VLA")
    before, after = (SUPPORTED[file] for file in (PREPROCESSOR, POSTPROCESSOR))
    own = {
        PREPROCESSOR: {
            **{name: before[name] for name in (RENAMER, TO_BATCH)},
            TOKENIZER: _check_tokenizer,
            IMAGE_TO_FLOAT: _check_images,
            IMAGENET: _check_images,
            DOMAIN: _check_domain,
            **{name: before[name] for name in (DEVICE, NORMALIZER)},
        },
        POSTPROCESSOR: {
            UNNORMALIZER: after[UNNORMALIZER],
            TO_AXIS_ANGLE: _check_rotation,
            DEVICE: after[DEVICE],
        },
    }
    renamed = check_steps(checkpoint, config, TOKENIZER, own)
    steps = {step.name: step.settings for step in read_steps(checkpoint / PREPROCESSOR)}
    missing = next((name for name in NEEDED if name not in steps), None)
    if missing is not None:
        raise ValueError(
            f"{checkpoint / PREPROCESSOR}: no step {missing}: the policy's inputs would be others; add it if "
            "the program of the training did the same before the processor"
        )
    domain = steps[DOMAIN].integer("domain_id")
    if not 0 <= domain < domains:
        raise steps[DOMAIN].fail("domain_id", f"expected from 0 to {domains - 1} (num_domains)")
    after_steps = read_steps(checkpoint / POSTPROCESSOR)
    return Steps(renamed, domain, any(step.name == TO_AXIS_ANGLE for step in after_steps))


def _check_tokenizer(settings: ConfigSection, config: ConfigSection) -> None:
    length = config.size("tokenizer_max_length", 64)
    settings.one_of("max_length", [length], default=512)
    settings.one_of("padding", ["max_length"], default="max_length")
    settings.one_of("padding_side", ["right"], default="right")
    settings.one_of("task_key", ["task"], default="task")
    if settings.has("tokenizer_name"):
        expected = config.text("tokenizer_name") if config.has("tokenizer_name") else "facebook/bart-large"
        settings.one_of("tokenizer_name", [expected])


def _check_images(settings: ConfigSection, config: ConfigSection) -> None:
    settings.one_of("image_keys", [None])
    settings.flag("validate_range", default=True)


def _check_domain(settings: ConfigSection, config: ConfigSection) -> None:
    settings.integer("domain_id")


def _check_rotation(settings: ConfigSection, config: ConfigSection) -> None:
    settings.integer("expected_action_dim", 10)
