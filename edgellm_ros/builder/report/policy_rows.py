# SPDX-License-Identifier: Apache-2.0
"""Rows of the table about a policy's inputs."""

from __future__ import annotations

from edgellm_ros.diffusion.policy_config import (
    CameraConfig,
    FixedCameraConfig,
    FlowPolicyConfig,
    PaddedCameraConfig,
    PolicyConfig,
)


def policy_rows(policy: PolicyConfig) -> list[tuple[str, str]]:
    """Make the rows about state, cameras, and rows that actions attend to."""
    return [
        ("state", "none" if policy.state is None else ", ".join(policy.state.names)),
        ("cameras", _cameras(policy.cameras)),
        ("prefix", f"{policy.max_prefix_rows} rows{_task_rows(policy)}"),
    ]


def _cameras(cameras: CameraConfig) -> str:
    """Format a policy's cameras with the sizes of their images.

    Sizes are height x width in pixels.
    """
    if isinstance(cameras, PaddedCameraConfig):
        size = cameras.image_size
        return f"{', '.join(cameras.names)}: {cameras.tokens} rows each, from {size}x{size} px"
    if isinstance(cameras, FixedCameraConfig):
        sizes = zip(cameras.names, cameras.heights, cameras.widths, cameras.tokens, strict=True)
        return ", ".join(f"{name} {height}x{width} px: {rows} rows" for name, height, width, rows in sizes)
    return ", ".join(cameras.names)


def _task_rows(policy: PolicyConfig) -> str:
    """Tell how many rows of a policy's prefix are for the task."""
    return (
        f", {policy.max_prompt_tokens} of them for the task" if isinstance(policy, FlowPolicyConfig) else ""
    )
