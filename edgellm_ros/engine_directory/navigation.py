# SPDX-License-Identifier: Apache-2.0
"""What an engine needs for instructions of navigation, and for guidance by them."""

from __future__ import annotations

from edgellm_ros.engine_directory.config import EngineConfig


def navigation_problem(config: EngineConfig) -> str:
    """Return why an engine takes no instructions of navigation; empty if it does."""
    if config.expert is not None and config.expert.takes_navigation:
        return ""
    return "this engine takes no instructions of navigation"


def guidance_problem(config: EngineConfig) -> str:
    """Return why an engine cannot guide trajectories; empty if it can."""
    if config.builder.max_batch_size > 1:
        return navigation_problem(config)
    return navigation_problem(config) or (
        "guidance needs a second row for the prompt without navigation; this engine has one (max_batch_size "
        "1): export it with --max-batch-size 2"
    )


def check_navigation(config: EngineConfig, navigation: str, guidance: float | None) -> None:
    """Raise ValueError for what an engine cannot use.

    navigation: a request's instruction, "" for none; guidance: the weight of it, None for none.
    """
    if navigation and (problem := navigation_problem(config)):
        raise ValueError(f"{problem}, the request has one")
    if guidance is not None and (problem := guidance_problem(config)):
        raise ValueError(problem)
