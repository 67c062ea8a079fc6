# SPDX-License-Identifier: Apache-2.0
"""Reads NVIDIA's layout, which has the statistics of all embodiments."""

from __future__ import annotations

from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection, read_section
from edgellm_ros.builder.policies.groot.cameras import read_crop
from edgellm_ros.builder.policies.groot.embodiment import Embodiment
from edgellm_ros.builder.policies.groot.source import Source
from edgellm_ros.builder.policies.groot.version import VERSIONS
from edgellm_ros.builder.policies.lerobot import MOST_STEPS
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.echo import quoted

PROCESSOR, STATISTICS, EMBODIMENTS = "processor_config.json", "statistics.json", "embodiment_id.json"


def read_nvidia(checkpoint: Path, config: ConfigSection, weights: Weights, tag: str | None) -> Source:
    """Read a checkpoint; tag: of the embodiment, None: the only one."""
    settings = read_section(checkpoint / PROCESSOR).section("processor_kwargs")
    embodiment, version = find_embodiment(checkpoint, settings, tag), VERSIONS[config.text("model_type")]
    return Source(
        version=version,
        model=config,
        weights=weights,
        embodiment=embodiment,
        cameras=embodiment.keys("video"),
        frames=embodiment.frames,
        crop=read_crop(settings, version),
        plain_words=settings.flag("formalize_language", True),
        denoise_steps=config.size("num_inference_timesteps", 4, MOST_STEPS),
        named=False,
    )


def find_embodiment(checkpoint: Path, settings: ConfigSection, tag: str | None) -> Embodiment:
    """Find an embodiment in the files of a checkpoint; None: the only one.

    ValueError, which lists those that have statistics and encoders, for another one, and for None if there
    are several.
    """
    configs = settings.section("modality_configs")
    statistics, numbers = (read_section(checkpoint / file) for file in (STATISTICS, EMBODIMENTS))
    known = [each for each in configs.data if statistics.has(each) and numbers.has(each)]
    if not known:
        raise ValueError(
            f"{checkpoint}: no embodiment has modality_configs in {PROCESSOR}, and an entry in {STATISTICS} "
            f"and {EMBODIMENTS}"
        )
    listed = ", ".join(known)
    if tag is None and len(known) == 1:
        tag = known[0]
    if tag is None:
        raise ValueError(
            f"{checkpoint}: its embodiments differ in encoders, cameras and statistics: name one "
            f"(--embodiment): {listed}"
        )
    if tag not in known:
        raise ValueError(
            f"{checkpoint}: --embodiment {quoted(tag)}: expected one with modality_configs in {PROCESSOR}, "
            f"and an entry in {STATISTICS} and {EMBODIMENTS}: {listed}"
        )
    number = numbers.integer(tag)
    if number < 0:
        raise numbers.fail(tag, "expected at least 0")
    return Embodiment(
        tag=tag,
        number=number,
        modalities=configs.section(tag),
        statistics=statistics.section(tag),
        percentiles=settings.flag("use_percentiles", False),
        relative=settings.flag("use_relative_action", False),
        clips=settings.flag("clip_outliers", True),
        sines=settings.flag("apply_sincos_state_encoding", False),
        exact=False,
    )
