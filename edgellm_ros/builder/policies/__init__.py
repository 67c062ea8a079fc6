# SPDX-License-Identifier: Apache-2.0
"""Policies: each folder here reads the checkpoints of one type of policy.

LeRobot saves these checkpoints. A policy answers with actions only. It also builds the graphs. To add a
policy, add a folder whose `__init__.py` has a `POLICY`; no other code names a policy.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.config.known_policies import OPENPI, hint, is_policy
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.diffusion.policy_config import PolicyConfig
from edgellm_ros.engine_directory.language_model_config import LanguageModelConfig


@dataclass(frozen=True)
class PolicySources:
    """Folders beside the checkpoint that the user has named."""

    vlm: Path | None  # configuration and tokenizer of the vision language model
    dataset: Path | None  # `meta` of a LeRobot data set
    lerobot: str | None = None  # the version that the policy was trained with
    embodiment: str | None = None  # of a policy for several


@dataclass(frozen=True, eq=False)
class LargeLayers:
    """The linear layers and tables of words that have most of a policy's weights.

    `quantize` and `cpu_int8` round them. No graph reads other matrices of these modules.
    """

    weights: Weights  # those that the graphs read
    modules: tuple[str, ...]


@dataclass(frozen=True)
class PolicyModel:
    """One checkpoint, read by its policy."""

    config: PolicyConfig
    llm: LanguageModelConfig | None  # the layers of the prefix; None without a language model
    tokenizer: bytes | None  # contents of tokenizer.json; None for a policy without text
    parts: Mapping[str, Callable[[str], ModelBuilder]]
    # ^ folder in the engine directory ("visual", "prefix", "action") -> function of the precision
    cuda_parts: Mapping[str, Callable[[str], ModelBuilder]] = field(default_factory=dict)
    # ^ the same for the parts with another graph for ONNX Runtime's CUDA provider; its weights are the same
    layers: LargeLayers | None = None  # None if convolutions are most of the work
    cuda_only: Mapping[str, Callable[[str], ModelBuilder]] = field(default_factory=dict)
    # ^ further graphs for that provider alone, such as "action/modulation", with weights of their folder


@dataclass(frozen=True)
class Policy:
    """A type of policy."""

    name: str  # value of `type` in LeRobot's config.json
    # Reads a checkpoint (directory, `config.json`, weights, further folders). ValueError or
    # FileNotFoundError, which names file, key and value, for one that the graphs would compute differently.
    read: Callable[[Path, ConfigSection, Weights, PolicySources], PolicyModel]
    more: tuple[str, ...] = ()  # further values of `type` that the same code reads
    lerobot: bool = False  # whether versions of LeRobot compute it differently (`PolicySources.lerobot`)
    model_types: tuple[str, ...] = ()  # values of `model_type` in config.json of its authors' own layout
    embodiments: bool = False  # whether an export chooses one of several embodiments


def policies() -> list[Policy]:
    """List the policies: one per folder here."""
    folders = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.ispkg)
    return [importlib.import_module(f"{__name__}.{name}").POLICY for name in folders]


def find_policy(config: ConfigSection) -> Policy | None:
    """Find the policy of a checkpoint by `type`.

    None if `config.json` is not that of a policy. LeRobot writes `type` and the features of inputs and
    outputs, transformers `model_type`, and so do the authors of some policies. ValueError for a type that is
    not supported, with what it is if it is known.
    """
    known = {name: policy for policy in policies() for name in (policy.name, *policy.more)}
    kind = config.data.get("type")
    if config.has("model_type"):
        own = config.data["model_type"]
        return next((policy for policy in known.values() if own in policy.model_types), None)
    if config.has(OPENPI) and not config.has("type") and not config.has("output_features"):
        return known["pi0"]
    if not config.has("output_features") and kind not in known and not is_policy(kind):
        return None
    kind = config.text("type")
    if kind in known:
        return known[kind]
    raise config.fail("type", f"supported: {', '.join(sorted(known))}{hint(kind)}")
