# SPDX-License-Identifier: Apache-2.0
"""Model families: each folder here reads the checkpoints of one family.

A family also builds the graphs. To add a family, add a folder whose `__init__.py` has a `FAMILY`; no other
code names a family.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection, MixtureOfExpertsError
from edgellm_ros.builder.config.known_policies import hint, is_policy
from edgellm_ros.builder.config.unsupported import find_experts
from edgellm_ros.builder.families.model import Model
from edgellm_ros.builder.weights.weights import Weights


@dataclass(frozen=True)
class Family:
    """A model family."""

    name: str
    model_types: tuple[str, ...]  # values of `model_type` in config.json
    # Reads a checkpoint (directory, `config.json`, weights). ValueError or FileNotFoundError, which names
    # file, key and value, for a checkpoint that the graphs would compute differently.
    read: Callable[[Path, ConfigSection, Weights], Model]


_registered: list[Family] = []


def families() -> list[Family]:
    """List the families: one per folder here, and those registered at run time."""
    folders = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.ispkg)
    return [importlib.import_module(f"{__name__}.{name}").FAMILY for name in folders] + _registered


def find_family(config: ConfigSection) -> Family:
    """Find the family of a checkpoint by `model_type`.

    ValueError lists the supported types, and names the nearest or says which policy it is;
    MixtureOfExpertsError if the model is of no family and has experts.
    """
    by_type = {model_type: family for family in families() for model_type in family.model_types}
    model_type = config.text("model_type")
    if model_type in by_type:
        return by_type[model_type]
    experts = find_experts(config)
    if experts and not is_policy(model_type):
        raise MixtureOfExpertsError(f"{experts}; model_type {model_type!r} is not supported either")
    more = hint(model_type) or _nearest(model_type, by_type)
    raise config.fail("model_type", f"supported: {', '.join(sorted(by_type))}{more}")


def _nearest(model_type: str, known: Iterable[str]) -> str:
    names = difflib.get_close_matches(model_type, known, 1)
    return f"; the nearest is {names[0]}" if names else ""


@contextmanager
def registered(family: Family) -> Iterator[None]:
    """Register an external family for the duration of a `with` block."""
    _registered.append(family)
    try:
        yield
    finally:
        _registered.remove(family)
