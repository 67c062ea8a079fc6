# SPDX-License-Identifier: Apache-2.0
"""Rows of the table about a policy's inputs."""

from __future__ import annotations

from edgellm_ros.diffusion.diffusion_policy_config import DiffusionConfig
from edgellm_ros.diffusion.groot_config import CroppedCameraConfig, GrootConfig
from edgellm_ros.diffusion.openpi_config import OpenPiConfig
from edgellm_ros.diffusion.policy_config import (
    CameraConfig,
    FixedCameraConfig,
    FlowPolicyConfig,
    GridCameraConfig,
    PaddedCameraConfig,
    PolicyConfig,
)


def policy_rows(policy: PolicyConfig) -> list[tuple[str, str]]:
    """Make the rows about state, cameras, and what actions depend on."""
    rows = [
        ("state", "none" if policy.state is None else ", ".join(policy.state.names)),
        ("cameras", _cameras(policy.cameras)),
    ]
    if isinstance(policy, OpenPiConfig):
        return [*rows, ("server", f"{policy.url}, which computes the actions: no engine is here")]
    if not isinstance(policy, DiffusionConfig):
        rows.append(("prefix", f"{policy.max_prefix_rows} rows{_task_rows(policy)}"))
        return [*rows, ("embodiment", policy.embodiment)] if isinstance(policy, GrootConfig) else rows
    schedule, steps = policy.schedule, policy.num_denoise_steps
    return [
        *rows,
        ("observations", f"{policy.num_observations}, {policy.action_space.dt:.3g} s apart"),
        ("sampler", f"{schedule.sampler}, {steps} of {schedule.train_steps} steps"),
    ]


def _cameras(cameras: CameraConfig) -> str:
    """Format a policy's cameras with the sizes of their images.

    Sizes are height x width in pixels.
    """
    if isinstance(cameras, CroppedCameraConfig):
        crop = cameras.crop
        side = f"short side {crop.short_side}" if crop.short_side else f"{crop.height}x{crop.width}"
        return f"{', '.join(cameras.names)}: at most {cameras.tokens} rows each, from {side} px"
    if isinstance(cameras, PaddedCameraConfig):
        size = cameras.image_size
        return f"{', '.join(cameras.names)}: {cameras.tokens} rows each, from {size}x{size} px"
    if isinstance(cameras, FixedCameraConfig):
        sizes = zip(cameras.names, cameras.heights, cameras.widths, strict=True)
        told = [f"{name} {height}x{width} px" for name, height, width in sizes]
        if isinstance(cameras, GridCameraConfig):
            told = [f"{each}: {rows} rows" for each, rows in zip(told, cameras.tokens, strict=True)]
        return ", ".join(told)
    return ", ".join(cameras.names)


def _task_rows(policy: PolicyConfig) -> str:
    """Tell how many rows of a policy's prefix are for the task."""
    return (
        f", {policy.max_prompt_tokens} of them for the task" if isinstance(policy, FlowPolicyConfig) else ""
    )
