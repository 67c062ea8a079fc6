# SPDX-License-Identifier: Apache-2.0
"""Imports LeRobot's policies from an installation without their dependencies.

The installation is apart from this package. The modules in UNRELATED load recordings, train, or drive a
gymnasium, or declare operators that ResNets do not have: no line of theirs runs when a policy computes
actions. They are replaced by empty modules, whose names are empty classes.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

INSTALLED = Path(sys.prefix) / "lerobot"
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
    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (), {}))
        return self.__dict__[name]


class _EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, modules: tuple[str, ...]) -> None:
        self._modules = modules

    def find_spec(self, name, path=None, target=None):
        if any(name == module or name.startswith(f"{module}.") for module in self._modules):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Empty(spec.name)

    def exec_module(self, module):
        module.__path__ = []


def emptied_modules(more: tuple[str, ...] = ()) -> importlib.abc.MetaPathFinder:
    """Return what finds empty modules of the names in UNRELATED and `more`."""
    return _EmptyModules((*UNRELATED, *more))


@contextmanager
def _importable() -> Iterator[None]:
    finder = emptied_modules()
    sys.meta_path.insert(0, finder)
    sys.path.insert(0, str(INSTALLED))
    try:
        lerobot = importlib.import_module("lerobot")
        # lerobot.policies imports the policies of all models, and what they need
        policies = types.ModuleType("lerobot.policies")
        policies.__path__ = [str(Path(lerobot.__path__[0]) / "policies")]
        sys.modules["lerobot.policies"] = policies
        yield
    finally:
        sys.path.remove(str(INSTALLED))
        sys.meta_path.remove(finder)
        packages = ("datasets", "diffusers", "imageio", "torchvision")
        for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
            del sys.modules[name]  # others ask whether these packages are there


def _import(folder: str, names: tuple[str, ...]) -> tuple[types.ModuleType, ...]:
    """Import modules of a policy's folder.

    The test is skipped if LeRobot is not installed.
    """
    if not INSTALLED.is_dir():
        pytest.skip(f"{INSTALLED} has no LeRobot: make parity installs it")
    if f"{folder}.{names[-1]}" not in sys.modules:
        with _importable():
            return tuple(importlib.import_module(f"{folder}.{name}") for name in names)
    return tuple(sys.modules[f"{folder}.{name}"] for name in names)


def smolvla() -> tuple[types.ModuleType, ...]:
    """Import three modules of LeRobot's SmolVLA.

    The modules are `modeling_smolvla`, `smolvlm_with_expert` and `processor_smolvla`.
    """
    return _import(
        "lerobot.policies.smolvla", ("modeling_smolvla", "smolvlm_with_expert", "processor_smolvla")
    )


def diffusion() -> tuple[types.ModuleType, ...]:
    """Import `modeling_diffusion` and `processor_diffusion` of Diffusion Policy."""
    return _import("lerobot.policies.diffusion", ("modeling_diffusion", "processor_diffusion"))


def act() -> tuple[types.ModuleType, ...]:
    """Import the modules `modeling_act` and `processor_act` of LeRobot's ACT."""
    return _import("lerobot.policies.act", ("modeling_act", "processor_act"))


def pi(kind: str) -> tuple[types.ModuleType, ...]:
    """Import three modules of LeRobot's pi0 or pi0.5 ("pi05").

    The modules are `configuration_*`, `modeling_*` and `processor_*`. The model itself needs changes to
    transformers.
    """
    names = tuple(f"{name}_{kind}" for name in ("configuration", "modeling", "processor"))
    return _import(f"lerobot.policies.{kind}", names)
