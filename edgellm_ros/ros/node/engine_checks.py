# SPDX-License-Identifier: Apache-2.0
"""Values of parameters that not every engine can plan with."""

from __future__ import annotations

from typing import Any

from edgellm_ros.echo import quoted
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.engine_directory.navigation import guidance_problem, navigation_problem
from edgellm_ros.engine_directory.parts import VISUAL
from edgellm_ros.ros.camera_topic import camera_names
from edgellm_ros.ros.node.planning.chunking import chunking_problem
from edgellm_ros.ros.node.sensors.joint_states import state_joints
from edgellm_ros.ros.node.settings.parameters import SPECS, Parameters
from edgellm_ros.runtime.adapters.lora import canonical_name
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.sampling_params import SAMPLED

# Parameters of answers in words, which a policy does not give.
OF_WORDS = ("system_prompt", "seed", "max_tokens", *SAMPLED, "json_schema", "regex", "choices")
NAVIGATION = "navigation", "guidance"
# Parameters with values that some engines do not take.
CHECKED = ("chunking", "plan_on", "action_samples", *OF_WORDS)

MOST_PLANS = 4  # at once by default: more share the computer's cores


def check_before_loading(parameters: Parameters, config: EngineConfig) -> None:
    """Check parameters that only some kinds of engines take.

    ValueError for cameras or joints that do not fit the engine, for instructions of navigation or guidance
    that it does not take, and for adapters of a policy or OpenAI's API in front of one.
    """
    camera_names(parameters.cameras, config.policy)
    state_joints(parameters.state_joints, config.policy)
    for name in NAVIGATION:
        problem = _navigation_problem(name, getattr(parameters, name), config)
        if problem:
            raise ValueError(f"parameter {problem}")
    if config.policy is None:
        return
    if parameters.serve_port:
        config.check_answers_with_text("parameter serve_port")
    language_model = {
        "lora": canonical_name(parameters.lora),
        "loras": [name for name in parameters.loras if name],
        "prefix_cache_file": parameters.prefix_cache_file,
    }
    for name, value in language_model.items():
        if value:
            raise ValueError(f"parameter {_needs_words(name, config.policy.kind)}: leave it empty")


def plans_at_once(wanted: int, config: EngineConfig, rows: int) -> int:
    """Return how many plans run at once, by the parameter `max_concurrent_plans`.

    rows: of the batch, that the node may use.
    """
    if wanted:
        return wanted
    return 1 if config.policy is not None else min(rows, MOST_PLANS)


def engine_problem(name: str, value: Any, runtime: LLMInferenceRuntime) -> str:
    """Return why an engine cannot plan with a parameter's value; empty if it can."""
    config, blind = runtime.config, runtime.parts.missing(VISUAL)
    if name in OF_WORDS:
        return "" if config.policy is None else _words_problem(name, value, config.policy.kind)
    if name in NAVIGATION:
        return _navigation_problem(name, value, config)
    if name == "chunking":
        return chunking_problem(value, config)
    if name == "plan_on" and value == "image" and blind:
        return f"plan_on must be command: {blind}, got 'image'"
    most = config.builder.max_action_samples
    if name == "action_samples" and config.action is not None and value > most:
        return f"action_samples must be from 0 to {most}, max_action_samples of the engine, got {value}"
    return ""


def _navigation_problem(name: str, value: Any, config: EngineConfig) -> str:
    """Return why an engine cannot plan with a parameter of NAVIGATION.

    Empty if it can.
    """
    if name == "navigation":
        problem = navigation_problem(config) if value else ""
        return f"navigation must be false: {problem}, got true" if problem else ""
    problem = guidance_problem(config) if value >= 0 else ""
    return f"guidance must be -1: {problem}, got {value:g}" if problem else ""


def _words_problem(name: str, value: Any, kind: str) -> str:
    """Return why a policy cannot heed a parameter of OF_WORDS; empty for its default."""
    default = SPECS[name].default
    if name in SAMPLED:
        is_default = value < 0
    elif isinstance(default, list):
        is_default = not any(value)
    else:
        is_default = value == default
    if is_default:
        return ""
    return f"{_needs_words(name, kind)}: leave it at {default!r}, got {quoted(value)}"


def _needs_words(name: str, kind: str) -> str:
    return f"{name} needs an engine with a language model; this one is a policy ({kind})"
