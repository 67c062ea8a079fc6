# SPDX-License-Identifier: Apache-2.0
"""Writes the engine directory of a policy on another computer.

The directory has a `config.json` and no graphs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgellm_ros.builder.exporter.export import clear_engine
from edgellm_ros.builder.exporter.plan import NO_TOKENS
from edgellm_ros.diffusion.openpi_config import OpenPiConfig
from edgellm_ros.diffusion.policy_config import AffineSpaceConfig, StateConfig
from edgellm_ros.engine_directory.builder_config import BuilderConfig
from edgellm_ros.engine_directory.config import FORMAT_VERSION, EngineConfig, GenerationDefaults


def physical_state(names: tuple[str, ...]) -> StateConfig | None:
    """Return a state that the other computer normalises; None without names."""
    if not names:
        return None
    return StateConfig(**_identity(names, ("",) * len(names)), model_dim=len(names))


def physical_actions(
    names: tuple[str, ...], units: tuple[str, ...], *, dt: float, horizon: int
) -> AffineSpaceConfig:
    """Return actions that the other computer has put into their units."""
    relative = (False,) * len(names)
    return AffineSpaceConfig(
        **_identity(names, units), dt=dt, horizon=horizon, model_dim=len(names), relative=relative
    )


def write_remote_policy(policy: OpenPiConfig, engine_dir: str | Path) -> EngineConfig:
    """Write the directory, in place of an engine that is there."""
    rows = policy.max_prefix_rows
    no_llm: Any = None  # as of every policy without one
    config = EngineConfig(
        format_version=FORMAT_VERSION,
        model_type=policy.kind,
        precision="fp32",
        llm=no_llm,
        builder=BuilderConfig(
            max_batch_size=1, max_input_len=rows, max_kv_cache_capacity=rows + 1, max_action_samples=1
        ),
        vision=None,
        audio=None,
        action=policy,
        draft=None,
        special_tokens=NO_TOKENS,
        stop_token_ids=(),
        generation=GenerationDefaults(),
        files=(),
    )
    clear_engine(Path(engine_dir))
    config.save(engine_dir)
    return config


def _identity(names: tuple[str, ...], units: tuple[str, ...]) -> dict[str, tuple]:
    zeros = (0.0,) * len(names)
    return {"names": names, "units": units, "offset": zeros, "scale": (1.0,) * len(names), "shift": zeros}
