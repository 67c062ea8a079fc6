# SPDX-License-Identifier: Apache-2.0
"""Imports LeRobot's policies from an installation without their dependencies.

The modules in UNRELATED load recordings, train, or drive a gymnasium, or declare operators that ResNets do
not have: no line of theirs runs when a policy computes actions. They are replaced by empty modules, whose
names are empty classes.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

UNRELATED = (
    "datasets",
    "imageio",
    "lerobot.configs.train",
    "lerobot.datasets",
    "lerobot.processor.gym_action_processor",
    "lerobot.processor.hil_processor",
    "torchvision._meta_registrations",
)


class _Empty(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (), {}))
        return self.__dict__[name]


class EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of these names, and all inside them: empty ones."""

    def __init__(self, modules: tuple[str, ...] = UNRELATED) -> None:
        self._modules = modules

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(name == module or name.startswith(f"{module}.") for module in self._modules):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


def add_policies_of_lerobot() -> None:
    """Put `lerobot.policies` in place, without the policies that it would import.

    Those of all models need more packages. ModuleNotFoundError if LeRobot is not on the path.
    """
    lerobot = importlib.import_module("lerobot")
    policies = types.ModuleType("lerobot.policies")
    policies.__path__ = [str(Path(lerobot.__path__[0]) / "policies")]
    sys.modules["lerobot.policies"] = policies
