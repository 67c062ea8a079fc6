# SPDX-License-Identifier: Apache-2.0
"""Values of parameters that not every engine can plan with."""

from __future__ import annotations

from typing import Any

from edgellm_ros.engine_directory.parts import VISUAL
from edgellm_ros.ros.node.planning.chunking import chunking_problem
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime

CHECKED = ("chunking", "plan_on", "action_samples")  # parameters with values that some engines do not take


def engine_problem(name: str, value: Any, runtime: LLMInferenceRuntime) -> str:
    """Return why an engine cannot plan with a parameter's value; empty if it can."""
    config, blind = runtime.config, runtime.parts.missing(VISUAL)
    if name == "chunking":
        return chunking_problem(value, config)
    if name == "plan_on" and value == "image" and blind:
        return f"plan_on must be command: {blind}, got 'image'"
    most = config.builder.max_action_samples
    if name == "action_samples" and config.action is not None and value > most:
        return f"action_samples must be from 0 to {most}, max_action_samples of the engine, got {value}"
    return ""
