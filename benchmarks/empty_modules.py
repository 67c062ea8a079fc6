# SPDX-License-Identifier: Apache-2.0
"""Imports LeRobot's policies from an installation without their dependencies.

The modules in UNRELATED load recordings, train, or drive a gymnasium, or declare operators that ResNets do
not have: no line of theirs runs when a policy computes actions. They are replaced by empty modules, whose
names are empty classes.

A program that imports LeRobot's policies runs like this, with the folder of LeRobot on PYTHONPATH:

    python -m benchmarks.empty_modules MODULE [ARGUMENTS]
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import runpy
import sys
import types
from collections.abc import Callable, Sequence
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


def import_groot(name: str) -> types.ModuleType:
    """Import LeRobot's module of the GR00T N1.7.

    What its extra `groot` installs is replaced if dm-tree is not there: chunks need none of it.
    """
    if importlib.util.find_spec("tree") is not None:
        return importlib.import_module(name)
    sys.meta_path.insert(0, EmptyModules())
    add_policies_of_lerobot()
    folder = name.rpartition(".")[0]
    package = types.ModuleType(folder)  # whose __init__ is not needed
    policies = sys.modules["lerobot.policies"]
    package.__path__ = [str(Path(path) / folder.rpartition(".")[2]) for path in policies.__path__]
    sys.modules[folder] = package
    module = importlib.import_module(name)
    for each in (module, importlib.import_module(f"{folder}.action_head.cross_attention_dit")):
        vars(each)["require_package"] = lambda *args, **kwargs: None
    vars(module)["tree"] = types.SimpleNamespace(map_structure=_changed)
    return module


def _changed(change: Callable[[Any], Any], batch: Any) -> Any:
    """Change the values of a flat batch."""
    return type(batch)({name: change(value) for name, value in batch.items()})


def add_policies_of_lerobot() -> None:
    """Put `lerobot.policies` in place, without the policies that it would import.

    Those of all models need more packages. ModuleNotFoundError if LeRobot is not on the path.
    """
    lerobot = importlib.import_module("lerobot")
    policies = types.ModuleType("lerobot.policies")
    policies.__path__ = [str(Path(lerobot.__path__[0]) / "policies")]
    sys.modules["lerobot.policies"] = policies


if __name__ == "__main__":
    if len(sys.argv) == 1:
        raise SystemExit("usage: python -m benchmarks.empty_modules MODULE [ARGUMENTS]")
    sys.meta_path.insert(0, EmptyModules())
    add_policies_of_lerobot()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
